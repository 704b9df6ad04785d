"""`watermarking_config`: the watermark of transformers, with any draft."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from specdec import SpecGenerator, UnsupportedError, custom_generate
from tests.oracle import KINDS, oracle
from tests.tiny import tiny

ROWS = torch.tensor([[5, 9, 12, 7, 30, 6], [8, 8, 4, 3, 11, 40]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "pad_token_id": 0, "do_sample": False}
LEFT = WatermarkingConfig(bias=4.0)
SELF = WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)
SYNTH = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)


@pytest.mark.parametrize("mark", [LEFT, SELF, SYNTH], ids=["lefthash", "selfhash", "synthid"])
def test_marked_text_equals_transformers(mark: Any) -> None:
    """For every row, and with drafts that are right, half right, wrong and random."""
    model = tiny("llama")
    expected = model.generate(ROWS, eos_token_id=None, watermarking_config=mark, **OPTIONS).tolist()
    assert expected != model.generate(ROWS, eos_token_id=None, **OPTIONS).tolist()
    for draft in (None, "suffix", *(oracle(kind, expected, 64) for kind in KINDS)):
        out = SpecGenerator(model, draft).generate(ROWS, eos_token_id=[], watermarking_config=mark, **OPTIONS)
        assert out.sequences.tolist() == expected, draft


@pytest.mark.parametrize("mark", [LEFT, SYNTH], ids=["lefthash", "synthid"])
def test_every_way_to_name_a_watermark(mark: Any) -> None:
    """Its fields, a generation config of the call or the checkpoint, and the hook."""
    model = tiny("llama")
    expected = model.generate(ROWS, eos_token_id=None, watermarking_config=mark, **OPTIONS)
    config = GenerationConfig(watermarking_config=mark)
    for named in ({"watermarking_config": mark.to_dict()}, {"generation_config": config}):
        assert SpecGenerator(model).generate(ROWS, eos_token_id=[], **named, **OPTIONS).sequences.equal(expected)
    hook = custom_generate("suffix")
    out = model.generate(ROWS, eos_token_id=None, watermarking_config=mark, custom_generate=hook, **OPTIONS)
    assert out.equal(expected)
    model.generation_config.watermarking_config = mark
    assert SpecGenerator(model).generate(ROWS, eos_token_id=[], **OPTIONS).sequences.equal(expected)


def test_beams() -> None:
    """A watermark that is a function of the text goes with a search; one with a state of its own cannot."""
    model, beams = tiny("llama"), {"num_beams": 3, **OPTIONS}
    expected = model.generate(ROWS, eos_token_id=None, watermarking_config=LEFT, **beams)
    out = SpecGenerator(model, "suffix").generate(ROWS, eos_token_id=[], watermarking_config=LEFT, **beams)
    assert out.sequences.equal(expected)
    with pytest.raises(UnsupportedError, match="SynthIDTextWatermarkingConfig follows one text and no search"):
        SpecGenerator(model).generate(ROWS, watermarking_config=SYNTH, **beams)
