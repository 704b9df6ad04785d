"""Errors of loading, as one sentence with the cause and the way out."""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from json import JSONDecodeError
from pathlib import Path

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from specdec.errors import LoadError, OptionError, SpecdecError, closest_name

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = "its files are broken or incomplete; delete them and download or save them again"
_MEMORY = "there is not enough memory; try a smaller `dtype`, a `quantization`, or `offload='disk'`"
_DISK = "the disk is full; free some space, or name another `offload_folder`"
_AWAY = "the hub cannot be reached; check the network, or name a folder that holds the model"
_NAME = "check the name, or convert the checkpoint to safetensors if that is what is missing"


def check_folder(source: str | os.PathLike[str], argument: str = "model") -> None:
    """Raises OptionError if `source` can only be a path, as a GGUF file's, and nothing is there."""
    name = str(source)
    only_a_path = not isinstance(source, str) or name.startswith((".", "~", os.sep)) or name.count("/") > 1
    only_a_path |= name.endswith(".gguf")
    if only_a_path and not Path(name).is_dir():
        file = "file" if name.endswith(".gguf") else "folder"
        kind = (
            "it is a file of another kind" if Path(name).exists() else f"there is no such {file}{_nearest(Path(name))}"
        )
        raise OptionError.of(argument, "a hub id, the folder of a model or a GGUF file", name, kind)


def _nearest(path: Path) -> str:
    """A question after a name that no file or folder beside it has, where one of these has nearly this name."""
    with suppress(OSError):  # no such folder, or one that may not be read
        models = (file.name for file in path.parent.iterdir() if file.is_dir() or file.suffix == ".gguf")
        if near := closest_name(path.name, models):
            return f" (did you mean {str(path.parent / near)!r}?)"
    return ""


@contextmanager
def explain_errors(name: str, argument: str = "model") -> Iterator[None]:
    """Context that raises errors of loading `name` as OptionError if another argument would help, else as LoadError.

    `argument` is the caller's word for it. Frames of the failed load, which may hold half a model, are cleared.
    """
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        traceback.clear_frames(error.__traceback__)
        wrong = next(_wrong_files(Path(name)), None) if cause in (_BROKEN, _NAME) else None
        kind = OptionError if cause is _NAME and wrong is None else LoadError
        cause = _BROKEN if wrong else cause
        reason = wrong or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise kind(f"`{argument}` {name!r} cannot be loaded ({reason}): {cause}") from error


def check_reached(error: Exception, name: str, argument: str = "model") -> None:
    """Raises LoadError if `error` means that the hub is unreachable, as another request would take long."""
    if _cause(error) is _AWAY:
        with explain_errors(name, argument):
            raise error


def check_complete(info: dict[str, set[str]]) -> None:
    """Raises an error to be explained if weights were missing in a checkpoint, and so were initialised at random."""
    if missing := sorted(info["missing_keys"]):
        raise EOFError(f"{len(missing)} weights are missing, {missing[0]}…")


def _wrong_files(folder: Path) -> Iterator[str]:
    """What is wrong with the files of weights in a folder, one by one."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        names = {str(name) for name in index["weight_map"].values()}
    except FileNotFoundError:
        names = {path.name for path in folder.glob("*.safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = set()
        yield "model.safetensors.index.json does not say where the weights are"
    for path in (folder / name for name in sorted(names)):
        if wrong := what_is_wrong(path):
            yield f"{path.name} {wrong}"


def what_is_wrong(path: Path) -> str | None:
    """What is wrong with a safetensors file as a whole, after its name; None for a readable one."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > size:
            return f"is no safetensors file, or was cut in its header: it has {size} bytes"
        try:
            entries = json.loads(file.read(start - 8))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            end = start + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return "has no header of a safetensors file"
    return f"was cut: it has {size} bytes, and its header tells of {end}" if end > size else None


def _cause(error: Exception) -> str | None:
    text = str(error).lower()
    if isinstance(error.__cause__, LocalEntryNotFoundError):
        return _AWAY
    if getattr(error, "errno", None) in _FULL or "no space left" in text:
        return _DISK
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return _MEMORY
    unreadable = isinstance(error, SafetensorError | JSONDecodeError | EOFError | UnicodeDecodeError | RuntimeError)
    if unreadable or "not a valid json file" in text:
        return _BROKEN
    return _NAME if isinstance(error, OSError | ValueError) else None
