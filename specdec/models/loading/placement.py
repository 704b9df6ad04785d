"""Where weights lie: which modules leave memory, and the folder of written weights."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import convert_file_size_to_int, get_balanced_memory
from safetensors.torch import save_file
from torch import nn

from specdec.errors import OptionError
from specdec.models.hf.private_api import skipped_keys
from specdec.models.loading.streamed_layers import stream
from specdec.models.loading.weight_files import Stored
from specdec.options.load import Loading

DeviceMap = dict[str, str | int]
POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words that transformers' `device_map` takes."""
_UNLIMITED = 1 << 60  # bytes


def device_map(how: Loading, kind: Any, config: Any) -> DeviceMap | None:
    """The devices of an offloaded model's modules; None if all stay in memory.

    All layers are offloaded; with an accelerator and `max_memory`, only the last modules, which do not fit.
    """
    if how.offload is None:
        return None
    main: str | int = torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"
    if how.offload == "cpu" and main == "cpu":
        warnings.warn(
            "`offload`='cpu' changes nothing: without an accelerator, weights are on the CPU anyway", stacklevel=2
        )
        return None
    with init_empty_weights():
        model = kind.from_config(config, trust_remote_code=how.trust_remote_code)
    if how.max_memory is None or main == "cpu":
        return dict(_places(model, how.offload, main))
    model.tie_weights()
    memory = dict(how.max_memory)
    if how.offload == "cpu":
        memory["cpu"] = _UNLIMITED
    return infer_auto_device_map(model, max_memory=memory, no_split_module_classes=_layers(model))


def read_ahead(model: Any, how: Loading, stored: Mapping[str, Stored]) -> None:
    """Streams layers from disk; layers that fit in `max_memory` stay. With several devices accelerate's hooks stay.

    `stored`: the places of weights on disk (`find`). Raises OptionError if even the weights outside the layers do not
    fit.
    """
    if how.offload == "disk" and not torch.accelerator.is_available():
        most = (how.max_memory or {}).get("cpu")
        stream(model, stored, max_memory=None if most is None else convert_file_size_to_int(most))
    elif how.offload == "disk" and how.max_memory is None:
        stream(model, stored)


def to_devices(model: Any, how: Loading) -> None:
    """Moves a model that was read into host memory to the devices of `device_map`, as `from_pretrained` would."""
    places = how.device_map
    if places is None:
        model.to(torch.get_default_device())
        return
    if isinstance(places, str) and places in POLICIES:
        kinds = {"no_split_module_classes": _layers(model)}
        memory = None if how.max_memory is None else dict(how.max_memory)
        if places != "sequential":
            memory = get_balanced_memory(model, memory, low_zero=places == "balanced_low_0", **kinds)
        places = infer_auto_device_map(model, max_memory=memory, **kinds)
    if not isinstance(places, Mapping):
        places = {"": places}
    dispatch_model(model, dict(places), skip_keys=skipped_keys(model), offload_dir=how.offload_folder)


def _layers(model: Any) -> list[str]:
    """Names of the classes of layers, which lie on one device each."""
    return list({type(layer).__name__ for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part})


def dispatch(model: Any, places: DeviceMap, folder: Path | None) -> None:
    """Offloads a model that was changed after loading; weights for the disk go into one file in `folder`."""
    if folder is None:
        dispatch_model(model, places, skip_keys=skipped_keys(model))
        return
    away = tuple(name and f"{name}." for name, place in places.items() if place == "disk")
    state = {name: tensor for name, tensor in model.state_dict().items() if f"{name}.".startswith(away)}
    file, first = folder / "weights.safetensors", dict[int, str]()  # by address: tied weights are written once
    for name, tensor in state.items():
        first.setdefault(tensor.data_ptr(), name)
    save_file({name: state[name].contiguous() for name in first.values()}, file)
    index = {
        name: {
            "safetensors_file": str(file),
            "weight_name": first[tensor.data_ptr()],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for name, tensor in state.items()
    }
    dispatch_model(model, places, offload_dir=folder, offload_index=index, skip_keys=skipped_keys(model))


@contextmanager
def offload_folder(how: Loading) -> Iterator[Path | None]:
    """Context with the folder for written weights; None if nothing goes to disk.

    Raises OptionError if it cannot be written to. After an error all written files are deleted.
    """
    if how.offload != "disk" and how.offload_folder is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="specdec-") if how.offload_folder is None else how.offload_folder)
    existed = how.offload_folder is not None and folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            before = set(folder.iterdir())
    except OSError as error:
        raise OptionError.of("offload_folder", "a folder that can be written to", str(folder), str(error)) from error
    try:
        yield folder
    except BaseException:
        if existed:
            for path in set(folder.iterdir()) - before:
                path.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _places(module: nn.Module, away: str, main: str | int, name: str = "") -> Iterator[tuple[str, str | int]]:
    """Names of modules and weights with their places: layers (items of module lists) `away`, the rest on `main`."""
    if not any(isinstance(part, nn.ModuleList) for part in module.modules()):
        yield name, main
        return
    prefix = f"{name}." if name else ""
    for part, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield prefix + part, main
    for part, child in module.named_children():
        if isinstance(module, nn.ModuleList):
            yield prefix + part, away
        else:
            yield from _places(child, away, main, prefix + part)
