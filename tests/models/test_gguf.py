"""GGUF files: what transformers reads of them is what is computed, from packed blocks where the kernels know them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from specdec import LoadError, Loading, OptionError, SpecGenerator, kernels
from specdec.generator.tokenizers import tokenizer_beside
from specdec.models import load_model
from specdec.models.backends.packed_layers import PackedEmbedding, is_packed
from tests.folders import WIDTH, byte_tokenizer, saved, saved_gguf
from tests.matrix import endless
from tests.tiny import tiny

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no kernels here")
COMMON = endless(14)
PROMPT = [[5, 9, 12, 7, 9, 12, 7]]
TYPES = {
    "Q4_0": ["Q4_0"],
    "Q4_1": ["Q4_1"],
    "Q8_0": ["Q8_0"],
    "all": ["Q4_0", "Q4_1", "Q8_0", "F16", "F32", "BF16", "Q5_0"],
}


def as_transformers_reads(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model in floats."""
    file = Path(path)
    options = {"dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.tensor(PROMPT)).logits


def kinds(model: Any) -> dict[str, str]:
    """What every layer that is packed holds, by name."""
    every = list(model.named_modules(remove_duplicate=False))
    shared = {f"{name}.head" for name, module in every if isinstance(module, PackedEmbedding)}
    return {name: m.kind for name, m in every if isinstance(m, kernels.PackedLinear) and name not in shared}


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("backend", ["auto", "packed"])
def test_what_transformers_reads_is_what_is_computed(types: str, tied: bool, backend: str, tmp_path: Path) -> None:
    """Every block that the kernels know is packed as it lies in the file, rows of queries and keys in their order."""
    path = saved_gguf(tmp_path / "model.gguf", types=TYPES[types], tie_word_embeddings=tied)
    plain, language = as_transformers_reads(path), load_model(path, Loading(backend=backend, activations="float"))
    assert language.backend == "packed"
    assert language.dtype == torch.float32
    torch.testing.assert_close(logits(language.model), logits(plain), rtol=1e-4, atol=1e-4)
    found = kinds(language.model)
    for name, kind in found.items():
        assert kind == "float32" or torch.equal(
            language.model.get_submodule(name).weight(), plain.get_submodule(name).weight
        )
    if types != "all":
        assert set(found.values()) == {"int8" if types == "Q8_0" else "int4"}
        assert len(found) == 15
    else:
        assert {"int4", "int8"} <= set(found.values())
    embedding = language.model.get_input_embeddings()
    assert type(embedding) is PackedEmbedding
    assert torch.equal(embedding(torch.tensor(PROMPT)), plain.get_input_embeddings()(torch.tensor(PROMPT)))


def test_eager_is_what_transformers_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, and so is a model where there are no kernels: every pass would have to unpack its blocks."""
    path = saved_gguf(tmp_path / "model.gguf")
    language = load_model(path, Loading(backend="eager"))
    assert language.backend == "eager"
    expected = logits(as_transformers_reads(path))
    assert torch.equal(logits(language.model), expected)
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert torch.equal(logits(load_model(path).model), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    """Blocks stay exact beside activations in bfloat16; kernels do not know float16, in which all are floats."""
    path = saved_gguf(tmp_path / "model.gguf")
    language = load_model(path, Loading(dtype=dtype))
    assert language.dtype == getattr(torch, dtype)
    assert is_packed(language.model) == (dtype == "bfloat16")
    expected = logits(as_transformers_reads(path, language.dtype)).float()
    assert torch.cosine_similarity(logits(language.model).float().flatten(), expected.flatten(), dim=0) > 0.999
    if dtype == "bfloat16":
        assert {"int4", "int8"} <= set(kinds(language.model).values())


@pytest.mark.parametrize(("types", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float32), ("F32", torch.float32)])
def test_files_that_are_not_quantized(types: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Their dtype is taken over as that of any checkpoint: float16 is widened on a CPU."""
    assert load_model(saved_gguf(tmp_path / "model.gguf", types=[types]), Loading(backend="eager")).dtype == dtype


@needs_kernels
def test_k_quants(tmp_path: Path) -> None:
    """transformers reads them; layers beside them are packed."""
    path = saved_gguf(tmp_path / "model.gguf", types=["Q6_K"], hidden_size=64, intermediate_size=256)
    language, plain = load_model(path, Loading(activations="float")), as_transformers_reads(path)
    found = kinds(language.model)
    assert found.get("model.layers.0.mlp.down_proj", "float32") == "float32"
    assert found["model.layers.0.mlp.up_proj"] == "int8"
    torch.testing.assert_close(logits(language.model), logits(plain), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_the_name_of_the_weights(tmp_path: Path) -> None:
    """The file's blocks, where they are packed as they lie there. (A file in Q4_K was said to be in int4.)"""
    path = saved_gguf(tmp_path / "model.gguf", types=["Q6_K"], hidden_size=256, intermediate_size=256)
    assert load_model(path, Loading()).weight_kind == "Q6_K"


def test_tokenizers(tmp_path: Path) -> None:
    """The one beside the file, else the one in it."""
    path = saved_gguf(tmp_path / "model.gguf", tokens=True, vocab=WIDTH + 1)
    inside = SpecGenerator.from_pretrained(str(tmp_path), gguf_file="model.gguf").tokenizer
    assert inside.encode("ab") == [WIDTH]
    assert SpecGenerator(path).tokenizer.encode("ab") == [WIDTH]
    byte_tokenizer().save_pretrained(tmp_path)
    beside = byte_tokenizer().encode("ab")
    for source, file in ((path, None), (str(tmp_path), "model.gguf")):
        assert tokenizer_beside(source, gguf_file=file).encode("ab") == beside
    generator = SpecGenerator.from_pretrained(path, "suffix")
    assert generator.generate("ab", max_new_tokens=4).texts


def test_a_draft_in_a_folder(tmp_path: Path) -> None:
    """`draft_options` name its file."""
    saved("llama", tmp_path / "target")
    saved_gguf(tmp_path / "draft.gguf")
    options = {"gguf_file": "draft.gguf"}
    generator = SpecGenerator.from_pretrained(str(tmp_path / "target"), str(tmp_path), draft_options=options)
    plain = SpecGenerator(tiny("llama")).generate(PROMPT, **COMMON)
    assert generator.generate(PROMPT, **COMMON).sequences.tolist() == plain.sequences.tolist()


def test_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    """Also where the file is named as the model; and names that are none."""
    path = saved_gguf(tmp_path / "model.gguf")
    for name, value in (("quantization", "int4-weight"), ("offload", "disk")):
        for make in (partial(Loading, gguf_file="a.gguf"), partial(SpecGenerator.from_pretrained, path)):
            with pytest.raises(OptionError, match=f"`{name}`='{value}' and `gguf_file`"):
                make(**{name: value})
    for none in ("", 5, ["model.gguf"]):
        with pytest.raises(OptionError, match=r"`gguf_file` must be the name of a file in the model's folder"):
            Loading(gguf_file=none)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"got 'a.gguf': no GGUF file is there"):
        load_model(str(tmp_path), Loading(gguf_file="a.gguf"))
    path = saved_gguf(tmp_path / "b.gguf")
    with pytest.raises(OptionError, match=r"`gguf_file` must be the name of a file in .*, got 'a.gguf': .* b.gguf"):
        load_model(str(tmp_path), Loading(gguf_file="a.gguf"))
    with pytest.raises(OptionError, match=r"`draft` must be .*a GGUF file, got .*a.gguf': there is no such file"):
        load_model(str(tmp_path / "a.gguf"), name="draft")
    with pytest.raises(OptionError, match="`gguf_file` names a file in a folder, and `target` is a GGUF file itself"):
        load_model(path, Loading(gguf_file="b.gguf"), name="target")


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("no such thing")
    with pytest.raises(OptionError, match=r"`gguf_file` must be a GGUF file, got .*its first bytes"):
        load_model(str(tmp_path), Loading(gguf_file="model.gguf"))
    with pytest.raises(OptionError, match=r"must be .*a GGUF file, got .*it is a file of another kind"):
        load_model(str(tmp_path / "model.gguf"))
    whole = Path(saved_gguf(tmp_path / "whole.gguf")).read_bytes()
    for length in (4, 100, len(whole) - 500):
        (tmp_path / "part.gguf").write_bytes(whole[:length])
        with pytest.raises(LoadError, match="is no readable GGUF file"):
            load_model(str(tmp_path / "part.gguf"))
        with pytest.raises(LoadError, match="is no readable GGUF file"):
            SpecGenerator.from_pretrained(str(tmp_path / "whole.gguf"), str(tmp_path / "part.gguf"))
