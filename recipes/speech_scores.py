"""How good the speech pair is: word error rates on held-out sentences and voices, and how often its draft agrees."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from recipes.phrases import sentences, vocabulary
from recipes.synthesis import HELD_OUT_VOICE, RATE, Line, read_by_held_out, read_by_many, speak

LICENCE = (
    "Apache-2.0, as the package. The sentences are the recipe's own; espeak-ng, which spoke them, is not part of it."
)
# The files of the demonstration, sentences that the target gets right: name, kind of line, the first, how many.
DEMO = (("commands.wav", "sentences", 0, 3), ("voice.wav", "voice", 27, 3), ("window.wav", "sentences", 6, 4))
SAMPLES_PER_POSITION = 320  # of the encoder's output
normalise = EnglishTextNormalizer({})


def lines(kind: str, count: int) -> list[Line]:
    """The first `count` held-out lines: `sentences`, in voices heard in training, or `voice`, in the held-out voice."""
    read = {"sentences": read_by_many, "voice": read_by_held_out}[kind]
    return read(list(sentences(count, held_out=True, seed=1)), seed=2)


def in_noise(samples: np.ndarray, decibels: float, random: np.random.Generator) -> np.ndarray:
    """The samples with white noise, `decibels` below the mean power of the speech."""
    noise = random.standard_normal(len(samples)) * np.sqrt((samples**2).mean() * 10 ** (-decibels / 10))
    return np.asarray(samples + noise, dtype=np.float32)


def error_rate(texts: Sequence[str], references: Sequence[str]) -> float:
    """Word errors (wrong, missing, added) of all texts per word of their references, both normalised."""
    from jiwer import wer

    return float(wer(list(map(normalise, references)), list(map(normalise, texts))))


@torch.no_grad()
def transcribe(
    model: WhisperForConditionalGeneration, processor: WhisperProcessor, recordings: Sequence[np.ndarray]
) -> list[str]:
    """Each recording, of one window at most, as transformers' own greedy generation writes it down."""
    texts: list[str] = []
    for first in range(0, len(recordings), 32):
        heard = processor(list(recordings[first : first + 32]), sampling_rate=RATE, return_tensors="pt")
        texts += processor.batch_decode(model.generate(heard.input_features), skip_special_tokens=True)
    return texts


@torch.no_grad()
def transcribe_long(model: WhisperForConditionalGeneration, processor: WhisperProcessor, recording: np.ndarray) -> str:
    """A recording of any length, window after window by the timestamps that the model predicts."""
    heard = processor(
        recording,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    ids = model.generate(heard.input_features, attention_mask=heard.attention_mask, return_timestamps=True)
    return str(processor.batch_decode(ids, skip_special_tokens=True)[0])


def joined(recordings: Sequence[np.ndarray], pause: float = 0.4) -> np.ndarray:
    """Recordings one after another with `pause` seconds between them."""
    silence = np.zeros(int(pause * RATE), dtype=np.float32)
    return np.concatenate([part for recording in recordings for part in (recording, silence)])


def windows_of(recordings: Sequence[np.ndarray], seconds: int) -> list[np.ndarray]:
    """The recordings joined, in order, into as few windows of at most `seconds` as they fill."""
    groups: list[list[np.ndarray]] = [[]]
    for recording in recordings:
        if groups[-1] and len(joined([*groups[-1], recording])) > seconds * RATE:
            groups.append([])
        groups[-1].append(recording)
    return [joined(group) for group in groups]


@torch.no_grad()
def agreement(
    target: WhisperForConditionalGeneration,
    draft: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    recordings: Sequence[np.ndarray],
) -> tuple[float, float]:
    """Share of the target's greedy tokens that the draft would have guessed after the same prefix; tokens a window."""
    prefix, end = processor.tokenizer.prefix_tokens, processor.tokenizer.eos_token_id
    hits = total = 0
    for recording in recordings:
        heard = processor(recording, sampling_rate=RATE, return_tensors="pt").input_features
        said = [i for i in target.generate(heard)[0].tolist() if i < end] + [end]
        ids = torch.tensor([prefix + said])
        guesses = draft(input_features=heard, decoder_input_ids=ids[:, :-1]).logits.argmax(-1)
        hits += int((guesses[0, len(prefix) - 1 :] == ids[0, len(prefix) :]).sum())
        total += len(said)
    return hits / total, total / len(recordings)


@torch.no_grad()
def alignment_heads(
    target: WhisperForConditionalGeneration,
    processor: WhisperProcessor,
    spoken: Sequence[tuple[np.ndarray, str]],
    count: int = 6,
) -> list[list[int]]:
    """The `count` `[layer, head]` of the decoder whose attention passes most evenly over each sentence.

    Word timestamps are read from these. Two sentences at a time fill a window, and a token is expected at its share of
    the length of its sentence.
    """
    target.set_attn_implementation("eager")
    prefix, strays = processor.tokenizer.prefix_tokens, []
    for (first, one), (second, other) in zip(spoken[::2], spoken[1::2], strict=True):
        ids, expected = list(prefix), []
        begin = 0.0
        for samples, text in ((first, one), (second, other)):
            said = processor.tokenizer.encode(" " + text, add_special_tokens=False)
            expected += [begin + len(samples) * (i + 0.5) / len(said) for i in range(len(said))]
            ids, begin = ids + said, begin + len(joined([samples]))
        heard = processor(joined([first, second]), sampling_rate=RATE, return_tensors="pt").input_features
        out = target(input_features=heard, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
        looks = torch.stack(out.cross_attentions)[:, 0, :, len(prefix) - 1 : -1]  # [layers, heads, tokens, positions]
        centres = looks @ torch.arange(looks.shape[-1], dtype=torch.float32)
        strays.append((centres - torch.tensor(expected) / SAMPLES_PER_POSITION).abs().mean(-1))
    order = torch.stack(strays).mean(0).flatten().argsort()[:count].tolist()
    return [[index // strays[0].shape[1], index % strays[0].shape[1]] for index in order]


def set_alignment_heads(folder: Path, count: int = 60) -> None:
    """Finds the alignment heads of the target in `folder` on training voices, and writes them to its settings."""
    processor = WhisperProcessor.from_pretrained(folder)
    target = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    spoken = [(speak(line), line.text) for line in read_by_many(list(sentences(count, held_out=False)), seed=0)]
    target.generation_config.alignment_heads = alignment_heads(target, processor, spoken)
    target.generation_config.save_pretrained(folder)


def evaluate(out: Path, count: int = 200) -> dict[str, Any]:
    """Measures the pair in `out` on `count` held-out sentences; printed and written to `out/card.json`."""
    processor = WhisperProcessor.from_pretrained(out / "target")
    target, draft = (
        WhisperForConditionalGeneration.from_pretrained(out / role, dtype=torch.float32).eval()
        for role in ("target", "draft")
    )
    spoken = {kind: [speak(line) for line in lines(kind, count)] for kind in ("sentences", "voice")}
    random = np.random.default_rng(0)
    spoken["noise"] = [in_noise(samples, 15, random) for samples in spoken["sentences"]]
    texts = [line.text for line in lines("sentences", count)]
    rates = {kind: error_rate(transcribe(target, processor, heard), texts) for kind, heard in spoken.items()}
    long = transcribe_long(target, processor, joined(spoken["sentences"]))
    windows = windows_of(spoken["sentences"], processor.feature_extractor.chunk_length)
    agreed, tokens = agreement(target, draft, processor, windows[: count // 5])
    card = {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "grammar_words": len(vocabulary()),
        "held_out_sentences_word_error_rate": round(rates["sentences"], 4),
        "held_out_voice_word_error_rate": round(rates["voice"], 4),
        "in_noise_word_error_rate": round(rates["noise"], 4),
        "long_form_word_error_rate": round(error_rate([long], [" ".join(texts)]), 4),
        "greedy_agreement": round(agreed, 4),
        "tokens_per_window": round(tokens, 1),
        "held_out_voice": HELD_OUT_VOICE,
        "noise": "white, 15 dB below the speech",
        "licence": LICENCE,
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2), flush=True)
    return card


def demonstrate(out: Path) -> None:
    """Writes a few seconds of held-out sentences to `out/demo`, as wav files beside `transcripts.json`."""
    folder = out / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    transcripts = {}
    for name, kind, first, count in DEMO:
        chosen = lines(kind, first + count)[first:]
        samples = joined([speak(line) for line in chosen])
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        transcripts[name] = " ".join(line.text for line in chosen)
    (folder / "transcripts.json").write_text(json.dumps(transcripts, indent=2) + "\n")
