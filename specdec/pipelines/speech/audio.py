"""Sound from files, bytes and arrays, as one channel at a model's sampling rate, and its log-mel features."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import OptionError, SpecdecError

Samples = NDArray[np.float32]
_BLOCK = 1 << 20  # samples of every channel that are in memory at once
_INSTALL = "pip install -c constraints.txt -e '.[audio]'"
READERS = ("soundfile", "soxr")
_KINDS = "a file name, bytes, a binary file, an array, or a mapping of `array` and `sampling_rate`"
_FORMATS = "wav, flac, mp3 and ogg can be read: convert others first, for example with ffmpeg"

_FRAMES = 6000  # frames at a time


@dataclass(frozen=True)
class Audio:
    """Mono `samples` `[n]`, about -1 to 1, `rate` per second; `extra`: other fields of the input."""

    samples: Samples
    rate: int
    name: str = "the input"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def check_readers() -> None:
    """Raises SpecdecError where a package that reads sound files is not installed."""
    if missing := [name for name in READERS if find_spec(name) is None]:
        raise SpecdecError(f"reading sound files needs {' and '.join(missing)}: {_INSTALL}")


def read_audio(source: Any, rate: int) -> Audio:
    """Sound at `rate` from a file name, bytes, a binary file, an array at that rate, or `{"array", "sampling_rate"}`.

    Arrays are `[samples]` or `[channels, samples]` with at most two channels; whole numbers are scaled to -1 to 1.
    Raises OptionError, naming the file, for what is not sound; SpecdecError where soundfile or soxr is not installed.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source, rate)
    if isinstance(source, str | PathLike):
        name = fspath(source)
        if name.startswith(("http://", "https://")):
            raise OptionError(f"`inputs` names {name}, which must be downloaded first: pass a file")
        if not Path(name).is_file():
            why = "pass the files in this folder" if Path(name).is_dir() else "there is no such file"
            raise OptionError.of("inputs", "the name of a sound file", name, why)
        return Audio(_decode(name, name, rate), rate, name)
    if isinstance(source, bytes | bytearray | memoryview):
        return Audio(_decode(io.BytesIO(source), "the input", rate), rate)
    if hasattr(source, "read"):
        name, content = str(getattr(source, "name", "the input")), source.read()
        if not isinstance(content, bytes):
            raise OptionError(f"{name} was opened as text: open it with 'rb'")
        return Audio(_decode(io.BytesIO(content), name, rate), rate, name)
    return Audio(_mono(source), rate)


def _from_mapping(source: Mapping[str, Any], rate: int) -> Audio:
    """Sound in the form of datasets and transformers; `path` is ignored, other fields are kept in `extra`."""
    samples = source.get("raw", source.get("array"))
    if samples is None or "sampling_rate" not in source:
        raise OptionError.of("inputs", "a mapping with `array` (or `raw`) and `sampling_rate`", sorted(source))
    source_rate = source["sampling_rate"]
    if not isinstance(source_rate, int | float) or source_rate <= 0:
        raise OptionError.of("sampling_rate", "a positive number", source_rate)
    extra = {name: value for name, value in source.items() if name not in ("raw", "array", "sampling_rate", "path")}
    return Audio(_resample([_mono(samples)], source_rate, rate), rate, extra=extra)


def _mono(source: Any) -> Samples:
    """An array or tensor as one channel of floats."""
    if hasattr(source, "detach"):
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() else source).numpy()
    if not isinstance(source, np.ndarray) or source.dtype.kind not in "iuf":
        raise OptionError.of("inputs", _KINDS, type(source).__name__)
    if source.ndim not in (1, 2) or (source.ndim == 2 and source.shape[0] > 2):
        way_out = "transpose it, or mix its channels down"
        raise OptionError.of("inputs", "of shape [samples] or [1 or 2 channels, samples]", list(source.shape), way_out)
    kind = source.dtype.kind
    half = 1 if kind == "f" else 2 ** (8 * source.dtype.itemsize - 1)  # half the range of whole numbers
    scaled = source.astype(np.float32) / np.float32(half) - np.float32(kind == "u")
    return _check_samples(scaled if scaled.ndim == 1 else scaled.mean(0), "the input")


def _check_samples(samples: Samples, name: str) -> Samples:
    if not np.isfinite(samples).all():
        raise OptionError(f"{name} holds samples that are not finite numbers: repair it first")
    return samples


@contextmanager
def sound_file(source: Any, name: str) -> Iterator[Any]:
    """An open `soundfile.SoundFile`; raises OptionError, naming the file, for what is not sound."""
    try:
        import soundfile
    except ImportError:
        raise SpecdecError(f"reading sound files needs soundfile: {_INSTALL}") from None
    try:
        file = soundfile.SoundFile(source)
    except (soundfile.SoundFileError, TypeError, RuntimeError):  # the reasons of soundfile are wrong for mp3 files
        raise OptionError(f"{name} is not sound, or of a kind that cannot be read: {_FORMATS}") from None
    with file:
        try:
            yield file
        except (soundfile.SoundFileError, RuntimeError) as error:
            reason = str(error).rpartition(": ")[2].strip().rstrip(".") or type(error).__name__
            raise OptionError(f"{name} is damaged ({reason}): repair it, for example with ffmpeg") from None


def _decode(source: Any, name: str, rate: int) -> Samples:
    """A sound file's samples at `rate`, read and resampled block by block."""
    with sound_file(source, name) as file:
        return _resample(_blocks(file, name), file.samplerate, rate)


def _blocks(file: Any, name: str) -> Iterator[Samples]:
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield _check_samples(block.mean(1, dtype=np.float32), name)


class Resampler:
    """Brings blocks of sound from `source_rate` to `rate`; SpecdecError if that needs soxr, and it is missing."""

    def __init__(self, source_rate: float, rate: int) -> None:
        self._stream: Any = None
        if source_rate == rate:
            return
        try:
            import soxr
        except ImportError:
            problem = f"sound at {source_rate:g} Hz must be brought to {rate} Hz, with soxr"
            raise SpecdecError(f"{problem}: {_INSTALL}") from None
        self._stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32")

    def __call__(self, block: Samples) -> Samples:
        """The samples that are complete with the next block."""
        if self._stream is None:
            return block
        samples: Samples = self._stream.resample_chunk(np.ascontiguousarray(block))
        return samples

    def rest(self) -> Samples:
        """The samples after the last block."""
        nothing = np.empty(0, np.float32)
        return nothing if self._stream is None else self._stream.resample_chunk(nothing, last=True)


def _resample(blocks: Any, source_rate: float, rate: int) -> Samples:
    """The blocks of samples at `source_rate`, joined, at `rate`."""
    resample = Resampler(source_rate, rate)
    return np.concatenate([*map(resample, blocks), resample.rest()])


def log_mel(samples: Samples, extractor: Any) -> Tensor:
    """Features `[mels, samples // hop]`, at least a window of them, as the extractor makes them.

    The extractor needs more than a gigabyte for an hour of sound; this function works block by block.
    """
    if len(samples) < extractor.n_samples:
        samples = np.pad(samples, (0, extractor.n_samples - len(samples)))
    if extractor.dither:
        options = {"sampling_rate": extractor.sampling_rate, "truncation": False, "padding": "longest"}
        return torch.as_tensor(extractor(samples, return_tensors="pt", **options).input_features[0])
    power = log_power(samples, extractor)
    return leveled(power, float(power.max()))


def leveled(power: Tensor, loudest: float) -> Tensor:
    """The features of log powers `power`, which it overwrites, in a recording whose highest one is `loudest`."""
    return power.clamp_(min=loudest - 8.0).add_(4.0).div_(4.0)


def log_power(samples: Samples, extractor: Any) -> Tensor:
    """The decimal logarithm of the power in each mel band, `[mels, samples // hop]`."""
    hop, size = extractor.hop_length, extractor.n_fft
    window = torch.hann_window(size)
    filters = torch.from_numpy(extractor.mel_filters).float().T.contiguous()
    frames = len(samples) // hop
    features = torch.empty(filters.shape[0], frames)
    for begin in range(0, frames, _FRAMES):
        end = min(begin + _FRAMES, frames)
        first, last = begin * hop - size // 2, (end - 1) * hop + size - size // 2
        piece = samples[max(first, 0) : last]
        if first < 0 or last > len(samples):  # the ends are mirrored
            piece = np.pad(piece, (max(-first, 0), max(last - len(samples), 0)), mode="reflect")
        stft = torch.stft(
            torch.from_numpy(np.ascontiguousarray(piece)), size, hop, window=window, center=False, return_complex=True
        )
        features[:, begin:end] = (filters @ (stft.abs() ** 2)).clamp_(min=1e-10).log10_()
    return features
