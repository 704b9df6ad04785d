#!/usr/bin/env bash
# OpenVINO GenAI 2026.4.1 scores a text by what its draft said, and takes right guesses of prompt lookup for certain.
#
# With `logprobs=1` the score of a text is the sum of the log probabilities of its tokens, and without drafts it is the
# one that transformers computes from the same GGUF file. Drafts leave the greedy text as it is and change its score: an
# accepted token adds what the draft model gave it, or 0 where prompt lookup guessed it, and only the last token of each
# pass adds what the target gave it. So the more of a text is copied, the likelier it looks, and a score with drafts
# compares with no score without.
#
# Seen: eight texts of 40 tokens, the same in all three cases. Largest difference from the target's score 0.00 plain,
# 4.57 with a draft model and 27.33 with prompt lookup; from the sum described above 0.00, 0.01 and 0.00. Fails if the
# scores are the target's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 \
    openvino-genai==2026.4.1 openvino==2026.4.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import gguf
import numpy as np
import openvino
import openvino_genai as genai
import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
LETTERS = ["<unk>", "<s>", "</s>", *"abcdefghij", "ab"]
WIDTH, WORDS, TOKENS = 64, len(LETTERS), 40
PARTS = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

for name, noise in (("target", 0.0), ("draft", 0.3)):  # one random model, and the same with other numbers added
    writer = gguf.GGUFWriter(f"{folder}/{name}.gguf", "llama")
    for setting, value in {
        "block_count": 1, "context_length": 512, "embedding_length": WIDTH, "feed_forward_length": WIDTH,
        "head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4, "file_type": 1,
        "tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_list": LETTERS, "token_merges": ["a b"],
        "token_types": [2, 3, 3] + [1] * (WORDS - 3), "bos_token_id": 1, "eos_token_id": 2,
    }.items():  # fmt: skip
        getattr(writer, f"add_{setting}")(value)
    numbers = np.random.default_rng(0)
    for part in ("token_embd", "output", *(f"blk.0.{part}" for part in PARTS)):
        weight, other = 0.2 * numbers.normal(size=(2, WIDTH if "blk" in part else WORDS, WIDTH))
        writer.add_tensor(f"{part}.weight", (weight + noise * other).astype(np.float16))
    for part in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{part}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Blocks(genai.StreamerBase):
    """Collects `sizes`, how many tokens each pass of the target yields."""

    def write(self, tokens: list[int] | int) -> genai.StreamingStatus:
        self.sizes.append(len(tokens) if isinstance(tokens, list) else 1)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


@torch.no_grad()
def log_probabilities(name: str, prompt: list[int], text: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
    laws = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return laws[range(len(text)), text].numpy()


genai.LLMPipeline(f"{folder}/draft.gguf", "CPU", enable_save_ov_model=True, **FLOAT32)  # a draft must be a folder
prompts = [2 * row.tolist() for row in np.random.default_rng(0).integers(3, WORDS, (8, 6))]
texts = {}
for case, parts, options in (
    ("plain", {}, {}),
    ("draft model", {"draft_model": genai.draft_model(folder, "CPU", **FLOAT32)}, {"num_assistant_tokens": 3}),
    ("prompt lookup", {"prompt_lookup": True}, {"num_assistant_tokens": 3, "max_ngram_size": 2}),
):
    cache = genai.SchedulerConfig()
    pipeline = genai.LLMPipeline(f"{folder}/target.gguf", "CPU", scheduler_config=cache, **parts, **FLOAT32)
    settings = genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, logprobs=1, **options)
    far = {"the target's": 0.0, "the one described above": 0.0}
    for number, prompt in enumerate(prompts):
        streamer = Blocks()
        streamer.sizes = []
        result = pipeline.generate(openvino.Tensor(np.array([prompt])), settings, streamer)
        text, last = list(result.tokens[0]), np.cumsum(streamer.sizes) - 1
        assert texts.setdefault(number, text) == text, f"{case}: another text"
        by_target = log_probabilities("target", prompt, text)
        described = log_probabilities("draft", prompt, text) if case == "draft model" else np.zeros(TOKENS)
        described[last] = by_target[last]
        for name, expected in zip(far, (by_target, described), strict=True):
            far[name] = max(far[name], abs(result.scores[0] - float(expected.sum())))
    print(f"{case}: largest difference of a score from", ", ".join(f"{name} {far[name]:.2f}" for name in far))
    assert far["the one described above"] < 0.05, "the score is made otherwise now"
    assert case == "plain" or far["the target's"] > 1, "the score is the target's now"
PYTHON
