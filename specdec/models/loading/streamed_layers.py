"""Streams offloaded layers through a few buffers: the next layer is read while one computes.

With accelerate's hooks the disk waits while a module computes. Here a layer is the unit: a thread reads its weights one
after the other into a reused buffer, and layers that fit in memory stay there.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import OptionError, UnsupportedError
from specdec.models.hf.device_hooks import detach, execution_device
from specdec.models.loading.weight_files import Files, Stored, aligned

_BUFFERS = 2  # at most: one is read while the other computes


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
    """A module's weights in the order of their bytes, and their first bytes in a buffer, which has `extent` bytes."""

    def __init__(self, module: nn.Module, weights: list[Weight]) -> None:
        self.module: Any = weakref.ref(module)
        self.weights = sorted(weights, key=lambda weight: (weight.stored.path, weight.stored.offset))
        self.nbytes = sum(weight.nbytes for weight in weights)
        *self.begins, self.extent = accumulate((aligned(weight.stored.nbytes) for weight in self.weights), initial=0)


class Buffer:
    """Memory for one layer: `raw` as in the file, and `ready` converted, where the two differ."""

    def __init__(self, sizes: tuple[int, int], device: torch.device) -> None:
        raw, ready = sizes
        self.raw = torch.empty(raw, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.ready = torch.empty(ready, dtype=torch.uint8, device=device) if ready else None

    @staticmethod
    def sizes(layers: Sequence[Layer], device: torch.device) -> tuple[int, int]:
        """Bytes of `raw` and `ready` for the largest of these layers."""
        raw = max(layer.extent for layer in layers)
        as_stored = all(weight.stored.dtype == weight.placeholder.dtype for layer in layers for weight in layer.weights)
        if as_stored and device.type == "cpu":
            return raw, 0
        return raw, max(sum(aligned(weight.nbytes) for weight in layer.weights) for layer in layers)

    def fill(self, layer: Layer, files: Files) -> list[Tensor]:
        """Reads the layer; returns its weights."""
        tensors, at = [], 0
        for weight, begin in zip(layer.weights, layer.begins, strict=True):
            stored, like = weight.stored, weight.placeholder
            data = self.raw[begin : begin + stored.nbytes]
            files.read(stored.path, stored.offset, data.numpy().data)
            tensor = stored.of(data)
            if self.ready is not None:
                tensor = self.ready[at : at + like.nbytes].view(like.dtype).view(like.shape).copy_(tensor)
                at = aligned(at + like.nbytes)
            tensors.append(tensor)
        return tensors


class Reader:
    """Reads layers into buffers in a thread, which ends with the last reference to the reader."""

    def __init__(self, lists: Sequence[list[Layer]], device: torch.device, buffers: int, files: Files) -> None:
        self.layers = [layer for layers in lists for layer in layers]
        self._after: list[int] = []  # after the last layer of a list comes its first again, in the next pass
        for layers in lists:
            start, n = len(self._after), len(layers)
            self._after += [start + (i + 1) % n for i in range(n)]
        self._files = files
        self._free = [Buffer(Buffer.sizes(self.layers, device), device) for _ in range(buffers)]
        self._reading: dict[int, tuple[Buffer, Future[list[Tensor]]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specdec-weights")
        self._lock = threading.Lock()

    @contextmanager
    def loaded_weights(self, number: int) -> Iterator[None]:
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
        numbers = [number]
        while len(numbers) < len(self._free) + len(self._reading) and self._after[numbers[-1]] not in numbers:
            numbers.append(self._after[numbers[-1]])
        # One thread reads, so a stale read ends before its buffer is reused.
        for stale in self._reading.keys() - set(numbers):
            self._free.append(self._reading.pop(stale)[0])
        for layer in numbers:
            if layer not in self._reading:
                buffer = self._free.pop()
                self._reading[layer] = buffer, self._thread.submit(buffer.fill, self.layers[layer], self._files)
        try:
            return self._reading[number][1].result()
        except Exception:
            self._free += [buffer for buffer, _ in self._reading.values()]
            self._reading.clear()
            raise


def run_layer(reader: Reader, number: int, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a layer in place of its `forward`; the layer has its weights while it runs."""
    module = reader.layers[number].module()
    with reader.loaded_weights(number):
        return type(module).forward(module, *args, **kwargs)


@torch.no_grad()
def stream(model: nn.Module, stored: Mapping[str, Stored], *, max_memory: int | None = None) -> None:
    """Lets a model that accelerate has offloaded to disk, and that computes on one device, read its layers itself.

    Changes `model`, whose weights on disk are `stored` (`weight_files.find`). `max_memory` bounds the bytes of weights
    and buffers: weights outside the layers stay in memory, with two buffers or, where there is less room, one, then as
    many layers as fit (None: no layer). With one buffer nothing is read ahead. Raises OptionError if `max_memory` is
    too small, UnsupportedError for weights that are no plain parameters or tensors, LoadError for files that cannot be
    read; the model is then unchanged.
    """
    device, files = execution_device(model), Files()
    lists, outside = _layers_and_outside(model, stored)
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    fixed = sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}.values())
    fixed += sum({weight.stored: weight.nbytes for weight in outside}.values())
    streamed, buffers = _divide(lists, fixed, max_memory, device)
    reader = Reader(streamed, device, buffers, files)
    numbers = {layer: number for number, layer in enumerate(reader.layers)}
    residents = [layer for layers in lists for layer in layers if layer not in numbers]
    loaded = _load([*outside, *(weight for layer in residents for weight in layer.weights)], device, files)
    detach(model)
    for weight, tensor in loaded:
        weight.put(tensor)
    for layer, number in numbers.items():
        for weight in layer.weights:
            weight.take()
        layer.module().forward = partial(run_layer, reader, number)


def _layers_and_outside(model: nn.Module, stored: Mapping[str, Stored]) -> tuple[list[list[Layer]], list[Weight]]:
    """The layers with weights on disk, list by list, and the weights that belong to no layer or to several."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    owners = [f"{name}.{i}" for name, modules in lists.items() for i in range(len(modules))]
    placed, users = list[tuple[str, Weight]](), defaultdict[Stored, set[str]](set)
    for name, weight in _weights(model, stored):
        owner = next((owner for owner in owners if name.startswith(f"{owner}.")), "")
        placed.append((owner, weight))
        users[weight.stored].add(owner)
    by_owner = defaultdict[str, list[Weight]](list)
    for owner, weight in placed:
        by_owner[owner if len(users[weight.stored]) == 1 else ""].append(weight)
    by_list = [
        [Layer(module, by_owner[owner]) for i, module in enumerate(modules) if (owner := f"{name}.{i}") in by_owner]
        for name, modules in lists.items()
    ]
    return [layers for layers in by_list if layers], by_owner[""]


def _weights(model: nn.Module, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Weight]]:
    for prefix, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for leaf, tensor in home.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if type(tensor) not in (nn.Parameter, Tensor):
                    raise UnsupportedError(f"weights of type {type(tensor).__name__} cannot be read layer by layer")
                name = f"{prefix}.{leaf}" if prefix else leaf
                yield name, Weight(home, leaf, tensor, stored[name])


def _divide(
    lists: Sequence[list[Layer]], fixed: int, max_memory: int | None, device: torch.device
) -> tuple[list[list[Layer]], int]:
    """The layers that do not stay, where `fixed` bytes are in memory anyway, and how many buffers there is room for."""
    all_layers = [layer for layers in lists for layer in layers]
    if not all_layers:
        return [], 0
    if max_memory is None:
        return list(lists), _BUFFERS
    spare = max_memory - fixed
    if sum(layer.nbytes for layer in all_layers) <= spare:
        return [], 0
    size = sum(Buffer.sizes(all_layers, device))
    if spare < size:
        raise OptionError.of("max_memory", f"at least {fixed + size} bytes for this model", max_memory)
    buffers, streamed = min(_BUFFERS, spare // size), []
    spare -= buffers * size
    for layers in reversed(lists):  # decoders come last, and their layers are read in every pass
        residents = _spread(layers, spare)
        spare -= sum(layer.nbytes for layer in residents)
        streamed.append([layer for layer in layers if layer not in residents])
    return streamed, buffers


def _spread(layers: list[Layer], spare: int) -> set[Layer]:
    """As many layers as fit into `spare` bytes, evenly spread, so that the layers between them can be read in time."""
    n = len(layers)
    for count in range(n, 0, -1):
        residents = {layer for i, layer in enumerate(layers) if (i + 1) * count // n > i * count // n}
        if sum(layer.nbytes for layer in residents) <= spare:
            return residents
    return set()


def _load(weights: Sequence[Weight], device: torch.device, files: Files) -> list[tuple[Weight, Tensor]]:
    """The weights with their values; equal places in a file become one tensor."""
    tensors: dict[Stored, Tensor] = {}
    for weight in weights:
        stored = weight.stored
        if stored not in tensors:
            data = torch.empty(stored.nbytes, dtype=torch.uint8)
            files.read(stored.path, stored.offset, data.numpy().data)
            tensors[stored] = stored.of(data).to(device, weight.placeholder.dtype)
    return [(weight, tensors[weight.stored]) for weight in weights]
