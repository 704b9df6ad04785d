"""Packed weights that are kept on disk: the same numbers the next time, made anew when something changed."""

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import specdec
from specdec import Loading, kernels
from specdec.bench.parts import Drafting, Mode
from specdec.bench.suite import Cell
from specdec.bench.systems import Systems
from specdec.errors import LoadError
from specdec.kernels import PackedLinear, cache_files
from specdec.models import LanguageModel, load_model
from specdec.models.loading import kept_weights, lighten
from specdec.models.loading import load as load_module
from specdec.models.loading.kept_weights import KeptWeights, packed_weights
from specdec.models.loading.load import save_loaded
from specdec.models.loading.packed_folder import PackedFolder
from tests.folders import saved, saved_gguf
from tests.models.test_packed_folder import check_same
from tests.quantized import AWQ, GPTQ, saved_quantized

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not kernels.available(), reason="needs kernels")]
EIGHT = {"quantization": "int8-weight"}
INFO = pytest.mark.usefixtures("info")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights; tiny models are kept too."""
    monkeypatch.setenv("SPECDEC_PACKED", str(tmp_path / "kept"))
    monkeypatch.setattr(kept_weights, "_LEAST", 0)
    return tmp_path / "kept"


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="specdec")


@pytest.fixture
def source(tmp_path: Path) -> str:
    return saved("llama", tmp_path / "source")


def load(source: str, **how: Any) -> LanguageModel:
    """The model, after what is packed of it was written."""
    model = load_model(source, Loading(**how))
    finish()
    return model


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "specdec-packed":
            assert not thread.daemon  # a program that ends waits for it
            thread.join()


def folders(root: Path) -> set[Path]:
    return {path.parent for path in root.glob("*/source.txt")}


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders from which packed weights are read, from now on."""
    read: list[str] = []
    original = load_module.read_packed
    monkeypatch.setattr(load_module, "read_packed", lambda name, *a, **k: read.append(name) or original(name, *a, **k))
    return read


@pytest.mark.parametrize("how", [EIGHT, {"quantization": "int4-weight", "dtype": "bfloat16"}, {"quantization": "auto"}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "whisper"])
def test_the_second_load(
    name: str, how: dict[str, Any], tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads what the first one packed: the same weights and text, under the source's name."""
    for limit in ("_LEAST", "_LEAST_HEARING", "_LARGE"):
        monkeypatch.setattr(lighten, limit, 0)
    source = saved(name, tmp_path / "source")
    first, read = load(source, **how), reads(monkeypatch)
    second = load(source, **how)
    assert read == [str(folder) for folder in folders(root)]
    check_same(second, first, name)
    assert second.model.name_or_path == second.model.config.name_or_path == first.model.config.name_or_path == source
    likely = [[one.likely for one in m.model.modules() if hasattr(one, "likely")] for m in (first, second)]
    assert likely[0] == likely[1]


def test_files_that_are_quantized_already(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_quantized(tmp_path / "awq", AWQ)
    sources = [saved_gguf(tmp_path / "a.gguf", types=("Q5_0", "Q4_1", "Q8_0")), str(tmp_path / "awq")]
    models, read = [load(source) for source in sources], reads(monkeypatch)
    for source, first in zip(sources, models, strict=True):
        check_same(load(source), first, "llama")
    assert {Path(name) for name in read} == folders(root)
    assert len(read) == 2


@pytest.mark.parametrize("changed", ["model.safetensors", "generation_config.json", "new.py"])
def test_a_file_that_changed(changed: str, source: str, root: Path) -> None:
    """Also one of the same size and time."""
    load(source, **EIGHT)
    path = Path(source, changed)
    before = path.stat() if path.exists() else None
    path.write_bytes(path.read_bytes()[:-1] + b"\x01" if changed == "model.safetensors" else b"{}")
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    load(source, **EIGHT)
    assert len(folders(root)) == 2


def test_weights_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder into which another model was saved gives that one's weights."""
    load(saved("llama", tmp_path / "source"), **EIGHT)
    source = saved("llama", tmp_path / "source", seed=1)
    got = load(source, **EIGHT)
    monkeypatch.setenv("SPECDEC_PACKED_BYTES", "0")
    check_same(got, load(source, **EIGHT), "llama")


def test_other_options_and_releases(source: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, more in enumerate(
        [{}, {"dtype": "bfloat16"}, {"activations": "float"}, {"quantization": "int4-weight"}]
    ):
        load(source, **{**EIGHT, **more})
        assert len(folders(root)) == count + 1
    load(source, **{**EIGHT, "dtype": torch.bfloat16})
    assert len(folders(root)) == 4
    monkeypatch.setattr(kernels, "digest", lambda: "another processor")
    load(source, **EIGHT)
    assert len(folders(root)) == 5


def test_what_else_decides(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured numbers depend on threads, and packing on two more files. (Their changes found old weights.)"""
    names = {KeptWeights(source, Loading(quantization="auto")).folder}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    names.add(KeptWeights(source, Loading(quantization="auto")).folder)
    assert len(names) == 2
    code = {path.name for pattern in kept_weights._CODE for path in Path(specdec.__file__).parent.glob(pattern)}
    assert {"packed_layers.py", "load.py", "packed_linear.py", "weights.py"} <= code


@INFO
def test_what_is_not_kept(
    source: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Floats, layers that are not packed, what is packed on disk already, and what no packed folder holds."""
    save_loaded(source, tmp_path / "packed", Loading(**EIGHT))
    saved_quantized(tmp_path / "gptq", GPTQ)
    load(str(tmp_path / "packed"))
    load(str(tmp_path / "gptq"))
    load(source)
    load(source, backend="eager", **EIGHT)
    load(source, device_map="cpu", **EIGHT)
    load(source, trust_remote_code=True, **EIGHT)  # whose code no folder's name covers
    with monkeypatch.context() as patch:
        patch.setattr(kept_weights, "_LEAST", 2**26)
        load(source, **EIGHT)
    monkeypatch.setenv("SPECDEC_PACKED_BYTES", "0")
    load(source, **EIGHT)
    assert not root.exists()
    assert not any("packed weights" in line for line in caplog.messages)


@INFO
@pytest.mark.parametrize("way", ["nf4", "fp4", "int8"])
def test_layers_of_another_library(way: str, tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head that is packed beside them is not kept alone."""
    pytest.importorskip("bitsandbytes")
    source = saved("llama", tmp_path / "wide", hidden_size=64, intermediate_size=128)
    load(source, backend="packed", quantization=way, dtype="float32")
    assert not root.exists()
    assert not any("packed weights" in line for line in caplog.messages)


@INFO
def test_one_line(source: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        load(source, **EIGHT)
    [line] = [line for line in caplog.messages if "packed weights" in line]
    [folder] = folders(root)
    assert f"are written to {folder} meanwhile: the next load reads them" in line
    assert packed_weights() == f"of 1 models in {root}, 0.0 GiB"


@INFO
def test_bounds(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What was not loaded for the longest time goes first; what is larger than all may be is not written."""
    sources = [saved("llama", tmp_path / str(seed), seed=seed) for seed in range(3)]
    made = [folders(root) for source in sources[:2] if load(source, **EIGHT)]
    first, second = made[0], made[1] - made[0]
    for age, folder in enumerate([*first, *second]):
        os.utime(folder / "source.txt", (10**9 + age, 10**9 + age))
    load(sources[0], **EIGHT)
    size = cache_files.size(*first)
    monkeypatch.setenv("SPECDEC_PACKED_BYTES", str(int(2.5 * size)))
    load(sources[2], **EIGHT)
    assert len(folders(root)) == 2
    assert first < folders(root)
    monkeypatch.setenv("SPECDEC_PACKED_BYTES", "1000")
    load(sources[1], **EIGHT)
    assert len(folders(root)) == 2
    assert "packed weights are not kept: they take 0.0 GiB, and SPECDEC_PACKED_BYTES allows 0.0" in caplog.text
    monkeypatch.setenv("SPECDEC_PACKED_BYTES", "10G")
    load(sources[1], **EIGHT)
    assert "SPECDEC_PACKED_BYTES must be a number of bytes, got '10G'" in caplog.text


def test_a_benchmark(folders: tuple[str, str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what is kept of target and draft, and writes nothing. (A thread wrote gigabytes while it measured.)"""
    mode = Mode(**EIGHT, draft_options=EIGHT)

    def measure() -> None:
        Systems(folders[0], mode).generator("", Cell(folders[1], Drafting(schedule="constant")))
        finish()

    measure()
    assert not root.exists()
    for folder in folders:
        load(folder, **EIGHT)
    read = reads(monkeypatch)
    measure()
    assert {Path(name) for name in read} == {path.parent for path in root.glob("*/source.txt")}


@pytest.mark.parametrize("harm", ["cut", "missing", "config"])
@INFO
def test_a_broken_folder(harm: str, source: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is deleted, and made anew."""
    first = load(source, **EIGHT)
    [folder] = folders(root)
    weights = folder / "model.safetensors"
    if harm == "cut":
        os.truncate(weights, weights.stat().st_size - 8)
    elif harm == "missing":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    check_same(load(source, **EIGHT), first, "llama")
    assert f"packed weights in {folder} cannot be read" in caplog.text
    caplog.clear()
    check_same(load(source, **EIGHT), first, "llama")
    assert not caplog.messages


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), OSError(errno.EMFILE, "too many"), None])
def test_a_good_folder_that_cannot_be_read_now(
    error: Exception | None, source: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, and the source is loaded. (It was deleted for want of memory or open files.)"""

    def fail(*_: Any, **__: Any) -> None:
        raise error or LoadError("weights cannot be read") from OSError(errno.EIO, "Input/output error")

    first, before = load(source, **EIGHT), folders(root)
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "read_packed", fail)
        check_same(load(source, **EIGHT), first, "llama")
    assert folders(root) == before
    read = reads(monkeypatch)
    load(source, **EIGHT)
    assert len(read) == 1


def test_two_writers(source: str, root: Path) -> None:
    """The second one leaves what the first one wrote."""
    models = [load_module._read(source, Loading(**EIGHT)) for _ in range(2)]
    writers = [KeptWeights(source, Loading(**EIGHT)).writing(model) for model in models]
    for writer in writers:
        assert writer is not None
        writer.start()
    finish()
    [folder] = folders(root)
    assert [path for path in root.iterdir() if path.is_dir()] == [folder]
    check_same(load(source, **EIGHT), LanguageModel(models[0], owned=True), "llama")


def test_a_lock_that_is_held(source: str, root: Path) -> None:
    """Whoever comes second leaves the folder to the first one. (It waited for the lock, also at its end.)"""
    folder = KeptWeights(source, Loading(**EIGHT)).folder
    assert folder is not None
    with cache_files.file_lock(folder.with_suffix(".lock"), "SPECDEC_PACKED"):
        load(source, **EIGHT)
    assert not folders(root)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
@INFO
def test_the_end_of_a_program(
    seconds: float, source: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits some seconds, and leaves no half of a folder. (It waited until gigabytes were written.)"""
    monkeypatch.setattr(kept_weights, "_EXIT_SECONDS", seconds)
    ended = threading.Thread(target=int)
    with monkeypatch.context() as patch:
        patch.setattr(kept_weights.threading, "main_thread", lambda: ended)
        load(source, **EIGHT)
    assert len(folders(root)) == bool(seconds)
    assert ("packed weights are not kept: the program ended before" in caplog.text) == (not seconds)
    assert not list(root.glob("*.part"))


def test_a_file_that_another_process_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no size. (The doctor and writers failed for it.)"""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"four")
    monkeypatch.setattr(os, "walk", lambda _: [(str(tmp_path), [], ["a", "gone", "b"])])
    assert cache_files.size(tmp_path) == 8


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_layers_that_are_packed_besides(name: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie packed in the folder, and in memory once. (Their floats stayed in memory until all was written.)"""
    source, how = saved(name, tmp_path / "source"), {"backend": "packed", **EIGHT}
    first = load(source, **how)
    [folder] = folders(root)
    layers = {f"{place}.weight" for place, layer in first.model.named_modules() if isinstance(layer, PackedLinear)}
    assert not layers & load_file(folder / "model.safetensors").keys()
    read = reads(monkeypatch)
    check_same(load(source, **how), first, name)
    assert len(read) == 1


def test_a_writer_that_was_killed(source: str, root: Path) -> None:
    """What it left is deleted; what another one writes now stays, like folders of somebody else."""
    stale, busy, others = root / f"{'0' * 16}.part", root / f"{'1' * 16}.part", root / "photos"
    for folder in (stale, busy, others):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    with cache_files.file_lock(busy.with_suffix(".lock"), "SPECDEC_PACKED"):
        load(source, **EIGHT)
    assert not stale.exists()
    assert busy.exists()
    assert others.exists()
    assert len(folders(root)) == 1


@INFO
def test_folders_without_room(
    source: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load never fails for them: one line says why nothing is kept, whatever the error.

    (A thread died of errors that were not thought of, with a traceback on stderr.)
    """
    for error in (OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError("division by zero")):
        with monkeypatch.context() as patch:
            patch.setattr(PackedFolder, "write", Mock(side_effect=error))
            load(source, **EIGHT)
        assert not [path for path in root.iterdir() if path.is_dir()]
    monkeypatch.setenv("SPECDEC_PACKED", "/dev/null/kept")
    load(source, **EIGHT)
    lines = [line for line in caplog.messages if "packed weights are not kept" in line]
    for line, words in zip(lines, ("No space left", "division by zero", "/dev/null/kept cannot be writ"), strict=True):
        assert line.startswith("packed weights are not kept: ")
        assert words in line


@INFO
def test_a_model_that_changes_while_it_is_written(source: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_module._read(source, Loading(**EIGHT))
    writing = KeptWeights(source, Loading(**EIGHT)).writing(model)
    assert writing is not None
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    writing.start()
    finish()
    assert not folders(root)
    assert "a weight was changed while it was written" in caplog.text


def test_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path) -> None:
    """A commit's files do not change: its name says all, whatever is downloaded later."""
    folder = tmp_path / "hub" / "models--a--b" / "snapshots" / ("0" * 40)
    source = saved("llama", folder)
    load(source, **EIGHT)
    os.utime(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    read = reads(monkeypatch)
    load(source, **EIGHT)
    assert len(read) == len(folders(root)) == 1
