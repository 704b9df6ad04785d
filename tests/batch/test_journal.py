"""The output in the making: whatever a kill leaves behind, the next run appends exactly what is missing."""

import random
from pathlib import Path

import pytest

from specdec.batch.journal import Journal
from specdec.errors import OptionError

SETTINGS = {"input": "abc", "options": {"seed": 0}}
LINES = [f'{{"row": {n}, "text": "é{"x" * (n % 7)}"}}\n'.encode() for n in range(30)]


def write(path: Path, order: list[int]) -> list[int]:
    """Adds the rows that are missing, in this order; which they were."""
    journal = Journal(path, SETTINGS)
    missing = [row for row in order if row not in journal]
    for row in missing:
        journal.add(row, LINES[row])
    if journal.done == len(LINES):
        journal.finish()
    else:
        journal.close()
    return missing


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("which", ["out.jsonl", "out.jsonl.journal"])
def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path, seed: int, which: str) -> None:
    """As where a kill came in the middle of a write, at any byte of it."""
    out, rng = tmp_path / "out.jsonl", random.Random(seed)
    order = rng.sample(range(5, len(LINES)), 20)
    write(out, order if "journal" in which else [0, 1, 2, *order])
    cut = tmp_path / which
    whole = cut.read_bytes()
    header = whole.index(b"\n") + 1 if "journal" in which else 0
    cut.write_bytes(whole[: rng.randrange(max(len(whole) - 40, header), len(whole))])
    write(out, list(range(len(LINES))))
    assert out.read_bytes() == b"".join(LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_row_in_both_files_is_written_once(tmp_path: Path) -> None:
    """As where a kill came after a row went from the journal to the file."""
    out = tmp_path / "out.jsonl"
    write(out, [1, 2, 5])
    out.write_bytes(b"".join(LINES[:3]))
    assert write(out, list(range(len(LINES)))) == [3, 4, *range(6, len(LINES))]
    assert out.read_bytes() == b"".join(LINES)


def test_a_run_without_a_row_binds_nobody(tmp_path: Path) -> None:
    """Its models could not be loaded: the corrected command begins anew. (It was refused.)"""
    out = tmp_path / "out.jsonl"
    Journal(out, SETTINGS).close()
    with_others = Journal(out, {**SETTINGS, "input": "other"})
    assert with_others.done == 0
    with_others.close()


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    """A finished file, a run with other settings, one that is under way: each error names the way out."""
    out = tmp_path / "out.jsonl"
    write(out, [0, 3])
    with pytest.raises(OptionError, match=r"begun with `input`='abc', and now it is 'other'.*--overwrite"):
        Journal(out, {**SETTINGS, "input": "other"})
    first = Journal(out, SETTINGS)
    with pytest.raises(OptionError, match="being written by another process"):
        Journal(out, SETTINGS)
    first.close()
    write(out, list(range(len(LINES))))
    with pytest.raises(OptionError, match=r"no unfinished run made it.*--overwrite"):
        Journal(out, SETTINGS)
    anew = Journal(out, SETTINGS, overwrite=True)
    assert anew.done == 0
    anew.close()
    with pytest.raises(OptionError, match="cannot be written"):
        Journal(tmp_path / "no" / "out.jsonl", SETTINGS)
