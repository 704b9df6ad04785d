"""Layers that share a call: the same numbers, bit for bit, over one copy of the weights."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from specdec.kernels import PackedLinear, pack
from specdec.kernels.ops import ALIKE, FASTEST
from specdec.models import LanguageModel
from specdec.models.backends.fused_linear import Joint, OutputSlice
from tests.kernels.rounding import to_int4, to_int8
from tests.kernels.test_kernels import int8_in_groups
from tests.models.exact import twin_of
from tests.tiny import tiny

pytestmark = pytest.mark.usefixtures("built")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16(),
    "int8": to_int8,
    "int8 groups": int8_in_groups,
    "int4": to_int4,
}


def parts(model: nn.Module) -> set[str]:
    """What the layers are called that share a call."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, OutputSlice)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)])
def test_a_joint_layer(kind: str, biases: tuple[bool, bool]) -> None:
    """Every output is what the layer alone gives; the layers' own tensors are parts of the joint one's."""
    torch.manual_seed(1)
    weights, bias = [torch.randn(outputs, 70) for outputs in (64, 32)], [torch.randn(64), torch.randn(32)]
    layers = [
        pack(KINDS[kind](weight), bias=own if has else None)
        for weight, own, has in zip(weights, bias, biases, strict=True)
    ]
    x = torch.randn(2, 5, 70).to(layers[0].takes[-1])
    expected = [layer(x) for layer in layers]
    assert PackedLinear.can_join(layers)
    joint = PackedLinear.join(layers)
    assert torch.equal(joint(x), torch.cat(expected, -1))
    assert torch.equal(joint.weight(), torch.cat([layer.weight() for layer in layers]))
    for layer, before in zip(layers, expected, strict=True):
        assert torch.equal(layer(x), before)
        assert layer.packed.untyped_storage().data_ptr() == joint.packed.untyped_storage().data_ptr()


def test_layers_that_cannot_be_joined() -> None:
    """Other kinds, other inputs, and outputs that are no whole blocks."""
    first = pack(torch.ones(64, 70))
    for other in (torch.ones(64, 70).bfloat16(), torch.ones(64, 71), torch.ones(48, 70), to_int8(torch.ones(64, 70))):
        assert not PackedLinear.can_join([first, pack(other)])


def test_who_asks_first() -> None:
    """Whoever asks, and whatever others ask at the same time: an answer is for the tensor that was asked about."""
    layers = [pack(torch.randn(32, 16)), pack(torch.randn(32, 16))]
    expected = [layer.weight().T for layer in layers]
    joint = Joint(PackedLinear.join(layers))
    one, two = OutputSlice(joint, 0, 32, last=False), OutputSlice(joint, 32, 64, last=True)
    x, y = torch.randn(1, 16), torch.randn(3, 16)
    for part, given, own in ((one, x, 0), (two, y, 1), (two, x, 1), (one, y, 0), (two, y, 1)):
        torch.testing.assert_close(part(given), given @ expected[own])
    assert joint.memo.last is None
    one(x)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(joint.memo.last))
    thread.start()
    thread.join()
    assert seen == [None]
    for other in (copy.deepcopy(joint), pickle.loads(pickle.dumps(joint))):
        assert other.memo.last is None


@pytest.mark.parametrize(
    ("name", "options", "joined"),
    [
        ("llama", WIDE, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("whisper", {}, {"q_proj", "k_proj", "v_proj"}),  # of the text, not of the encoder
        ("t5", {}, {"q", "k", "v"}),
        ("gpt2", {}, set()),  # has them in one already
    ],
)
def test_models(name: str, options: dict[str, int], joined: set[str]) -> None:
    """Passes are the same, bit for bit, and the model's own layers hold no second copy."""
    language = LanguageModel(tiny(name, **options), backend="packed")
    before = twin_of(language, 2)
    before.prefill(9, 4)
    trees, keep = [before.tree(), before.chain(3)], [7, 2]
    expected = before.forward(trees, keep)
    language.ragged.fused = language.ragged.joined()
    assert parts(language.ragged.fused) == joined
    assert not parts(language.model)
    after = twin_of(language, 2)
    after.prefill(9, 4)
    assert after.texts == before.texts
    for one, other in zip(after.forward(trees, keep), expected, strict=True):
        assert torch.equal(one.logits, other.logits)
    own = {m.packed.untyped_storage().data_ptr() for m in language.model.modules() if isinstance(m, PackedLinear)}
    shared = {m.layer.packed.data_ptr() for m in language.ragged.fused.modules() if isinstance(m, Joint)}
    assert shared <= own
    assert bool(shared) == bool(joined)


def test_a_second_model_over_the_same_layers() -> None:
    """It shares what was joined."""
    first = LanguageModel(tiny("llama", **WIDE), backend="packed")
    held = [m.layer for m in first.ragged.joined().modules() if isinstance(m, Joint)]
    for other in (LanguageModel(first.model), first.early_exit(1)):
        theirs = [m.layer for m in other.ragged.joined().modules() if isinstance(m, Joint)]
        assert theirs
        assert all(any(one is layer for layer in held) for one in theirs)


def test_a_second_model_with_a_layer_of_its_own() -> None:
    """What was joined is taken for the very layers that it was made of. (A replaced one was ignored.)"""
    first = LanguageModel(tiny("llama", **WIDE), backend="packed")
    _held = first.ragged.joined()
    first.model.model.layers[0].self_attn.k_proj = pack(torch.ones(32, 64))
    second = LanguageModel(first.model)
    attention = second.ragged.joined().model.model.layers[0].self_attn
    torch.testing.assert_close(attention.k_proj(torch.ones(1, 64)), torch.full((1, 32), 64.0))
    assert attention.q_proj.joint is attention.k_proj.joint


def test_a_strict_model_over_the_same_layers() -> None:
    """It computes passes of all widths alike, over the same memory."""
    first = LanguageModel(tiny("llama", **WIDE), backend="packed")
    for layer in (m for model in (first.model, first.ragged.model) for m in model.modules()):
        if isinstance(layer, PackedLinear):
            layer.way = FASTEST
    joined = [first.ragged.joined()]
    joined.append(LanguageModel(first.model, exactness="strict").ragged.joined())
    one, other = ([m.layer for m in model.modules() if isinstance(m, Joint)] for model in joined)
    assert {layer.way for layer in one} == {FASTEST}
    assert {layer.way for layer in other} == {ALIKE}
    assert [layer.packed.data_ptr() for layer in one] == [layer.packed.data_ptr() for layer in other]
