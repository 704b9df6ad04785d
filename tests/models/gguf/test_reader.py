"""The container: what the package gguf writes is what is read, and a broken file is one line that says how."""

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import LoadError, OptionError, SpecGenerator, UnsupportedError
from specdec.models import load_model
from specdec.models.gguf import GgufReader
from tests.folders import saved_gguf
from tests.models.gguf.files import written

gguf = pytest.importorskip("gguf")


def test_keys(tmp_path: Path) -> None:
    keys = {"a": True, "b": 7, "c": "ü", "d": 0.5, "e": ["x", "", "ü"], "f": [1, 2, 3], "g": [0.5], "h": [True, False]}
    found = GgufReader(written(tmp_path / "a.gguf", "llama", keys)).keys
    assert {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()} == {
        "general.architecture": "llama",
        **keys,
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "MXFP4"])
def test_tensors(kind: str, tmp_path: Path) -> None:
    """With the attributes of the package's own reader."""
    path = saved_gguf(tmp_path / "a.gguf", types=[kind])
    found = GgufReader(path).tensors
    for tensor in gguf.GGUFReader(path).tensors:
        mine = found.pop(tensor.name)
        assert (mine.tensor_type, list(mine.shape)) == (tensor.tensor_type, tensor.shape.tolist())
        assert mine.data.dtype == tensor.data.dtype
        assert np.array_equal(mine.data, tensor.data)
    assert not found


def test_broken_files(tmp_path: Path) -> None:
    """Each cut of a file, and bytes that say what cannot be."""
    whole = Path(saved_gguf(tmp_path / "a.gguf", tokens=True, vocab=260)).read_bytes()
    path = tmp_path / "b.gguf"
    for length in (*range(4, 400, 13), *range(400, len(whole), 997)):
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"is no readable GGUF file: (its header ends|.*it was cut)") as error:
            GgufReader(path)
        assert "\n" not in str(error.value)
    for start, form, number in ((4, "<I", 9), (8, "<Q", 1 << 60), (16, "<Q", 1 << 60), (24, "<Q", 1 << 60)):
        data = bytearray(whole)
        struct.pack_into(form, data, start, number)
        path.write_bytes(data)
        with pytest.raises((LoadError, UnsupportedError), match=r"is no readable GGUF file|has version 9 of GGUF"):
            GgufReader(path)


def test_files_in_parts(tmp_path: Path) -> None:
    """The first part's name is that of all; each way to lack a part is one line. (They had to be joined.)"""
    whole = saved_gguf(tmp_path / "a.gguf", tokens=True, vocab=260)
    saved_gguf(tmp_path / "b.gguf", tokens=True, vocab=260, split=5)
    first, second, *_ = parts = sorted(tmp_path.glob("b-*"))
    assert first.name == f"b-00001-of-{len(parts):05}.gguf"
    texts = [SpecGenerator(str(path)).generate("abab", max_new_tokens=8).texts for path in (whole, first)]
    assert texts[0] == texts[1]
    for path, words in (
        (second, r"is part 2, and part 1 is expected: name that file"),
        (first.rename(tmp_path / "c.gguf"), r"is the first of \d parts, and its name does not say so"),
    ):
        with pytest.raises((LoadError, OptionError), match=words):
            load_model(str(path))
    (tmp_path / "c.gguf").rename(first)
    second.rename(tmp_path / "c.gguf")
    with pytest.raises(LoadError, match=rf"is the first of \d parts, and {second} is missing: put all parts into one"):
        load_model(str(first))
    shutil.copy(parts[2], second)
    with pytest.raises(OptionError, match="is part 3, and part 2 is expected"):
        load_model(str(first))


def test_no_architecture(tmp_path: Path) -> None:
    from specdec.models.gguf import read_config

    reader: Any = GgufReader(written(tmp_path / "a.gguf", "llama", {}))
    del reader.keys["general.architecture"]
    with pytest.raises(LoadError, match=r"lacks the key general\.architecture"):
        read_config(reader)
