"""The argument `memory`: whether drafts that copy remember, and the texts of files that they have from the start."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from specdec.core.drafts import Draft
from specdec.errors import OptionError
from specdec.options.fields import is_whole
from specdec.proposers.memory import Memory

LOG = logging.getLogger(__name__)
MEMORY_BYTES = 2**27
"""The default size of a memory."""
_WORDS = {"on": True, "off": False}


@dataclass(frozen=True)
class MemoryWish:
    """A caller's `memory`: at most so many bytes, 0 for no memory, and the texts of the files.

    `is_default`: a program's default and nobody's wish, so that nothing is said where the draft has no use for it.
    """

    most_bytes: int
    texts: tuple[str, ...] = ()
    is_default: bool = False

    @classmethod
    def read(cls, memory: Any) -> MemoryWish:
        """Reads the files of `memory`; raises OptionError for a value that is no memory, and for files without text."""
        if isinstance(memory, cls):
            return memory
        if isinstance(memory, list | tuple) and len(memory) == 1:
            [memory] = memory
        value = _WORDS.get(memory, memory) if isinstance(memory, str) else memory
        if value is None or isinstance(value, bool):
            return cls(MEMORY_BYTES if value else 0)
        if is_whole(value) and int(value) > 0:
            return cls(int(value))
        paths = value if isinstance(value, list | tuple) else [value]
        if not paths or not all(path and isinstance(path, str | PathLike) for path in paths):
            raise OptionError.of("memory", "True, False, a number of bytes, or files and folders of text", memory)
        texts = list[str]()
        for path in paths:
            texts += _texts(Path(path), MEMORY_BYTES - sum(map(len, texts)))
        return cls(MEMORY_BYTES, tuple(texts))

    def make(self, tokenizer: Any) -> Memory | None:
        """The memory, which has read the files; raises OptionError for files without a tokenizer."""
        memory = Memory(self.most_bytes) if self.most_bytes else None
        if self.texts and tokenizer is None:
            raise OptionError("`memory` names files, which a tokenizer must read: pass `tokenizer=`")
        if self.texts and memory is not None:
            rows = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in self.texts)
            if not memory.read(rows):
                _warn_of_rest()
        return memory

    def check(self, draft: Draft | None) -> None:
        """Raises OptionError where files were named for a draft that does not copy; logs that it has no memory."""
        if not self.most_bytes or getattr(getattr(draft, "text", draft), "memory", None) is not None:
            return
        idle = f"drafts that copy, and the draft is {draft!r}: pass draft='suffix', or leave out"
        if self.texts:
            raise OptionError(f"`memory` names files for {idle} the files")
        if not self.is_default:
            LOG.info("`memory` is for %s `memory`", idle)


DEFAULT = MemoryWish(MEMORY_BYTES, is_default=True)
"""The memory of programs that have one by default."""


def _texts(path: Path, room: int) -> list[str]:
    """The text in UTF-8 of a file, or of the files below a folder that are not hidden, in at most `room` bytes."""
    files, texts, reason, whole = [path], list[str](), "no file in it", True
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in inside if not any(part[0] == "." for part in file.relative_to(path).parts)]
    for file in files:
        try:
            if file.stat().st_size > room:
                whole, reason = False, "too large"
                continue
            texts.append(file.read_text("utf-8"))
            room -= file.stat().st_size
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    if not texts:
        raise OptionError(f"`memory`: {path} has no text in UTF-8 ({reason}): name another file or folder")
    if not whole:
        _warn_of_rest()
    return texts


def _warn_of_rest() -> None:
    warnings.warn(f"`memory`: not all files fit in {MEMORY_BYTES / 2**20:.0f} MiB: name fewer", stacklevel=5)
