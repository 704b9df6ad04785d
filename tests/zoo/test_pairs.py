"""The models that come with the package: they load, they do what their cards say, and they are small."""

import shutil
import wave
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
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from recipes import functions, speech_scores
from specdec import SpecGenerator, Transcriber
from specdec.options import bundled_models
from specdec.pipelines import Summarizer

AUTO = {
    "python-code": AutoModelForCausalLM,
    "speech": AutoModelForSpeechSeq2Seq,
    "python-summary": AutoModelForSeq2SeqLM,
}


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    return AutoModelForSpeechSeq2Seq.from_pretrained(bundled_models.pair("speech").target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> WhisperProcessor:
    return AutoProcessor.from_pretrained(bundled_models.pair("speech").target)


def samples_of(file: Path) -> np.ndarray:
    with wave.open(str(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768


def test_pipelines_take_names_of_the_zoo() -> None:
    transcriber = Transcriber.from_pretrained("zoo:speech")
    assert "key" in transcriber(str(bundled_models.recordings()[0][0]))["text"]
    summarize = Summarizer.from_pretrained("zoo:python-summary")
    text = bundled_models.functions()["is_prime"]
    assert summarize(text, max_new_tokens=40)[0]["summary_text"].startswith(text.splitlines()[0])


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


@pytest.mark.parametrize("number", range(3))
def test_the_recordings_say_what_is_written(
    number: int, whisper: WhisperForConditionalGeneration, processor: WhisperProcessor
) -> None:
    """Transformers' own generation writes the transcript of each recording that comes with the package."""
    file, transcript = bundled_models.recordings()[number]
    assert speech_scores.transcribe(whisper, processor, [samples_of(file)])[0].strip() == transcript


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="speaks with espeak-ng")
def test_the_speech_card(whisper: WhisperForConditionalGeneration, processor: WhisperProcessor) -> None:
    """Word error rates of the first 60 held-out sentences are about those of the card's 200."""
    for module in ("jiwer", "soxr"):
        pytest.importorskip(module)
    card = bundled_models.pair("speech").card
    for kind in ("sentences", "voice"):
        lines = speech_scores.lines(kind, 60)
        texts = speech_scores.transcribe(whisper, processor, [speech_scores.speak(line) for line in lines])
        rate = speech_scores.error_rate(texts, [line.text for line in lines])
        assert rate == pytest.approx(card[f"held_out_{kind}_word_error_rate"], abs=0.06)


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
