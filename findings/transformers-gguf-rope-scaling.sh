#!/usr/bin/env bash
# transformers 5.23.0 loads a GGUF file whose header scales rotary positions as if it said nothing of it.
#
# Three files hold the same tiny random Llama: a plain one, one with `llama.rope.scaling.type` linear and factor 4, and
# one with the tensor `rope_freqs.weight`, which all files of Llama 3.1 and later have. A reader would expect three
# models. transformers gives the same logits for all, its config says "default", and it warns of nothing.
#
# Seen: "linear: largest difference 0.0, rope_type default" and the same for rope_freqs. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import warnings

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
WIDTH, HEADS, LAYERS, WORDS = 32, 2, 2, 64


def write(name: str, scaling: str) -> None:
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(f"{folder}/{name}.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(WORDS)
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    if scaling == "rope_freqs":
        writer.add_tensor("rope_freqs.weight", np.full(WIDTH // HEADS // 2, 4.0, np.float32))

    def add(tensor: str, *shape: int) -> None:
        ones = len(shape) == 1
        values = np.ones(shape) if ones else numbers.normal(size=shape)
        writer.add_tensor(f"{tensor}.weight", values.astype(np.float32))

    add("token_embd", WORDS, WIDTH)
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}", WIDTH, WIDTH)
        for part in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{part}", 2 * WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, 2 * WIDTH)
        add(f"blk.{layer}.attn_norm", WIDTH)
        add(f"blk.{layer}.ffn_norm", WIDTH)
    add("output_norm", WIDTH)
    add("output", WORDS, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(name: str) -> tuple[torch.Tensor, str]:
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{name}.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.arange(3, WORDS)[None]).logits
    return logits, model.config.rope_parameters["rope_type"]


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    write("plain", "")
    expected, _ = read("plain")
    assert expected.std() > 0.1, "the model says nothing"
    for scaling in ("linear", "rope_freqs"):
        write(scaling, scaling)
        logits, kind = read(scaling)
        difference = float((logits - expected).abs().max())
        print(f"{scaling}: largest difference {difference}, rope_type {kind}")
        assert difference == 0 and kind == "default", "transformers reads the scaling now"
assert not [one for one in said if "rope" in str(one.message).lower()], "transformers warns now"
PYTHON
