"""Log-mel features of sound, the input of a Whisper encoder; of long sound computed in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.pipelines.speech.audio import Samples

_FRAMES = 6000  # frames at a time


def window_features(samples: Samples, extractor: Any) -> Tensor:
    """Features `[mels, frames]` of at most one window, padded with silence to a whole one."""
    found: Tensor = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features[0]
    return found


def long_features(samples: Samples, extractor: Any) -> Tensor:
    """Features `[mels, samples // hop]` of a long recording, equal to the extractor's.

    The extractor needs more than a gigabyte for an hour of sound; this function works block by block.
    """
    if extractor.dither:
        rate = extractor.sampling_rate
        given = extractor(samples, sampling_rate=rate, truncation=False, padding="longest", return_tensors="pt")
        return torch.as_tensor(given.input_features[0])
    hop, size = extractor.hop_length, extractor.n_fft
    window = torch.hann_window(size)
    filters = torch.from_numpy(extractor.mel_filters).float().T.contiguous()
    frames = len(samples) // hop
    found = torch.empty(filters.shape[0], frames)
    for begin in range(0, frames, _FRAMES):
        end = min(begin + _FRAMES, frames)
        piece = _around(samples, begin * hop - size // 2, (end - 1) * hop + size - size // 2)
        stft = torch.stft(torch.from_numpy(piece), size, hop, window=window, center=False, return_complex=True)
        found[:, begin:end] = (filters @ (stft.abs() ** 2)).clamp_(min=1e-10).log10_()
    torch.maximum(found, found.max() - 8.0, out=found)
    return found.add_(4.0).div_(4.0)


def _around(samples: Samples, begin: int, end: int) -> Samples:
    """Samples from `begin` to `end`, mirrored at the ends of the recording."""
    before, after = max(-begin, 0), max(end - len(samples), 0)
    piece = samples[max(begin, 0) : end]
    return np.pad(piece, (before, after), mode="reflect") if before or after else np.ascontiguousarray(piece)
