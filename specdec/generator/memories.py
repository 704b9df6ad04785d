"""The argument `memory`: whether drafts that copy remember, and the texts of files that they know from the start."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from specdec.core.drafts import Draft
from specdec.errors import OptionError
from specdec.options.fields import is_whole
from specdec.proposers.memory import Memory

MEMORY_BYTES = 2**27
"""The default size of a memory."""
_WORDS = {"on": True, "off": False}


@dataclass(frozen=True)
class MemoryWish:
    """What a caller's `memory` asks for: at most so many bytes, 0 for no memory, and the texts of the files."""

    most_bytes: int
    texts: tuple[str, ...] = ()

    @classmethod
    def read(cls, memory: Any) -> MemoryWish:
        """Reads the files of `memory`; raises OptionError for what is no memory, and for files without text."""
        if isinstance(memory, cls):
            return memory
        if isinstance(memory, list | tuple) and len(memory) == 1:
            [memory] = memory
        wanted = _WORDS.get(memory, memory) if isinstance(memory, str) else memory
        if wanted is None or isinstance(wanted, bool):
            return cls(MEMORY_BYTES if wanted else 0)
        if is_whole(wanted) and int(wanted) > 0:
            return cls(int(wanted))
        paths = wanted if isinstance(wanted, list | tuple) else [wanted]
        if not paths or not all(path and isinstance(path, str | PathLike) for path in paths):
            raise OptionError.of("memory", "True, False, a number of bytes, or files and folders of text", memory)
        return cls(MEMORY_BYTES, tuple(text for path in paths for text in _texts(Path(path))))

    def made(self, tokenizer: Any) -> Memory | None:
        """The memory, which has read the files; raises OptionError for files without a tokenizer."""
        memory = Memory(self.most_bytes) if self.most_bytes else None
        if self.texts and tokenizer is None:
            raise OptionError("`memory` names files, which a tokenizer must read: pass `tokenizer=`")
        if self.texts and memory is not None:
            tokens = tokenizer(list(self.texts), add_special_tokens=False, verbose=False)["input_ids"]
            if not memory.read(tokens):
                most = f"{self.most_bytes / 2**20:.0f} MiB"
                warnings.warn(
                    f"`memory`: not all files fit in {most}, the first are left out: name fewer", stacklevel=4
                )
        return memory

    def check(self, draft: Draft | None) -> None:
        """Raises OptionError where files were named for a draft that does not copy."""
        if self.texts and getattr(getattr(draft, "text", draft), "memory", None) is None:
            raise OptionError(
                f"`memory` names files for drafts that copy, and the draft is {draft!r}: pass draft='suffix', or leave "
                "out the files"
            )


def _texts(path: Path) -> list[str]:
    """The text of a file, or of all files below a folder that are not hidden and text in UTF-8, at least one."""
    files, texts, reason = [path], list[str](), "no file in it"
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in inside if not any(part[0] == "." for part in file.relative_to(path).parts)]
    for file in files:
        try:
            texts.append(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    if not texts:
        raise OptionError(f"`memory`: {path} has no text in UTF-8 ({reason}): name another file or folder")
    return texts
