"""Layers that are joined: the same numbers, bit for bit, over one copy of the weights."""

import pytest
import torch
from torch import nn

from specdec.kernels import PackedLinear, pack
from specdec.kernels.ops import ALIKE, FASTEST
from specdec.models.backends.fused_layers import join_layers
from tests.kernels.rounding import to_int4, to_int8
from tests.kernels.test_kernels import int8_in_groups

pytestmark = pytest.mark.usefixtures("built")
KINDS = {
    "float32": lambda weight: weight, "bfloat16": lambda weight: weight.bfloat16(), "int8": to_int8,
    "int8 groups": int8_in_groups, "int4": to_int4,
}  # fmt: skip


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


def test_layers_of_several_models() -> None:
    """They are joined once, as long as they are the very same; a strict model computes all widths alike over them."""
    model = nn.ModuleDict({name: pack(torch.randn(32, 16)) for name in ("a", "b")})
    layers = list(model.values())
    first = join_layers(layers, [model], ["a", "b"])
    assert join_layers(layers, [model], ["a", "b"]) is first
    for layer in layers:
        layer.way = ALIKE
    strict = join_layers(layers, [model], ["a", "b"])
    assert (first.way, strict.way) == (FASTEST, ALIKE)
    assert strict.packed.data_ptr() == first.packed.data_ptr()
    other = [layers[0], pack(torch.ones(32, 16))]
    other[1].way = ALIKE
    joined = join_layers(other, [], ["a", "b"])
    torch.testing.assert_close(joined(torch.ones(1, 16))[0, 32:], torch.full((32,), 16.0))
