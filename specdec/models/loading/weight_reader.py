"""Reads layers of weights from files into a few buffers, in a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.loading.weight_files import Files, Stored

_ALIGNED = 64  # bytes; kernels round differently at other addresses


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a layer: the dictionary that holds it, its placeholder when it is away, its place on disk."""

    home: dict[str, Any]
    leaf: str
    placeholder: Tensor
    stored: Stored

    @property
    def nbytes(self) -> int:
        return self.placeholder.nbytes

    def put(self, tensor: Tensor) -> None:
        parameter = isinstance(self.placeholder, nn.Parameter)
        self.home[self.leaf] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor

    def take(self) -> None:
        self.home[self.leaf] = self.placeholder


class Layer:
    """The weights of a layer in the order of their bytes, and the contiguous runs of them."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = sorted(weights, key=lambda weight: (weight.stored.path, weight.stored.offset))
        self.nbytes = sum(weight.nbytes for weight in weights)
        self.runs: list[tuple[str, int, int, int]] = []  # path, first byte in it, first byte in the buffer, length
        self.begins: list[int] = []  # of each weight, in the buffer
        self.extent = 0
        path, end = "", -1
        for weight in self.weights:
            stored = weight.stored
            if (stored.path, stored.offset) == (path, end) and not self.extent % _ALIGNED:
                _, start, begin, length = self.runs.pop()
                self.runs.append((path, start, begin, length + stored.nbytes))
            else:
                self.extent = _aligned(self.extent)
                self.runs.append((stored.path, stored.offset, self.extent, stored.nbytes))
            self.begins.append(self.extent)
            self.extent += stored.nbytes
            path, end = stored.path, stored.offset + stored.nbytes


class Buffer:
    """Memory for one layer: `raw` as in the file, and `ready` converted, where these differ."""

    def __init__(self, layers: Sequence[Layer], device: torch.device) -> None:
        raw, ready = self.sizes(layers, device)
        self.raw = torch.empty(raw, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.ready = torch.empty(ready, dtype=torch.uint8, device=device) if ready else None

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes + (0 if self.ready is None else self.ready.nbytes)

    @staticmethod
    def sizes(layers: Sequence[Layer], device: torch.device) -> tuple[int, int]:
        """Bytes of `raw` and `ready` for the largest of these layers."""
        raw = max(layer.extent for layer in layers)
        same = all(weight.stored.dtype == weight.placeholder.dtype for layer in layers for weight in layer.weights)
        if same and device.type == "cpu":
            return raw, 0
        return raw, max(sum(_aligned(weight.nbytes) for weight in layer.weights) for layer in layers)

    def fill(self, layer: Layer, files: Files) -> list[Tensor]:
        """Reads the layer; returns its weights."""
        view = self.raw.numpy().data
        for path, offset, begin, length in layer.runs:
            files.read(path, offset, view[begin : begin + length])
        pairs = zip(layer.weights, layer.begins, strict=True)
        raw = [weight.stored.of(self.raw[begin : begin + weight.stored.nbytes]) for weight, begin in pairs]
        return raw if self.ready is None else self._converted(layer, raw, self.ready)

    @staticmethod
    def _converted(layer: Layer, raw: list[Tensor], ready: Tensor) -> list[Tensor]:
        tensors, begin = [], 0
        for weight, source in zip(layer.weights, raw, strict=True):
            like = weight.placeholder
            tensors.append(ready[begin : begin + like.nbytes].view(like.dtype).view(like.shape).copy_(source))
            begin = _aligned(begin + like.nbytes)
        return tensors


class Reader:
    """Reads layers into buffers in a thread, which ends with the last reference to the reader."""

    def __init__(self, layers: list[Layer], after: list[int], device: torch.device, buffers: int, files: Files) -> None:
        self.layers = layers
        self._after, self._files = after, files
        self._free = [Buffer(layers, device) for _ in range(buffers)]
        self.nbytes = sum(buffer.nbytes for buffer in self._free)
        self._reading: dict[int, tuple[Buffer, Future[list[Tensor]]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specdec-weights")
        self._lock = threading.Lock()

    @contextmanager
    def at_hand(self, number: int) -> Iterator[None]:
        """Context in which this layer has its weights and the next ones are being read; for one thread at a time."""
        with self._lock:
            layer = self.layers[number]
            tensors = self._fetch(number)
            try:
                for weight, tensor in zip(layer.weights, tensors, strict=True):
                    weight.put(tensor)
                yield
            finally:
                for weight in layer.weights:
                    weight.take()

    def _fetch(self, number: int) -> list[Tensor]:
        wanted = [number]
        while len(wanted) < len(self._free) + len(self._reading) and self._after[wanted[-1]] not in wanted:
            wanted.append(self._after[wanted[-1]])
        # One thread reads, so an unwanted read ends before its buffer is reused.
        for unwanted in self._reading.keys() - set(wanted):
            self._free.append(self._reading.pop(unwanted)[0])
        for layer in wanted:
            if layer not in self._reading:
                buffer = self._free.pop()
                self._reading[layer] = buffer, self._thread.submit(buffer.fill, self.layers[layer], self._files)
        try:
            return self._reading[number][1].result()
        except Exception:
            self._free += [buffer for buffer, _ in self._reading.values()]
            self._reading.clear()
            raise


class StreamedForward:
    """Replaces a layer's `forward`; the layer has its weights while it runs."""

    def __init__(self, layer: nn.Module, reader: Reader, number: int) -> None:
        self._layer, self._forward = weakref.ref(layer), type(layer).forward
        self._reader, self._number = reader, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._reader.at_hand(self._number):
            return self._forward(self._layer(), *args, **kwargs)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
