"""Packed weights on disk: what was packed once is read as it lies the next time.

They are packed folders (`packed_folder`) in `packed`, beside the kernels, or in `$SPECDEC_PACKED`. A folder's name is a
digest of the source's files, the options of loading, this processor, and the releases and sources of what packs. A
thread of low priority writes it after loading, in a folder of another name; a program that ends waits some seconds
for it. Above `$SPECDEC_PACKED_BYTES` the folders that were not loaded for the longest time go; 0 keeps none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from specdec import __version__, kernels
from specdec.errors import LoadError, SpecdecError, UnsupportedError
from specdec.kernels import cache_files
from specdec.models.backends.packed_layers import is_packed
from specdec.models.gguf.reader import part_names
from specdec.models.hf.private_api import cached
from specdec.models.loading.gguf import gguf_path
from specdec.models.loading.packed_folder import METHOD, PackedFolder
from specdec.options.load import AUTO, Loading

_log = logging.getLogger(__name__)
_FOLDER, _BYTES = "SPECDEC_PACKED", "SPECDEC_PACKED_BYTES"
_MOST = 10 * 2**30  # bytes of all folders
_LEAST = 2**26  # bytes of weights: fewer are packed in no time
_HEAD = 2**16  # bytes of a file that its digest covers
_MARK = "source.txt"  # it says what a folder was made from, and its time when the folder was last used
_HUB_FILE = re.compile(r"/models--[^/]+/snapshots/[0-9a-f]{40}/")  # a commit's files, which do not change
_WRITES = ContextVar("_WRITES", default=True)
_EXIT_SECONDS = 5.0  # a program waits so long at its end
_CODE = (  # these files decide what is packed
    *("kernels/*.py", "models/gguf/*.py", "models/loading/*.py"),
    *("models/backends/experts.py", "models/backends/packed_layers.py", "options/load.py"),
)
_BROKEN = LoadError, ValueError, KeyError, OSError  # reading a broken folder raises these


class KeptWeights:
    """The packed weights of one load, which lie in `folder`, or will; None: the load keeps none.

    `name` is a folder or hub name, `options` are of a load into this processor's memory.
    """

    def __init__(self, name: str, options: Loading) -> None:
        self._name, self._options, self._began, self._most = name, options, perf_counter(), _most()
        self.folder, self._source, self._ended = None, "", 0.0
        with suppress(OSError, ValueError, SpecdecError, kernels.Lack):  # the load says what is wrong with its source
            if self._most and kernels.available() and (source := _source(name, options)):
                self._source = source
                self.folder = _root() / hashlib.sha256(source.encode()).hexdigest()[:16]

    def read(self, load: Callable[[str, Loading], Any]) -> Any:
        """The model that `load` reads from a folder with options; None without a folder. Deletes a broken folder."""
        if self.folder is None or not (self.folder / _MARK).exists():
            return None
        with suppress(OSError):  # not ours to write
            os.utime(self.folder / _MARK)
        plain = replace(self._options, quantization=None, dtype="auto", gguf_file=None, revision=None)
        try:
            model = load(str(self.folder), plain)
        except Exception as error:
            _log.info("packed weights in %s cannot be read (%s), and are packed anew", self.folder, error)
            number = getattr(error.__cause__ or error, "errno", None)  # transformers' errors have none
            if isinstance(error, _BROKEN) and number in (None, errno.ENOENT):
                shutil.rmtree(self.folder, ignore_errors=True)
            else:  # the folder may be whole: memory or open files ran out, say
                self.folder = None
            return None
        self.folder = None
        model.name_or_path = model.config.name_or_path = self._name
        return model

    def writing(self, model: Any) -> threading.Thread | None:
        """A thread, not yet started, that writes a model's packed weights; None if they are too few or too many."""
        if self.folder is None or not _WRITES.get() or not is_packed(model):
            return None
        try:
            packed = PackedFolder(model)
        except UnsupportedError as error:
            _log.debug("packed weights are not kept: %s", error)
            return None
        size = f"{packed.nbytes / 2**30:.1f} GiB"
        if packed.nbytes > self._most:
            _log.info("packed weights are not kept: they take %s, and %s allows %.1f", size, _BYTES, self._most / 2**30)
        if not _LEAST <= packed.nbytes <= self._most:
            return None
        message = (
            "packed weights (%s) are written to %s meanwhile: the next load reads them, instead of packing for %.1f s"
        )
        _log.info(message, size, self.folder, perf_counter() - self._began)
        return threading.Thread(target=self._write, args=(packed,), name="specdec-packed", daemon=False)

    def _write(self, packed: PackedFolder) -> None:
        assert self.folder is not None
        with suppress(AttributeError, OSError):  # not on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            if cache_files.is_locked(lock := self.folder.with_suffix(".lock"), _FOLDER):
                return
            with cache_files.file_lock(lock, _FOLDER):
                if not (self.folder / _MARK).exists():  # another process may have written it
                    self._put(packed)
            cache_files.make_room(self.folder, _MARK, self._most, _FOLDER)
        except Exception as error:  # disks, other processes and weights that change raise many kinds
            _log.info("packed weights are not kept: %s", error)

    def _put(self, packed: PackedFolder) -> None:
        """Writes the folder under another name, and moves it to its place once it is whole."""
        assert self.folder is not None
        part = self.folder.with_suffix(".part")
        for stale in part.parent.glob(f"{'?' * 16}.part"):  # processes that were killed left them
            if stale == part or not cache_files.is_locked(stale.with_suffix(".lock"), _FOLDER):
                shutil.rmtree(stale, ignore_errors=True)
        free = shutil.disk_usage(part.parent).free
        if free < 2 * packed.nbytes:
            raise kernels.Lack(f"{part.parent} has {free / 2**30:.1f} GiB free", f"name another folder in {_FOLDER}")
        part.mkdir()
        try:
            packed.write(part, self._check)
            (part / _MARK).write_text(self._source, "utf-8")
            shutil.rmtree(self.folder, ignore_errors=True)  # a broken folder may lie there
            part.rename(self.folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _check(self) -> None:
        """Raises Lack if the program has been waiting for too long to end."""
        if not threading.main_thread().is_alive():
            self._ended = self._ended or perf_counter()
            if perf_counter() - self._ended > _EXIT_SECONDS:
                raise kernels.Lack("the program ended before", "")


@contextmanager
def packed_weights_unwritten() -> Iterator[None]:
    """Loads meanwhile read packed weights and write none: writing would disturb what is measured, and fill the disk."""
    token = _WRITES.set(False)
    try:
        yield
    finally:
        _WRITES.reset(token)


def packed_weights() -> str:
    """The count, place and size of all packed folders, in words; raises Lack."""
    root = _root()
    folders = [path.parent for path in root.glob(f"*/{_MARK}")]
    return f"of {len(folders)} models in {root}, {sum(map(cache_files.size, folders)) / 2**30:.1f} GiB"


def _most() -> int:
    """Bytes that all folders may take; 0, and a line in the log, if the variable is no number."""
    setting = os.environ.get(_BYTES) or str(_MOST)
    if not setting.isdecimal():
        message = "packed weights are not kept: %s must be a number of bytes, got %r: correct or unset it"
        _log.warning(message, _BYTES, setting)
    return int(setting) if setting.isdecimal() else 0


def _root() -> Path:
    """The folder of all packed weights; raises Lack without a home folder."""
    path = os.environ.get(_FOLDER)
    return (Path(path) if path else kernels.folder() / "packed").absolute()


def _source(name: str, options: Loading) -> str | None:
    """All that decides which weights a load packs, in lines; None for a source that is packed, or runs its own code."""
    if options.trust_remote_code:  # that code may lie anywhere
        return None
    if options.gguf_file is None:
        first = Path(cached(name, "config.json", options.revision))
        weights = sorted(first.parent.glob("*.safetensors"))
        scheme = json.loads(first.read_text("utf-8")).get("quantization_config") or {}
        if scheme.get("quant_method") == METHOD:
            return None
    else:
        first = gguf_path(name, str(options.gguf_file), options.revision)
        weights = [Path(part) for part in part_names(str(first))]
    dtype = str(options.dtype).removeprefix("torch.")
    threads = torch.get_num_threads() if options.quantization in (None, AUTO) else 0  # speeds decide these
    settings = f"{options.quantization} {dtype} {options.activations} {options.backend == 'packed'} {threads}"
    releases = f"specdec {__version__}, transformers {transformers.__version__}"
    files = [*weights, *sorted(first.parent.glob("*.json")), *sorted(first.parent.glob("*.py"))]
    states = [str(first)] if _HUB_FILE.search(first.as_posix()) else map(_file_state, files)
    return "\n".join([*states, settings, releases, kernels.digest(), _code()])


def _file_state(path: Path) -> str:
    """A file's path, size, times, and the digest of its first bytes."""
    state = path.stat()
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD)).hexdigest()
    return f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {head}"


def _code() -> str:
    """A digest of the code that packs."""
    root = Path(__file__).parents[2]
    files = [path for pattern in _CODE for path in sorted(root.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
