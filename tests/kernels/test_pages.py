"""Memory for weights."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from specdec.kernels import pages

MIB = 1 << 20


def huge_kilobytes(tensor: torch.Tensor) -> int:
    """How much of the mapping around a tensor lies in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(one, 16) for one in found.groups())
            inside = begin <= tensor.data_ptr() < end
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


def test_tensors_in_huge_pages() -> None:
    """Large ones are copied, joined and made in them, value by value; small ones stay where they are."""
    values = torch.arange(4 * MIB, dtype=torch.int32).view(1024, -1)
    settled, whole = pages.in_huge_pages(values), pages.joined([values, values[:8]])
    assert torch.equal(settled, values)
    assert torch.equal(whole, torch.cat([values, values[:8]]))
    small = torch.ones(8)
    assert pages.in_huge_pages(small) is small
    assert pages.empty((3, 4), torch.bfloat16).shape == (3, 4)
    if pages.state().startswith("huge") and "AnonHugePages" in Path("/proc/self/smaps").read_text():
        assert settled.data_ptr() % (2 * MIB) == 0
        if not huge_kilobytes(settled):
            pytest.skip("the system has no huge page left")


def test_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing changes there, and the words say why."""
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.state() == f"ordinary, as {tmp_path}/enabled says always madvise [never]"
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "none")
    assert pages.state() == "ordinary, as the system has no huge ones"
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(pages.in_huge_pages(torch.ones(MIB)), torch.ones(MIB))
