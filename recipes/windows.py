"""Training windows of the speech recipe: clips one after another, altered, in noise, with the labels Whisper learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperTokenizer

from recipes.synthesis import Clips

FRAMES_PER_TIMESTAMP = 2  # 0.02 seconds
IGNORED = -100
LETTERS = " 'abcdefghijklmnopqrstuvwxyz"  # what the auxiliary loss spells; its class 0 is the blank


@dataclass(frozen=True)
class Segment:
    """A sentence in a window, in frames; `whole` is false where the window ends first."""

    begin: int
    end: int
    text: str
    whole: bool


@dataclass(frozen=True)
class Batch:
    """Windows as the model reads them.

    `features` `[rows, mels, frames]`; `ids` and `labels` `[rows, tokens]`, labels `IGNORED` where nothing is asked;
    `spelled` holds the letters of the rows whose sentences are whole, and `spelled_rows` names these rows.
    """

    features: Tensor
    ids: Tensor
    labels: Tensor
    spelled: list[Tensor]
    spelled_rows: list[int]


class Composer:
    """Makes windows of `frames` log-mel frames out of clips; every window is different, in the order of its seed.

    With `plain` all sentences are whole and none follows earlier text.
    """

    def __init__(
        self,
        clips: Clips,
        noise: np.ndarray,
        tokenizer: WhisperTokenizer,
        *,
        frames: int,
        seed: int,
        plain: bool = False,
    ) -> None:
        self.clips, self.noise, self.tokenizer, self.frames, self.plain = clips, noise, tokenizer, frames, plain
        self.random = np.random.default_rng(seed)
        self.fitting = [i for i, (begin, end) in enumerate(clips.bounds) if end - begin <= frames - 10]

    def batches(self, rows: int, steps: int) -> Iterator[Batch]:
        """Yields `steps` batches of `rows` windows."""
        for _ in range(steps):
            yield self.batch(rows)

    def batch(self, rows: int) -> Batch:
        """One batch of `rows` windows."""
        windows = [self.window() for _ in range(rows)]
        spelled_rows = [i for i, (_, segments) in enumerate(windows) if segments and all(s.whole for s in segments)]
        texts = [self.transcript(segments) for _, segments in windows]
        width = max(len(ids) for ids, _ in texts)
        ids = torch.full((rows, width), self.tokenizer.eos_token_id)
        labels = torch.full((rows, width), IGNORED)
        for row, (own, asked) in enumerate(texts):
            ids[row, : len(own)] = torch.tensor(own)
            labels[row, : len(asked)] = torch.tensor(asked)
        spelled = [spell(" ".join(s.text for s in windows[row][1])) for row in spelled_rows]
        return Batch(torch.from_numpy(np.stack([w for w, _ in windows])), ids, labels, spelled, spelled_rows)

    def window(self) -> tuple[np.ndarray, list[Segment]]:
        """Features `[mels, frames]` float32 of one window, and the sentences in it."""
        power = np.zeros((self.frames, self.noise.shape[1]), dtype=np.float32)
        segments: list[Segment] = []
        at = int(self.random.integers(0, 60))
        wanted = 0 if self.random.random() < 0.04 else int(self.random.integers(1, 7))
        cut = not self.plain and self.random.random() < 0.5
        while len(segments) < wanted and at < self.frames - 20:
            clip = self.fitting[int(self.random.integers(len(self.fitting)))]
            mels = self.clips[clip]
            if not segments:
                at = min(at, self.frames - len(mels))
            if at + len(mels) > self.frames and not cut:
                break
            end = min(at + len(mels), self.frames)
            power[at:end] += alter(10 ** mels[: end - at], self.random)
            segments.append(Segment(at, end, self.clips.texts[clip], at + len(mels) <= self.frames))
            at = end + int(self.random.integers(10, 100))
        return self._finish(power, segments[-1].end if segments else 0), segments

    def _finish(self, power: np.ndarray, end: int) -> np.ndarray:
        """Adds noise to the window's power, scales as Whisper's extractor does, and hides a few bands."""
        if self.random.random() < 0.8:
            begin = int(self.random.integers(0, len(self.noise) - self.frames))
            # Up to the level at which speech is still easily understood (its mean power is about 1e-1 to 1e0).
            power = power + self.noise[begin : begin + self.frames] * 10 ** self.random.uniform(-7, -1.3)
        features = np.log10(np.maximum(power, 1e-10))
        features = (np.maximum(features, features.max() - 8) + 4) / 4
        if self.random.random() < 0.3:  # a window past the end of the audio, which long-form decoding fills with zeros
            features[min(end + int(self.random.integers(0, 50)), self.frames) :] = 0.0
        if self.random.random() < 0.5:
            band = int(self.random.integers(0, features.shape[1] - 10))
            features[:, band : band + int(self.random.integers(1, 10))] = features.mean()
        return np.ascontiguousarray(features.T, dtype=np.float32)

    def transcript(self, segments: list[Segment]) -> tuple[list[int], list[int]]:
        """Decoder input and labels of a window: with timestamps now and then, after earlier text now and then."""
        word = self.tokenizer.convert_tokens_to_ids
        start, end = word(["<|startoftranscript|>", "<|endoftext|>"])
        asked = [word("<|en|>") if segments else word("<|nospeech|>"), IGNORED]
        ids = [start, word("<|en|>"), word("<|transcribe|>")]
        timed = self.random.random() < 0.4 or not all(s.whole for s in segments)
        if timed:
            zero = word("<|0.00|>")
            said: list[int] = []
            for segment in segments:
                said.append(zero + segment.begin // FRAMES_PER_TIMESTAMP)
                if segment.whole:
                    said += [*self.encode(segment.text), zero + segment.end // FRAMES_PER_TIMESTAMP]
        else:
            ids.append(word("<|notimestamps|>"))
            asked.append(IGNORED)
            said = [i for segment in segments for i in self.encode(segment.text)]
        ids, asked = ids + said, [*asked, *said, end]
        if not self.plain and self.random.random() < 0.15:
            clips = self.random.integers(len(self.clips.bounds), size=self.random.integers(1, 4))
            earlier = [word("<|startofprev|>"), *(i for clip in clips for i in self.encode(self.clips.texts[clip]))]
            ids, asked = earlier + ids, [IGNORED] * len(earlier) + asked
        return ids, asked

    def encode(self, text: str) -> list[int]:
        """The ids of a sentence, which begins with a space as Whisper's do."""
        return self.tokenizer.encode(" " + text, add_special_tokens=False)


def spell(text: str) -> Tensor:
    """The letters of a text as classes of the auxiliary loss, `[letters]`."""
    return torch.tensor([LETTERS.index(c) + 1 for c in text.lower() if c in LETTERS])


def alter(power: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A clip's mel power `[frames, mels]` said louder or softer, through another throat and another microphone."""
    mels = power.shape[1]
    bands = np.arange(mels)
    # Moving every band by a share of its number is a longer or shorter vocal tract.
    source = np.clip(bands * random.uniform(0.92, 1.08), 0, mels - 1)
    low = np.floor(source).astype(int)
    high, part = np.minimum(low + 1, mels - 1), (source - low).astype(np.float32)
    moved = power[:, low] * (1 - part) + power[:, high] * part
    tilt = random.uniform(-0.6, 0.6) * (bands / mels - 0.5) + random.uniform(-1.2, 0.6)
    return np.asarray(moved * (10**tilt).astype(np.float32), dtype=np.float32)
