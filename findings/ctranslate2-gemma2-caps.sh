#!/usr/bin/env bash
# CTranslate2 4.8.5 converts a Gemma 2 without its soft caps, its sliding window and its scale of queries, silently.
#
# Every Gemma 2 caps the logits of attention (50) and of the output (30), and every second layer sees a window alone.
# The one of 27 billion parameters also divides queries by the root of 144 where a head has 128 numbers. All four are
# numbers of config.json and no tensors. The converter reads none of them and warns of nothing: five models that differ
# in one of them each get the logits of the model that has none. The likeliest token rarely changes, so a look at greedy
# texts does not show it; sampled texts and log-probabilities are others.
#
# Seen: largest difference from transformers 0.0000 for the model with none, 0.7 for the cap of attention, 11 for the
# cap of the output, 6 for the window and 1.6 for the scale, and in CTranslate2 five times the same logits. Fails if one
# of the four agrees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 ctranslate2==4.8.5
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import warnings
from pathlib import Path

import ctranslate2
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

transformers.logging.disable_progress_bar()
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(60))]
ids = torch.randint(4, len(WORDS), (1, 60), generator=torch.Generator().manual_seed(3))
NONE = {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 512,
    "query_pre_attn_scalar": 32,
}  # fmt: skip
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")),
    bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
)  # fmt: skip


def logits_of_both(folder: Path, **settings: object) -> tuple[np.ndarray, np.ndarray]:
    """The logits [tokens, words] of the same weights in transformers and in CTranslate2."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.5, **{**NONE, **settings},
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    TransformersConverter(str(folder / "model")).convert(str(folder / "converted"))
    generator = ctranslate2.Generator(str(folder / "converted"), device="cpu", compute_type="float32")
    converted = generator.forward_batch([[WORDS[n] for n in ids[0].tolist()]])
    with torch.no_grad():
        return model(ids).logits[0].numpy(), np.array(converted)[0]


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    expected, without = logits_of_both(Path(sys.argv[1], "none"))
    assert np.abs(expected - without).max() < 1e-3, "the model with none of them differs already"
    print(f"none: largest difference {np.abs(expected - without).max():.4f}")
    for name, value in {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 8,
        "query_pre_attn_scalar": 144,
    }.items():  # fmt: skip
        expected, converted = logits_of_both(Path(sys.argv[1], name), **{name: value})
        difference = np.abs(expected - converted).max()
        print(f"{name} {value}: largest difference {difference:.1f}, in CTranslate2 the logits of none: "
              f"{bool(np.allclose(converted, without, atol=1e-4))}")  # fmt: skip
        assert difference > 0.1 and np.allclose(converted, without, atol=1e-4), f"{name} is converted now"
assert not [one for one in said if "soft" in str(one.message) or "window" in str(one.message)], "it warns now"
PYTHON
