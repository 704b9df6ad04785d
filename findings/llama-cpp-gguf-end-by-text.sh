#!/usr/bin/env bash
# One GGUF file, two ends: llama.cpp stops at a token because of its text, transformers 5.23.0 only at the header's id.
#
# The header names one end token, here id 2, and the same tiny model writes token 3 for ever. If the text of token 3 is
# `<|im_end|>`, as in base models of the Qwen family, whose headers name `<|endoftext|>`, llama.cpp (in xllamacpp
# 2026.10.11549) ends the text there, as it does at `<|endoftext|>`, `<|eot_id|>`, `<end_of_turn>` and `<|end|>`. A
# reader of the header, as transformers is, goes on to the length limit. With another text of token 3 both go on.
#
# Seen: for `<|im_end|>`, `<|eot_id|>` and `<end_of_turn>` llama.cpp "stop" after 1 token and transformers 8 tokens; for
# `<|im_stop|>` llama.cpp "length" after 8 tokens, too. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 \
    xllamacpp==2026.10.11549
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import gguf
import numpy as np
import torch
import transformers
import xllamacpp
from transformers import AutoModelForCausalLM

transformers.logging.disable_progress_bar()
folder = sys.argv[1]
WIDTH, HEADS, LIMIT, REPEATED = 32, 2, 8, 3


def write(name: str, text: str) -> None:
    """A model that repeats one token: every embedding is the same, and the head has a row for that token alone."""
    tokens = ["<unk>", "<s>", "</s>", text, *"abcdefghij", "ab"]
    writer = gguf.GGUFWriter(f"{folder}/{name}", "llama")
    for setting, value in {
        "block_count": 1, "context_length": 512, "embedding_length": WIDTH, "feed_forward_length": WIDTH,
        "head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4,
        "rope_dimension_count": WIDTH // HEADS, "vocab_size": len(tokens), "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2", "token_list": tokens, "token_types": [2, 3, 3, 3] + [1] * (len(tokens) - 4),
        "token_merges": ["a b"], "bos_token_id": 1, "eos_token_id": 2,
    }.items():  # fmt: skip
        getattr(writer, f"add_{setting}")(value)
    embedding, head = np.zeros((2, len(tokens), WIDTH), np.float32)
    embedding[:, 0] = head[REPEATED, 0] = 1
    tensors = {"token_embd": embedding, "output": head}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"blk.0.{part}"] = np.zeros((WIDTH, WIDTH), np.float32)
    for part in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[part] = np.ones(WIDTH, np.float32)
    for part, values in tensors.items():
        writer.add_tensor(f"{part}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_transformers(name: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    assert model.generation_config.eos_token_id == 2
    return model.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=LIMIT, do_sample=False)[0, 3:].tolist()


def by_llama_cpp(name: str) -> tuple[str, int]:
    settings = xllamacpp.CommonParams()
    settings.model.path = f"{folder}/{name}"
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 256, 1, False, -1
    answer = xllamacpp.Server(settings).handle_completions({"prompt": [4, 5, 6], "n_predict": LIMIT, "temperature": 0})
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


for number, text in enumerate(("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|im_stop|>")):
    name = f"{number}.gguf"
    write(name, text)
    tokens, (reason, length) = by_transformers(name), by_llama_cpp(name)
    print(f"{text}: llama.cpp {reason} after {length}, transformers {len(tokens)} tokens")
    assert tokens == [REPEATED] * LIMIT, "transformers ends by text now"
    expected = ("length", LIMIT) if text == "<|im_stop|>" else ("stop", 1)
    assert (reason, length) == expected, "llama.cpp ends elsewhere now"
PYTHON
