"""From a description to a model: quantization, offload, and what is said and left behind where it fails."""

import errno
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec import LoadError, Loading, OptionError, SpecGenerator, UnsupportedError, custom_generate
from specdec.errors import closest_name
from specdec.kernels import Mapped
from specdec.models import load_model
from specdec.models.backends.int8_linear import Int8Linear
from specdec.models.backends.packed_layers import weight_of
from specdec.models.loading import placement, quantizers
from specdec.models.loading.integer_layers import WeightOnly
from specdec.proposers.heads import head_kind
from tests.folders import saved
from tests.matrix import endless
from tests.oracle import KINDS, oracle
from tests.test_exact import prompt_for
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = endless(8)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


WAYS = {
    "int8-weight": Loading(quantization="int8-weight", activations="float"),
    "rows in 8 bits": Loading(quantization="int8-weight"),
    "disk": Loading(offload="disk"),
    "budget": Loading(offload="disk", max_memory={"cpu": 60_000}),
    "int8-weight on disk": Loading(quantization="int8-weight", offload="disk"),
    "hardly any memory": Loading(quantization="int8-weight", offload="disk", max_memory={"cpu": 32_000}),
}
PLACES = [*(("llama", way) for way in WAYS), ("gpt2", "int8-weight"), ("t5", "int8-weight on disk"), ("bart", "disk")]
# Widths that the 4-bit kernels of bitsandbytes take on every CPU.
WIDE = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128},
}
# In float32 the promise is kept. (bitsandbytes rounded inputs to bfloat16 there: 4 of 12 texts of the package's pair
# were others with a draft.)
FOUR_BITS = [(name, way) for name in ("llama", "t5") for way in ("nf4", "fp4")]


@pytest.mark.parametrize(("name", "way"), [*PLACES, ("mixtral", "disk"), ("mamba2", "int8-weight"), *FOUR_BITS])
def test_assisted_equals_plain(name: str, way: str, tmp_path: Path) -> None:
    """Drafts that are right, half right, wrong and random leave the text of such a target as it is."""
    if way in ("nf4", "fp4"):
        pytest.importorskip("bitsandbytes")
    sizes = WIDE[name] if way in ("nf4", "fp4") else {}
    target = load_model(saved(name, tmp_path / "model", **sizes), WAYS.get(way) or Loading(quantization=way))
    promise = "rounding" if way == "rows in 8 bits" else "exact"
    assert target.exactness == promise
    inputs = prompt_for(name, rows=2)
    plain = SpecGenerator(target).generate(**inputs, **OPTIONS)
    assert plain.stats.exactness == promise
    for kind in KINDS:
        out = SpecGenerator(target, oracle(kind, plain.sequences.tolist(), 64)).generate(**inputs, **OPTIONS)
        assert out.sequences.tolist() == plain.sequences.tolist(), kind


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_are_rounded_as_they_are_stored(
    name: str, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that computes in float32 was widened as a whole before its layers were rounded, which took 10.6 GB for
    a file of 3.6 GB; the layers are the same."""
    tiny(name).to(stored).save_pretrained(tmp_path)
    narrow, convert = list[torch.dtype](), WeightOnly.convert

    def noting(self: WeightOnly, model: Any) -> None:
        narrow.extend(model.get_submodule(layer).weight.dtype for layer in self._linear_names(model))
        convert(self, model)

    monkeypatch.setattr(WeightOnly, "convert", noting)
    how = Loading(quantization="int8-weight", dtype="float32", backend="eager")
    got, wide = (
        load_model(str(tmp_path), how).model,
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
    )
    assert set(narrow) == {stored}
    assert got.dtype == torch.float32
    layers = {layer: module for layer, module in got.named_modules() if isinstance(module, Int8Linear)}
    assert len(layers) == len(narrow)
    for layer, module in layers.items():
        expected = Int8Linear(weight_of(wide.get_submodule(layer)), None)
        assert torch.equal(module.weight, expected.weight)
        assert torch.equal(module.scale, expected.scale)


def test_memory_of_mapped_files_is_given_back(tmp_path: Path) -> None:
    """Views of the file keep their numbers, which are read again."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("the system does not say what is in memory")
    weights = torch.arange(1 << 18, dtype=torch.float32)
    save_file({"a": weights}, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        view = file.get_tensor("a")

    def resident() -> int:
        parts = Path("/proc/self/smaps").read_text().partition(str(tmp_path / "a.safetensors"))
        return int(parts[2].partition("Rss:")[2].split()[0])

    view.sum()
    assert resident() >= 1024
    Mapped([str(tmp_path / "a.safetensors")]).used(1 << 28)
    assert resident() < 64
    assert torch.equal(view, weights)


def test_changed_weights_of_another_model_stay(tmp_path: Path) -> None:
    """Of the same file, in the same program. (A load in 8 bits gave them the file's numbers again, without a word.)"""
    save_file({"a": torch.ones(1 << 18)}, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        theirs = file.get_tensor("a")
    theirs += 1
    Mapped([str(tmp_path / "a.safetensors")]).forget()
    assert theirs.eq(2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [48, 40])
def test_int8_weights(dtype: torch.dtype, width: int) -> None:
    """The layer is close to what it replaces, also where torch's kernel would read beyond its rows (40 columns).

    A row of a short pass in bfloat16 is what it is alone, bit for bit: drafts cannot even change the rounding. Channels
    of zeros divide by nothing.
    """
    torch.manual_seed(0)
    linear = torch.nn.Linear(width, 24, dtype=dtype)
    quantized = Int8Linear(linear.weight, linear.bias)
    for rows in (1, 5, 32, 33):
        x = torch.randn(2, rows, width, dtype=dtype)
        wanted, got = linear(x).float(), quantized(x).float()
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()
    x = torch.randn(9, width, dtype=dtype)
    assert (dtype, width) != (torch.bfloat16, 48) or torch.equal(
        quantized(x), torch.cat([quantized(row[None]) for row in x])
    )
    assert not Int8Linear(torch.zeros(3, width), None)(torch.ones(1, width)).any()
    large = Int8Linear(torch.full((3, width), 0.01, dtype=dtype), None)(torch.full((40, width), 600.0, dtype=dtype))
    assert large.float() == pytest.approx(torch.full((40, 3), 6.0 * width), rel=0.02)  # float16 overflowed


def test_llm_int8_looks_at_all_rows(tmp_path: Path) -> None:
    """bitsandbytes' int8 is told from what keeps the promise by trying, so also with its outliers switched off."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    folder = saved("llama", tmp_path / "model")
    target = load_model(folder, Loading(quantization="int8", dtype="float32"))
    assert target.exactness == "row-dependent"
    out = SpecGenerator(target, "suffix").generate(**prompt_for("llama"), **OPTIONS)
    assert out.stats.exactness == "row-dependent"
    strict = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=strict, dtype="float32")
    assert SpecGenerator(model).target.exactness == "rounding"  # of its inputs, to float16


def test_layers_that_bitsandbytes_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found when the model is loaded. (The first pass crashed with `shape '[32, 0]' is invalid`.)"""
    bitsandbytes, error = pytest.importorskip("bitsandbytes"), RuntimeError("shape '[32, 0]' is invalid")
    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", Mock(side_effect=error))
    with pytest.raises(UnsupportedError, match=r"4-bit layer of 32 × .*int8-weight"):
        load_model(saved("llama", tmp_path / "model"), Loading(quantization="nf4"))


def test_exactness_of_other_models() -> None:
    """Half precision rounds; a dynamic range over all activations is found out."""
    assert SpecGenerator(tiny("llama").bfloat16()).target.exactness == "rounding"
    dynamic = torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    assert SpecGenerator(dynamic).target.exactness == "row-dependent"


@pytest.mark.usefixtures("built")
def test_a_draft_has_its_own_options(tmp_path: Path) -> None:
    """It takes over the type, never the quantization or the offloading; its own options win."""
    target, draft = (saved("llama", tmp_path / name, seed=seed) for seed, name in enumerate(("target", "draft")))
    given = {"dtype": "bfloat16", "quantization": "int8-weight", "offload": "disk"}
    loaded = SpecGenerator.from_pretrained(target, draft, **given).draft
    assert loaded.model.dtype == torch.bfloat16
    held = (*loaded.model.model.parameters(), *loaded.model.model.buffers())
    assert not any(p.is_meta or p.dtype == torch.int8 for p in held)
    own = {"dtype": "float32", "quantization": "int8-weight"}
    generator = SpecGenerator.from_pretrained(target, f"suffix+{draft}", dtype="bfloat16", draft_options=own)
    assert generator.draft.inner.model.dtype == torch.float32
    assert any(p.dtype == torch.int8 for p in generator.draft.inner.model.model.buffers())
    assert not any(p.dtype == torch.int8 for p in generator.target.model.buffers())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantization": "int4"}, "quantization.*nf4.*'int4'"),
        ({"offload": "tape"}, "offload.*disk.*'tape'"),
        ({"offload": "disk", "device_map": "auto"}, "device_map"),
        ({"max_memory": {"cpu": "1GiB"}}, "max_memory"),
        ({"max_memory": "1GiB", "offload": "disk"}, "max_memory"),
        ({"offload_folder": "here"}, "offload_folder"),
        ({"offload": "cpu", "offload_folder": "here"}, "offload_folder"),
        ({"offload": "disk", "quantization": "nf4"}, "int8-weight"),
        ({"trust_remote_code": "yes"}, "trust_remote_code"),
        *(({"dtype": value}, "`dtype` must be") for value in ("int3", 16, "f", torch.zeros(1))),
        ({"draft_options": {"dtype": "int3"}}, "dtype"),
        ({"draft_options": {"offload": "disk"}}, "draft_options"),
        ({"draft_options": {"quantisation": "int8"}}, "draft_options.*quantisation"),
        ({"draft_options": "int8"}, "draft_options"),
        ({"draft_options": {"dtype": "float32"}, "draft": "suffix"}, "draft_options"),
        ({"quantized": "int8"}, "quantized"),
        ({"subfolder": "q"}, "`subfolder` is no loading option.*load the model with transformers and pass it"),
        ({"torch_dtype": "float32"}, "`torch_dtype` is no loading option.*`dtype`"),
        ({"load_in_4bit": True}, "`load_in_4bit` is no loading option.*nf4"),
        ({"tp_plan": "auto"}, "`tp_plan` is no loading option.*device_map"),
    ],
)
def test_wrong_options_are_told_by_name(given: dict[str, Any], named: str) -> None:
    """Also transformers' own words, which were "not an option of generate", and before anything is loaded."""
    with pytest.raises(OptionError, match=named):
        SpecGenerator.from_pretrained("no-such-model", **given)


def test_a_loaded_model_takes_no_loading_options() -> None:
    with pytest.raises(OptionError, match="draft_options"):
        SpecGenerator.from_pretrained("no-such-model", tiny("llama"), draft_options={"dtype": "bfloat16"})
    for given in ({"dtype": "bfloat16"}, {"quantization": "int8-weight"}, {"gguf_file": "model.gguf"}):
        with pytest.raises(OptionError, match=f"`{next(iter(given))}` applies to loading, but the model is loaded al"):
            SpecGenerator(tiny("llama"), "no-such-draft", **given)


def test_bitsandbytes_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.loading.load.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install.*int8-weight"):
        load_model(saved("llama", tmp_path / "model"), Loading(quantization="nf4"))


def test_slow_and_idle_modes_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LLM.int8() on a CPU, and weights moved from host memory to host memory."""
    pytest.importorskip("bitsandbytes")
    folder = saved("llama", tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quantizers.BitsAndBytes("int8").config(torch.float32)
    assert "'int8-weight'" in caplog.text
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="changes nothing"):
        load_model(folder, Loading(offload="cpu"))


def spoil(folder: str, what: str) -> None:
    file, config = Path(folder) / "model.safetensors", Path(folder) / "config.json"
    content, known = file.read_bytes(), json.loads(config.read_text())
    if what in ("half", "header"):
        file.write_bytes(content[: len(content) // 2 if what == "half" else 20])
    elif what == "weight":
        state = load_file(file)
        state.pop("model.norm.weight")
        save_file(state, file, metadata={"format": "pt"})
    else:
        config.write_text(json.dumps({**known, "intermediate_size": 40}) if what == "shape" else '{"model_type": "lla')


@pytest.mark.parametrize(
    ("what", "offload"),
    [*((what, place) for what in ("half", "header", "weight") for place in (None, "disk")), ("shape", None)],
)
def test_broken_checkpoints(what: str, offload: str | None, tmp_path: Path, temporary: Path) -> None:
    """Nothing is made up in the place of what is missing, and no temporary folder stays."""
    folder = saved("llama", tmp_path / "model")
    spoil(folder, what)
    with pytest.raises(LoadError, match="broken or incomplete"):
        load_model(folder, Loading(offload=offload))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.unlink(), "is missing"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-9]),
            r"was cut: it has \d+ bytes, and its header tells of \d+",
        ),
        (lambda file: file.write_bytes(b""), "is no safetensors file, or was cut in its header: it has 0 bytes"),
        (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"), "is no safetensors file"),
        (lambda file: file.write_bytes(bytes([4, *[0] * 7]) + b"null"), "has no header of a safetensors file"),
    ],
)
def test_broken_files_are_named(change: Callable[[Path], object], told: str, tmp_path: Path) -> None:
    """Of several files, the one that is wrong, and how. (A missing one was a name to check, others were not named.)"""
    tiny("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    change(file)
    for how in ({}, {"quantization": "int8-weight"}, {"offload": "disk"}):
        with pytest.raises(LoadError, match=rf"{file.name} {told}") as error:
            load_model(str(tmp_path), Loading(**how))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", [{"offload": "disk"}, {"device_map": {"": "disk"}}], ids=["offload", "device_map"])
def test_shapes_of_weights_on_disk(how: dict[str, Any], tmp_path: Path, temporary: Path) -> None:
    """They are compared with the model's while loading. (Nobody did, as nothing is read then.)"""
    folder = saved("llama", tmp_path / "model")
    spoil(folder, "shape")
    with pytest.raises(LoadError, match=r"has shape \[48, 32\] in .*, the model expects \[40, 32\]"):
        load_model(folder, Loading(**how, offload_folder=None if "offload" in how else str(tmp_path / "off")))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("share", [0.9, 0.5, 0.05])
def test_weights_that_are_in_no_file(share: float, tmp_path: Path) -> None:
    """Marian's positions are computed, not saved: a device map may not send them to disk, `offload` leaves them here.

    (The first pass raised KeyError.)
    """
    folder, inputs = saved("marian", tmp_path / "model"), prompt_for("marian")
    limit = {"cpu": int(share * sum(p.nbytes for p in tiny("marian").parameters()))}
    with pytest.raises(LoadError, match=r"'model\..*embed_positions.weight' should lie on disk, .* `offload`='disk'"):
        load_model(folder, Loading(device_map="auto", max_memory=limit, offload_folder=str(tmp_path / "off")))
    expected = SpecGenerator(tiny("marian")).generate(**inputs, **OPTIONS).sequences.tolist()
    target = load_model(folder, Loading(offload="disk"))
    assert SpecGenerator(target).generate(**inputs, **OPTIONS).sequences.tolist() == expected


def test_a_broken_config_or_no_safetensors(tmp_path: Path) -> None:
    """The reason is told, whatever the kind of error."""
    with pytest.raises(OptionError, match="cannot be loaded"):
        load_model(tmp_path)
    folder = saved("llama", tmp_path / "model")
    spoil(folder, "config")
    with pytest.raises((OptionError, LoadError), match="cannot be loaded"):
        load_model(folder)
    folder = saved("llama", tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "pytorch_model.bin")
    with pytest.raises(OptionError, match="safetensors"):
        load_model(folder)


@pytest.mark.parametrize("target", ["some/target", "zoo:python-code"])
@pytest.mark.parametrize("draft", ["some/draft", "suffix+some/draft"])
def test_a_hub_out_of_reach_is_asked_once(asked: list[str], target: str, draft: Any) -> None:
    """It was asked for a draft as a head, for its tokenizer, and for it as a model, each time with all retries."""
    with pytest.raises(LoadError, match=r"`draft` 'some/draft' .*hub cannot be reached"):
        SpecGenerator.from_pretrained(target, draft)
    assert asked == ["some/draft"]
    asked.clear()
    generator = SpecGenerator.from_pretrained("zoo:python-code")
    with pytest.raises(LoadError, match=r"`assistant_model` 'some/draft' .*hub cannot be reached"):
        generator.generate("a", max_new_tokens=2, assistant_model="some/draft")
    assert asked == ["some/draft"]


def test_a_repository_without_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of GGUF files alone: it is no head, and not loaded as one. (That was a TypeError.)"""
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", Mock(side_effect=EntryNotFoundError("404")))
    assert head_kind("some/draft") is None
    with pytest.raises(OptionError, match=r"`draft` 'some/draft' cannot be loaded .*check the name"):
        SpecGenerator.from_pretrained("zoo:python-code", "some/draft")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk is full"),
        (MemoryError(), "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "enough memory"),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_nothing_is_left_where_room_runs_out(
    error: Exception, advice: str, own: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before the error is removed, and what was there before stays."""
    folder = saved("llama", tmp_path / "model")
    target = temporary if own else tmp_path / "offload"
    target.mkdir(exist_ok=True)
    (target / "mine").write_text("kept")

    def fail(tensors: Any, file: Path) -> None:
        file.write_text("half")
        raise error

    monkeypatch.setattr(placement, "save_file", fail)
    how = Loading(offload="disk", quantization="int8-weight", offload_folder=None if own else target)
    with pytest.raises(LoadError, match=advice):
        load_model(folder, how)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_temporary_files_live_as_long_as_the_model(tmp_path: Path, temporary: Path) -> None:
    target = load_model(saved("llama", tmp_path / "model"), WAYS["int8-weight on disk"])
    assert list(temporary.iterdir())
    del target
    gc.collect()
    assert not list(temporary.iterdir())


def test_offloading_that_cannot_be(tmp_path: Path, temporary: Path) -> None:
    """What lies outside the layers, and one layer at a time, must fit; nothing is left behind.

    A folder that cannot be written is told before anything is loaded; weights out of reach are not quantized.
    """
    folder = saved("llama", tmp_path / "model")
    with pytest.raises(OptionError, match="`max_memory` must be at least"):
        load_model(folder, Loading(offload="disk", max_memory={"cpu": "1KB"}))
    assert not list(temporary.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"offload_folder.*written to"):
        load_model(folder, Loading(offload="disk", offload_folder=tmp_path / "file"))
    with pytest.raises(UnsupportedError, match="offload"):
        load_model(
            folder, Loading(quantization="int8-weight", device_map={"": "disk"}, offload_folder=tmp_path / "off")
        )


# ------------------------------------------------------------------------------------------------ types, devices, names


def half(folder: Path) -> str:
    """A tiny Llama stored in float16."""
    tiny("llama").half().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("offload", [None, "disk"])
def test_float16_becomes_float32_on_a_cpu(
    offload: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint in float16 was loaded as it is, and ran at half the speed of float32 without a word."""
    folder = half(tmp_path / "model")
    with caplog.at_level("INFO", logger="specdec"):
        target = load_model(folder, Loading(offload=offload))
    assert target.dtype == torch.float32
    assert "weights in float16 compute in float32" in caplog.text
    expected = SpecGenerator(load_model(folder, Loading(dtype="float32"))).generate([5, 7, 9], max_new_tokens=8)
    assert SpecGenerator(target).generate([5, 7, 9], max_new_tokens=8).sequences.tolist() == expected.sequences.tolist()


def test_float16_of_which_the_config_does_not_tell(tmp_path: Path) -> None:
    """Old checkpoints name no type: theirs is seen in the weights."""
    folder = half(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.pop("dtype") == "float16"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, Loading(dtype="float16")).dtype == torch.float16


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is here")
@pytest.mark.parametrize("place", ["cuda", "cuda:1", 0, {"": "cuda"}, {"model": "cpu", "lm_head": 0}, "gpu"])
def test_devices_that_are_not_here(place: Any) -> None:
    """`device_map="cuda"` without CUDA was an AssertionError of torch; of what is none, the known ones are told."""
    told = "must be one of auto, .*got 'gpu'" if place == "gpu" else "names .*no accelerator here: pass 'auto' or 'cpu'"
    with pytest.raises(OptionError, match=f"`device_map` {told}"):
        load_model("no-such-model", Loading(device_map=place))


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen.Q4_K.gguf", "qwen.Q4_K_M.gguf"), ("qwem/", "qwen"), ("other.gguf", None), ("no/folder.gguf", None)],
)
def test_a_path_with_a_slip(name: str, near: str | None, tmp_path: Path) -> None:
    """The nearest name beside it is asked for."""
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(OptionError, match=r"there is no such f") as error:
        load_model(f"{tmp_path}/{name}")
    asked = f" (did you mean {str(tmp_path / near)!r}?)" if near else ""
    assert str(error.value).endswith(("no such file" if name.endswith(".gguf") else "no such folder") + asked)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *(
            (source, "`draft` must be .*nonexistent'?: there is no such folder")
            for source in ("/nonexistent", "./nonexistent", "~/nonexistent", Path("nonexistent"))
        ),
        ("model.Q4_K_M.gguf", "there is no such file"),
        (__file__, "it is a file"),
        (3, "hub name"),
    ],
)
def test_what_is_no_folder(source: Any, told: str) -> None:
    """It was advised to check the name, or to convert to safetensors."""
    with pytest.raises(OptionError, match=told):
        load_model(source, name="draft")


def test_a_misspelt_word() -> None:
    """`draft="sufix"` was taken for a model's name, and a hub was asked for it."""
    target = tiny("llama")
    for draft in ("sufix", "earlyexit:1", "sufix+zoo:python-code"):
        with pytest.raises(OptionError, match=r"`draft` must be .*did you mean '(suffix|early_exit)'\?"):
            SpecGenerator.from_pretrained("zoo:python-code", draft)
    with pytest.raises(OptionError, match=r"did you mean 'suffix'\?"):
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=2, custom_generate=custom_generate("sufix"))
    assert closest_name("early-exit:N", ("ngram", "early_exit:N")) == "early_exit:N"
    assert closest_name("meta-llama", ("ngram", "suffix")) is None
