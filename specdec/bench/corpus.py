"""The text of the package's pair: the standard library of the running interpreter, split in two."""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

# Generated tables and tests.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
}
_HELD_OUT_PERCENT = 5


def is_held_out(relative_path: str) -> bool:
    """Whether a module is kept for evaluation; its path decides, so the split is the same on every machine."""
    return zlib.crc32(relative_path.encode()) % 100 < _HELD_OUT_PERCENT


def source_files(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yields `(relative path, text)` of one side of the split, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or is_held_out(relative.as_posix()) != held_out:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield relative.as_posix(), text


def held_out_prompts(count: int, *, characters: int = 480) -> list[str]:
    """At most `count` prompts of about `characters`: held-out code from a top-level `def` or `class` to a line end."""
    prompts: list[str] = []
    for _, text in source_files(held_out=True):
        starts = [found.start() + 1 for found in re.finditer(r"\n(def|class) ", text)]
        starts = [start for start in starts if len(text) - start > 2 * characters]
        if starts:
            start = starts[len(starts) // 2]
            prompts.append(text[start : text.find("\n", start + characters) + 1])
        if len(prompts) == count:
            break
    return prompts
