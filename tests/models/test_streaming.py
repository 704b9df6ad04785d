"""Offloaded models: their weights come in for each pass, or layer by layer where they are streamed; texts stay
the same.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError
from specdec.errors import LoadError
from specdec.models.hf.device_hooks import execution_device, is_offloaded
from specdec.models.loading.streamed_layers import run_layer, stream
from specdec.models.loading.weight_files import find
from tests.matrix import endless, slow
from tests.oracle import oracle
from tests.test_exact import prompt_for, reference
from tests.tiny import DECODERS, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = endless(6)
CPU = torch.device("cpu")


def pair(name: str, folder: Path, dtype: Any = torch.float32, **options: Any) -> tuple[Any, Any]:
    """The tiny model saved in `folder`, loaded into memory as `dtype`, and the same offloaded to disk."""
    model = tiny(name, **options)
    model.save_pretrained(folder / "model")
    load = type(model).from_pretrained
    whole = load(folder / "model", dtype=dtype).eval()
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()  # out of the file, where it may begin at any byte
    return whole, load(folder / "model", dtype=dtype, device_map={"": "disk"}, offload_folder=folder / "off").eval()


def logits(model: Any, name: str) -> torch.Tensor:
    inputs = prompt_for(name)
    if name not in DECODERS:
        inputs["decoder_input_ids"] = torch.arange(3, 10)[None]
    if "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].to(model.dtype)
    with torch.no_grad():
        return model(**inputs).logits


def in_memory(model: Any) -> int:
    """Bytes of the model's weights that are in memory, tied ones once."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())


def in_buffers(model: Any) -> int:
    """Bytes of the buffers of a streamed model that has not run."""
    found = {f.args[0] for m in model.modules() if getattr(f := vars(m).get("forward"), "func", None) is run_layer}
    sides = [side for reader in found for buffer in reader._free for side in (buffer.raw, buffer.ready)]
    return sum(side.nbytes for side in sides if side is not None)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("specdec-weights")]


NAMES = (
    "llama", "gpt2", "gemma2", "opt", "bloom", "falcon_alibi", "gpt_neox", "mixtral", "deepseek_v3", "mpt",
    "mamba2", "qwen3_next", "jamba", "gpt_oss", "t5", "bart", "pegasus", "whisper",
)  # fmt: skip
HALF = [
    pytest.param(name, torch.bfloat16, id=f"{name}-converted", marks=[pytest.mark.slow] * (i % 3 > 0))
    for i, name in enumerate(NAMES)
]


@pytest.mark.parametrize(
    ("name", "dtype"), [*(pytest.param(name, torch.float32, id=f"{name}-as stored") for name in NAMES), *HALF]
)
def test_logits_are_those_of_the_model_in_memory(name: str, dtype: Any, tmp_path: Path) -> None:
    """Bit by bit, in the first pass and in the next, read ahead or not; weights are away between passes."""
    whole, model = pair(name, tmp_path, dtype)
    stream(model, find(model))
    expected = logits(whole, name)
    for _ in range(2):
        assert torch.equal(logits(model, name), expected)
        assert is_offloaded(model)
    assert execution_device(model.get_input_embeddings()) == CPU


USUAL, OTHERS = (
    ("llama", "bloom", "mamba2", "t5", "bart"),
    ("gemma2", "gpt2", "opt", "falcon_alibi", "marian", "whisper"),
)
PLACES = [
    *((name, place) for name in USUAL for place in ("streamed", "disk")),
    *((name, "memory") for name in USUAL[::3]),
    *(slow(name, "memory") for name in USUAL if name not in USUAL[::3]),
    *(slow(name, place) for name in OTHERS for place in ("disk", "memory")),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_text_is_that_of_the_model_in_memory(name: str, place: str, tmp_path: Path) -> None:
    """Plain and assisted, two rows, streamed or as accelerate has it.

    (The device of weights elsewhere was taken for that of ids: `meta`.)
    """
    if place == "streamed":
        language: Any = pair(name, tmp_path)[1]
        stream(language, find(language))
    elif place == "memory":
        language = cpu_offload(tiny(name), execution_device=CPU)
    else:
        language = disk_offload(tiny(name), tmp_path, execution_device=CPU)
    assert LanguageModel(language).device == CPU
    inputs = prompt_for(name, rows=2)
    expected = reference(tiny(name), inputs, max_new_tokens=6).tolist()
    for draft in (None, "suffix", oracle("half", expected, 64), tiny(name, seed=1)):
        out = SpecGenerator(language, draft).generate(**inputs, **OPTIONS)
        assert out.sequences.tolist() == expected, draft


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    """Embedding and head that are one weight stay one, and stay in memory."""
    whole, model = pair("llama", tmp_path, tie_word_embeddings=True)
    stream(model, find(model))
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()
    assert torch.equal(logits(model, "llama"), logits(whole, "llama"))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_memory_is_respected(name: str, tmp_path: Path) -> None:
    """Weights and buffers take at most what is given; more memory keeps more layers; too little is an error."""
    whole, _ = pair(name, tmp_path, num_hidden_layers=8) if name == "llama" else pair(name, tmp_path, num_layers=4)
    total, kept = in_memory(whole), []
    load = type(whole).from_pretrained
    model = load(tmp_path / "model", device_map={"": "disk"})
    with pytest.raises(OptionError, match="at least") as error:
        stream(model, find(model), max_memory=1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    for memory in (least, (least + total) // 2, total - 1, total):
        model = load(tmp_path / "model", device_map={"": "disk"})
        stream(model, find(model), max_memory=memory)
        kept.append(in_memory(model))
        assert kept[-1] + in_buffers(model) <= memory
        assert torch.equal(logits(model, name), logits(whole, name))
    assert kept == sorted(kept)
    assert kept[0] < kept[1] < kept[2] < kept[3] == total
    assert not is_offloaded(model)


def test_what_accelerate_keeps_in_memory_stays(tmp_path: Path) -> None:
    """A device map of its own: only what it sends to disk is streamed."""
    whole, _ = pair("llama", tmp_path)
    here = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    places = {"model.layers.1": "disk", **dict.fromkeys(here, "cpu")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places)
    stream(model, find(model))
    away = {name for name, weight in model.named_parameters() if weight.is_meta}
    assert away == {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}
    assert torch.equal(logits(model, "llama"), logits(whole, "llama"))


def test_several_shards(tmp_path: Path) -> None:
    """A layer whose weights lie in several files."""
    whole, _ = pair("llama", tmp_path)
    whole.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", device_map={"": "disk"})
    stream(model, find(model))
    assert torch.equal(logits(model, "llama"), logits(whole, "llama"))


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    """Before streaming, the model is left as it was; while it runs, the caller learns of it and may try again."""
    whole, model = pair("llama", tmp_path, num_hidden_layers=5)
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(LoadError, match="was cut: it has"):
        stream(model, find(model))
    path.write_bytes(data)
    expected = logits(whole, "llama")
    assert torch.equal(logits(model, "llama"), expected)
    stream(model, find(model))
    assert torch.equal(logits(model, "llama"), expected)
    path.write_bytes(data[:-5000])
    for _ in range(2):
        with pytest.raises(LoadError, match="ends after"):
            logits(model, "llama")
    path.write_bytes(data)
    assert torch.equal(logits(model, "llama"), expected)


def test_an_exception_in_a_layer(tmp_path: Path) -> None:
    """The pass after it works, and weights are away in between."""
    whole, model = pair("llama", tmp_path)
    stream(model, find(model))
    hook = model.model.layers[1].mlp.register_forward_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        logits(model, "llama")
    hook.remove()
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert torch.equal(logits(model, "llama"), logits(whole, "llama"))


def test_several_threads(tmp_path: Path) -> None:
    """Callers in several threads take turns layer by layer."""
    whole, model = pair("llama", tmp_path, num_hidden_layers=5)
    stream(model, find(model))
    expected = logits(whole, "llama")
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(one, expected) for one in pool.map(lambda _: logits(model, "llama"), range(4)))


def test_memory_and_threads_over_many_passes(tmp_path: Path) -> None:
    """Passes leave nothing behind, and the thread and the files go with the model."""
    model = pair("llama", tmp_path, num_hidden_layers=5)[1]
    stream(model, find(model))
    logits(model, "llama")
    before, mine = live_bytes(), len(readers())
    for _ in range(20):
        logits(model, "llama")
    assert live_bytes() == before
    assert len(readers()) == mine
    files = len(list(Path("/proc/self/fd").iterdir()))
    del model
    gc.collect()
    for thread in readers()[mine - 1 :]:
        thread.join(5)
    assert len(readers()) == mine - 1
    assert len(list(Path("/proc/self/fd").iterdir())) == files - 1


def live_bytes() -> int:
    """Bytes of all tensors that the interpreter knows of."""
    gc.collect()
    known = (torch.Tensor, torch.nn.Parameter)
    found = [o for o in gc.get_objects() if type(o) in known and not o.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def test_models_over_a_streamed_one(tmp_path: Path) -> None:
    """Layers keep their reading when a model stops early."""
    whole, model = pair("llama", tmp_path)
    stream(model, find(model))
    inputs = prompt_for("llama")
    expected = reference(whole, inputs, max_new_tokens=6).tolist()
    assert SpecGenerator(model, "early_exit:1").generate(**inputs, **OPTIONS).sequences.tolist() == expected


def test_offloaded_later() -> None:
    """A model may be offloaded after its positions are looked up by a wrapper."""
    for name in ("bart", "t5", "bloom"):
        model, inputs = tiny(name), prompt_for(name)
        expected = reference(model, inputs, max_new_tokens=6).tolist()
        language = LanguageModel(model)
        cpu_offload(model, execution_device=CPU)
        assert SpecGenerator(language, "suffix").generate(**inputs, **OPTIONS).sequences.tolist() == expected


def test_what_offloading_rules_out() -> None:
    """An early exit says so; encoders whose weights are away are not compared."""
    model = tiny("bart")
    cpu_offload(model, execution_device=CPU)
    language = LanguageModel(model)
    assert not language.shares_encoder_with(LanguageModel(tiny("bart")))
    with pytest.raises(UnsupportedError, match="offloading"):
        language.early_exit(1)
