"""Mixtures of experts over packed weights: transformers' text, few bits, and only the experts that rows chose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LanguageModel, Loading, SpecGenerator, kernels
from specdec.models import load_model
from specdec.models.backends.experts import EvenSigmoid, Stack, expert_stacks, router_stacks
from specdec.models.backends.packed_layers import is_packed
from specdec.models.gguf import GgufReader, read_config, read_model
from tests.folders import saved
from tests.matrix import endless, in_pairs
from tests.models.gguf import models as files
from tests.oracle import KINDS, oracle
from tests.test_exact import LENGTH, prompt_for, reference
from tests.tiny import threads, tiny

pytestmark = [pytest.mark.usefixtures("built"), pytest.mark.filterwarnings("ignore")]
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")
IDS = torch.randint(3, 64, (2, 30), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits.float()


def stacks(model: Any) -> dict[str, Stack]:
    return expert_stacks(model) | router_stacks(model)


def mixtures(model: Any) -> list[Any]:
    """The modules that hold experts."""
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def biased(name: str) -> Any:
    """A tiny model, whose biases matter if it has some."""
    model = tiny(name)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter_name)))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_texts(name: str) -> None:
    """In float32 they are transformers', whatever a draft says; routers and experts are packed."""
    model, inputs, options = biased(name), prompt_for(name), endless(LENGTH)
    expected = reference(model, inputs).tolist()
    target = LanguageModel(model, backend="packed")
    assert len(stacks(model)) == 6
    assert not stacks(target.model)
    for kind in KINDS:
        out = SpecGenerator(target, oracle(kind, expected, 64)).generate(**inputs, **options)
        assert out.sequences.tolist() == expected, kind


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_experts_that_rows_chose(name: str) -> None:
    """The weights of all others are made to be no numbers, and no result shows it."""
    model = LanguageModel(biased(name), backend="packed").model
    hidden, chosen, weights = torch.randn(3, 32), torch.tensor([[0, 2], [2, 0], [0, 2]]), torch.rand(3, 2)
    for mixture in mixtures(model):
        expected = mixture(hidden, chosen, weights)
        for layer in (mixture.gate_up_proj, mixture.down_proj):
            layer.packed.view(4, -1)[[1, 3]] = torch.nan
        assert torch.equal(mixture(hidden, chosen, weights), expected)
        assert mixture(hidden, chosen + 1, weights).isnan().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_undone(name: str) -> None:
    """A model that is not packed after all has its weights, and computes as before, bit for bit."""
    model = biased(name)
    expected, state = logits(model), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    undo = [stack.put(kernels.pack(stack.weight, bias=stack.bias)) for stack in stacks(model).values()]
    assert is_packed(model)
    for one in reversed(undo):
        one()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), expected)


@torch.no_grad()
@in_pairs(
    name=FAMILIES, quantization=["int8-weight", "int4-weight"], dtype=["float32", "bfloat16"], rounds=[True, False]
)
def test_few_bits(name: str, quantization: str, dtype: str, rounds: bool, tmp_path: Path) -> None:
    """The experts' floats are those that their integers stand for, and a draft changes no token."""
    folder, activations = saved(name, tmp_path), "auto" if rounds else "float"
    floats = load_model(folder, Loading(dtype=dtype, backend="eager")).model
    expected, places = logits(floats), expert_stacks(floats)
    small = load_model(folder, Loading(dtype=dtype, quantization=quantization, activations=activations))
    assert {small.model.get_submodule(place).kind for place in places} == {quantization.removesuffix("-weight")}
    off = float((logits(small.model) - expected).std() / expected.std())
    assert 0 < off < (0.3 if quantization == "int8-weight" else 0.8)  # a row may choose other experts
    for place, layer in small.model.named_modules():
        if place in places:
            for leaf, tensor in places[place].unpacked(layer).items():
                places[place].owner.get_parameter(leaf).copy_(tensor)
        elif isinstance(layer, kernels.PackedLinear):
            floats.get_submodule(place).weight.copy_(layer.weight())
    if dtype == "float32" and not rounds:
        torch.testing.assert_close(logits(small.model), logits(floats), rtol=1e-4, atol=1e-4)
    texts = [SpecGenerator(small, draft).generate(IDS, **endless(10)).sequences for draft in (None, tiny(name, seed=1))]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "MXFP4", "F16"])
def test_gguf_files(name: str, kind: str, tmp_path: Path) -> None:
    """Packed as they lie, gates beside what they let through, they are the floats that the package gguf unpacks."""
    pytest.importorskip("gguf")
    [family] = [one for one in files.KINDS.values() if one.model_type == name] or [None]
    if family is None:
        pytest.skip(f"no files of {name} are read")
    model = files.model_of(family, intermediate_size=32, **({"moe_intermediate_size": 32} if "qwen" in name else {}))
    reader = GgufReader(files.saved(tmp_path / "a.gguf", family, model, experts=kind))
    floats, packed = (read_model(reader, read_config(reader), torch.float32, packs=packs) for packs in (False, True))
    for place, stack in expert_stacks(floats).items():
        layer = dict(packed.named_modules()).get(place)
        assert (layer is None) == (kind == "F16")
        for leaf, tensor in {} if layer is None else stack.unpacked(layer).items():
            assert torch.equal(tensor, stack.owner.get_parameter(leaf))
    assert torch.cosine_similarity(logits(packed).flatten(), logits(floats).flatten(), dim=0) > 0.999


def test_sigmoids_do_not_depend_on_the_place() -> None:
    """Gates of gpt-oss and shared experts call torch's, which differs in the last bit where vectors end."""
    x = torch.randn(70_003, generator=torch.Generator().manual_seed(0)) * 4
    with EvenSigmoid(), threads(2):
        whole, parts = torch.sigmoid(x), torch.cat([part.clone().sigmoid() for part in x.split(7)])
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole, torch.sigmoid(x))
