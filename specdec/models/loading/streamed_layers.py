"""Streams offloaded layers through a few buffers: the next layer is read while one computes.

With accelerate's hooks the disk waits while a module computes. Here a layer is the unit: its bytes mostly lie side by
side in the checkpoint, a thread reads them at once into a reused buffer, and layers that fit in memory stay there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.errors import OptionError, UnsupportedError
from specdec.models.hf.device_hooks import detach, execution_devices, wrapped_later
from specdec.models.loading.weight_files import Files, Stored, find
from specdec.models.loading.weight_reader import Buffer, Layer, Reader, StreamedForward, Weight

Layers = list[tuple[nn.Module, Layer]]


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes of resident weights, of the buffers, and of streamed weights."""

    resident: int
    buffers: int
    streamed: int


@torch.no_grad()
def stream(model: nn.Module, *, max_memory: int | None = None, buffers: int = 2) -> Residency:
    """Lets a model that accelerate has offloaded to disk read its layers itself; changes `model`.

    `max_memory` bounds the bytes of weights and buffers: what is outside the layers stays in memory, with at most
    `buffers` buffers, then as many layers as fit (None: no layer). With one buffer nothing is read ahead. Raises
    OptionError if `max_memory` is too small, UnsupportedError if weights are not in files, several devices compute or a
    forward was replaced, LoadError for missing or broken files; the model is then unchanged.
    """
    if buffers < 1:
        raise OptionError.of("buffers", "at least 1", buffers)
    _check_unwrapped(model)
    device, files = _device(model), Files()
    lists, rest = _layers_and_rest(model)
    fixed = _bytes_in_memory(model) + sum({weight.stored: weight.nbytes for weight in rest}.values())
    streamed, buffers = _streamed(lists, fixed, max_memory, buffers, device)
    reader = _reader(streamed, device, buffers, files)
    numbers = {layer: number for number, layer in enumerate(reader.layers)}
    kept = [layer for layers in lists for _, layer in layers if layer not in numbers]
    weights = [*rest, *(weight for layer in kept for weight in layer.weights)]
    loaded = _load(weights, device, files)
    detach(model)
    for weight, tensor in loaded:
        weight.put(tensor)
    for module, layer in (pair for layers in streamed for pair in layers):
        for weight in layer.weights:
            weight.take()
        module.forward = StreamedForward(module, reader, numbers[layer])
    return Residency(fixed + sum(layer.nbytes for layer in kept), reader.nbytes, sum(layer.nbytes for layer in numbers))


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if wrapped_later(module):
            raise UnsupportedError(f"{name!r} was wrapped after it was offloaded: stream the model before that")


def _device(model: nn.Module) -> torch.device:
    devices = execution_devices(model)
    if len(devices) > 1:
        raise UnsupportedError(f"layers are read for one device, the model computes on {sorted(map(str, devices))}")
    return devices.pop() if devices else torch.device("cpu")


def _layers_and_rest(model: nn.Module) -> tuple[list[Layers], list[Weight]]:
    """The layers with weights on disk, list by list, and the weights that belong to none or to several."""
    lists = list(_module_lists(model))
    owners = {f"{name}.{i}": module for name, found in lists for i, module in enumerate(found)}
    by_owner: dict[str, list[Weight]] = {owner: [] for owner in ("", *owners)}
    users: dict[Stored, set[str]] = defaultdict(set)
    for name, weight in _weights(model):
        owner = next((owner for owner in owners if name.startswith(f"{owner}.")), "")
        by_owner[owner].append(weight)
        users[weight.stored].add(owner)
    shared = {stored for stored, found in users.items() if len(found) > 1}
    rest = by_owner.pop("")
    rest += [weight for weights in by_owner.values() for weight in weights if weight.stored in shared]
    layers = {owner: [w for w in weights if w.stored not in shared] for owner, weights in by_owner.items()}
    pairs = [
        [(module, Layer(layers[f"{name}.{i}"])) for i, module in enumerate(found) if layers[f"{name}.{i}"]]
        for name, found in lists
    ]
    return [found for found in pairs if found], rest


def _module_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    outer: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{o}.") for o in outer):
            outer.append(name)
            yield name, module


def _weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    stored = find(model)
    for prefix, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for leaf, tensor in home.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if type(tensor) not in (nn.Parameter, Tensor):
                    raise UnsupportedError(f"weights of type {type(tensor).__name__} cannot be read layer by layer")
                name = f"{prefix}.{leaf}" if prefix else leaf
                yield name, Weight(home, leaf, tensor, stored[name])


def _bytes_in_memory(model: nn.Module) -> int:
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())


def _streamed(
    lists: Sequence[Layers], fixed: int, max_memory: int | None, buffers: int, device: torch.device
) -> tuple[list[Layers], int]:
    """The layers that do not stay, where `fixed` bytes are in memory anyway, and how many buffers there is room for."""
    layers = [layer for found in lists for _, layer in found]
    if max_memory is None or not layers:
        return list(lists), buffers
    spare = max_memory - fixed
    if sum(layer.nbytes for layer in layers) <= spare:
        return [], 0
    size = sum(Buffer.sizes(layers, device))
    if spare < size:
        raise OptionError.of("max_memory", f"at least {fixed + size} bytes for this model", max_memory)
    buffers, streamed = min(buffers, spare // size), []
    spare -= buffers * size
    for found in reversed(lists):  # decoders come last, and their layers are read in every pass
        kept = _spread(found, spare)
        spare -= sum(layer.nbytes for layer in kept)
        streamed.append([(module, layer) for module, layer in found if layer not in kept])
    return streamed, buffers


def _spread(found: Layers, spare: int) -> set[Layer]:
    """As many layers as fit into `spare` bytes, evenly spread, so that there is time to read those between them."""
    n = len(found)
    for count in range(n, 0, -1):
        kept = {layer for i, (_, layer) in enumerate(found) if (i + 1) * count // n > i * count // n}
        if sum(layer.nbytes for layer in kept) <= spare:
            return kept
    return set()


def _reader(streamed: Sequence[Layers], device: torch.device, buffers: int, files: Files) -> Reader:
    """A reader of these layers; after the last one of a list comes its first again, in the next pass."""
    layers = [layer for found in streamed for _, layer in found]
    after: list[int] = []
    for found in streamed:
        start, n = len(after), len(found)
        after += [start + (i + 1) % n for i in range(n)]
    return Reader(layers, after, device, buffers if layers else 0, files)


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
