"""Files to which a run appends lines, so that after a kill the next run can go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file that is open for appending; at the end, cuts an incomplete last line off the file."""
    end = 0
    with Path(file.name).open("rb") as reader:
        for line in reader:
            if line.endswith(b"\n"):
                end += len(line)
                yield line
    file.truncate(end)
