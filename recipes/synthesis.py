"""Speech for training: espeak-ng reads sentences in many voices; log-mel frames are computed once and kept in a file.

Needs the program espeak-ng (a Debian package of this name) and soxr.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from specdec.errors import SpecdecError

RATE = 16_000  # samples per second
HOP = 160  # samples per log-mel frame
ACCENTS = ("en-us", "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbcwmd", "en-029", "en-us-nyc")
VARIANTS = (
    *("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f5"),
    *("Annie", "Andy", "Alex", "linda", "steph", "Denis", "Gene", "Lee", "Michael", "belinda", "adam", "max", "zac"),
)
HELD_OUT_VOICE = "en-gb-x-gbclan+f4"  # neither its accent nor its variant is heard in training
_SILENT = 0.005  # of full scale


@dataclass(frozen=True)
class Line:
    """One sentence and how it is read: espeak-ng's voice, words per minute, pitch (0 to 99)."""

    text: str
    voice: str
    speed: int
    pitch: int


def read_by_many(sentences: Sequence[str], seed: int) -> list[Line]:
    """Each sentence with a random training voice, speed and pitch."""
    choose = random.Random(seed)
    return [
        Line(
            text,
            f"{choose.choice(ACCENTS)}+{choose.choice(VARIANTS)}",
            choose.randint(130, 210),
            choose.randint(25, 75),
        )
        for text in sentences
    ]


def read_by_held_out(sentences: Sequence[str], seed: int) -> list[Line]:
    """Each sentence in the held-out voice, at random speed and pitch."""
    choose = random.Random(seed)
    return [Line(text, HELD_OUT_VOICE, choose.randint(130, 210), choose.randint(25, 75)) for text in sentences]


def speak(line: Line) -> np.ndarray:
    """The sentence as samples `[samples]` float32 at 16 kHz, silence at both ends cut off; raises without espeak-ng."""
    import soxr

    program = shutil.which("espeak-ng")
    if program is None:
        raise SpecdecError("speech is synthesised by espeak-ng, which is not installed: apt install espeak-ng")
    command = [program, "-v", line.voice, "-s", str(line.speed), "-p", str(line.pitch), "--stdout", line.text]
    with wave.open(io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)) as file:
        # The header of a stream tells no length.
        samples = np.frombuffer(file.readframes(1 << 28), dtype=np.int16).astype(np.float32) / 32768
        samples = soxr.resample(samples, file.getframerate(), RATE)
    loud = np.flatnonzero(np.abs(samples) > _SILENT)
    return samples[max(loud[0] - HOP, 0) : loud[-1] + 2 * HOP]


def log_mels(samples: np.ndarray, extractor: WhisperFeatureExtractor) -> np.ndarray:
    """Log10 mel power `[frames, mels]` as Whisper's extractor computes it, before its floor and scaling."""
    window = torch.hann_window(extractor.n_fft)
    spectrum = torch.stft(
        torch.from_numpy(samples), extractor.n_fft, extractor.hop_length, window=window, return_complex=True
    )
    power = torch.from_numpy(extractor.mel_filters).float().T @ (spectrum[:, :-1].abs() ** 2)
    return power.clamp(min=1e-10).log10().T.numpy()


@dataclass(frozen=True)
class Clips:
    """Spoken sentences: `mels` `[all frames, mels]` float16, and where each clip begins and ends in it."""

    mels: np.ndarray
    bounds: list[tuple[int, int]]
    texts: list[str]

    @classmethod
    def load(cls, folder: Path) -> Clips:
        """The clips that `record` wrote."""
        index = json.loads((folder / "clips.json").read_text())
        mels = np.load(folder / "mels.npy", mmap_mode="r")
        return cls(mels, [tuple(b) for b in index["bounds"]], index["texts"])

    def __add__(self, others: Clips) -> Clips:
        mels, own = np.concatenate([self.mels, others.mels]), len(self.mels)
        bounds = [*self.bounds, *((begin + own, end + own) for begin, end in others.bounds)]
        return Clips(mels, bounds, self.texts + others.texts)

    def __getitem__(self, clip: int) -> np.ndarray:
        begin, end = self.bounds[clip]
        return np.asarray(self.mels[begin:end], dtype=np.float32)


def record(lines: Sequence[Line], folder: Path, extractor: WhisperFeatureExtractor, workers: int = 2) -> Clips:
    """Speaks every line and writes the log-mel frames of all to `folder`; a finished recording is read instead."""
    if not (folder / "clips.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(workers) as pool:
            spoken = pool.map(speak, lines)
            mels = [log_mels(samples, extractor).astype(np.float16) for samples in spoken]
        ends = np.cumsum([len(m) for m in mels]).tolist()
        np.save(folder / "mels.npy", np.concatenate(mels))
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        (folder / "clips.json").write_text(json.dumps({"bounds": bounds, "texts": [line.text for line in lines]}))
    return Clips.load(folder)


def noise_power(extractor: WhisperFeatureExtractor, seconds: int = 120, seed: int = 0) -> np.ndarray:
    """Mel power `[frames, mels]` of noise that changes its colour over time, scaled to a mean of 1."""
    random = np.random.default_rng(seed)
    parts = []
    for _ in range(seconds // 4):
        spectrum = np.fft.rfft(random.standard_normal(4 * RATE))
        spectrum /= np.maximum(np.arange(len(spectrum)), 100) ** random.uniform(0, 1.2)
        power = 10 ** log_mels(np.fft.irfft(spectrum).astype(np.float32), extractor)
        parts.append(power / power.mean())
    return np.concatenate(parts)
