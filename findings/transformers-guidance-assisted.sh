#!/usr/bin/env bash
# transformers 5.23.0 writes another greedy text with `guidance_scale` as soon as a draft assists.
#
# A greedy text does not depend on its drafts, and transformers keeps that promise with, say, `repetition_penalty`. The
# one behind `guidance_scale` has a key-value cache of its own for the unconditional text, to which each call adds one
# token. Assisted decoding calls it once for every drafted token, so the cache also collects the tokens that were
# rejected, and all later logits are guided by a text that nobody wrote. Even the model as its own draft is hit.
#
# Seen: "prompt lookup agrees on all 40 tokens" for plain text and for repetition_penalty; with guidance_scale
# "prompt lookup agrees on 1, the model itself as draft on 1 of 40 tokens". Fails if guided texts agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, TOKENS = 40, 40
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, WORDS, (1, 12)).repeat(1, 2)


def text(**options: object) -> list[int]:
    output = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, **options)
    return output[0, prompt.shape[1] :].tolist()


def agreement(first: list[int], second: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), TOKENS)


for name, options in (("plain", {}), ("repetition_penalty", {"repetition_penalty": 1.3})):
    assert text(**options) == text(prompt_lookup_num_tokens=5, **options), name
    print(f"{name}: prompt lookup agrees on all {TOKENS} tokens")
guided = text(guidance_scale=1.5)
assert guided == text(guidance_scale=1.5) != text(), "guidance is not deterministic, or does nothing"
lookup = agreement(guided, text(guidance_scale=1.5, prompt_lookup_num_tokens=5))
itself = agreement(guided, text(guidance_scale=1.5, assistant_model=model))
print(f"guidance_scale: prompt lookup agrees on {lookup}, the model itself as draft on {itself} of {TOKENS} tokens")
assert max(lookup, itself) < TOKENS, "guided texts agree now"
PYTHON
