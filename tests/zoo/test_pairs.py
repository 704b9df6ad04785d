"""The models that come with the package: they load, they do what their cards say, and they are small."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
)

from recipes import functions, speech_scores
from specdec import SpecGenerator
from specdec.options import bundled_models

AUTO = {
    "python-code": AutoModelForCausalLM,
    "speech": AutoModelForSpeechSeq2Seq,
    "python-summary": AutoModelForSeq2SeqLM,
}


@pytest.mark.parametrize("name", bundled_models.NAMES)
def test_auto_classes_load_both_models(name: str) -> None:
    """Target and draft load with transformers alone, and are as large as the card says."""
    pair = bundled_models.pair(name)
    for role in ("target", "draft"):
        folder = getattr(pair, role)
        model = AUTO[name].from_pretrained(folder, dtype=torch.float32)
        assert model.num_parameters() == pair.card[f"{role}_parameters"]
        assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size


# ------------------------------------------------------------------------------------------------------------- speech


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="speaks with espeak-ng")
def test_the_speech_card() -> None:
    """Word error rates of the first 60 held-out sentences are about those of the card's 200."""
    for module in ("jiwer", "soxr"):
        pytest.importorskip(module)
    pair = bundled_models.pair("speech")
    whisper = AutoModelForSpeechSeq2Seq.from_pretrained(pair.target, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(pair.target)
    for kind in ("sentences", "voice"):
        lines = speech_scores.lines(kind, 60)
        texts = speech_scores.transcribe(whisper, processor, [speech_scores.speak(line) for line in lines])
        rate = speech_scores.error_rate(texts, [line.text for line in lines])
        assert rate == pytest.approx(pair.card[f"held_out_{kind}_word_error_rate"], abs=0.06)


def test_missing_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_models, "_ROOT", tmp_path)
    with pytest.raises(bundled_models.SpecdecError, match="the recordings are not in"):
        bundled_models.recordings()


# ---------------------------------------------------------------------------------------------------------- summaries


@cache
def held_out() -> list[functions.Example]:
    """A few functions of modules that were not trained on."""
    return functions.held_out_examples()[5:400:50]


@pytest.fixture(scope="module")
def summaries() -> dict[str, list[list[int]]]:
    """What the target writes of them, with each draft and without, and the statistics of all."""
    pair = bundled_models.pair("python-summary")
    plain = SpecGenerator.from_pretrained(pair.target, dtype="float32")
    found: dict[str, list[list[int]]] = {}
    for name, draft in {"none": None, "suffix": "suffix", "model": str(pair.draft)}.items():
        generator = SpecGenerator(plain.target, draft, tokenizer=plain.tokenizer)
        out = [generator.generate(e.source, max_new_tokens=48) for e in held_out()]
        found[name] = [o.sequences[0].tolist() for o in out]
        found[f"{name} passes"] = [[o.stats.num_target_passes, o.stats.num_new_tokens] for o in out]
    return found


def test_summaries_begin_with_the_signature(summaries: dict[str, list[list[int]]]) -> None:
    """Which the target copies from functions that it never saw."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_models.pair("python-summary").target)
    written = [tokenizer.decode(ids, skip_special_tokens=True).split("\n") for ids in summaries["none"]]
    right = sum(lines[0] == e.signature for lines, e in zip(written, held_out(), strict=True))
    assert right >= 0.75 * len(written)
    assert sum(len(lines) == 2 and lines[1][:1].isupper() for lines in written) >= 0.75 * len(written)


@pytest.mark.parametrize(("draft", "most"), [("suffix", 0.75), ("model", 0.5)])
def test_drafts_save_passes_over_summaries(draft: str, most: float, summaries: dict[str, list[list[int]]]) -> None:
    """The text is the same; the suffix automaton finds signatures in the input, the draft model more than that."""
    assert summaries[draft] == summaries["none"]
    passes, tokens = np.sum(summaries[f"{draft} passes"], axis=0)
    assert passes <= most * tokens
