"""Parts of layers as one call: equal to torch's operators, bit for bit, over dtypes and widths; bad operands."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels import LAYER_TENSORS, attention, crossed, gated, norm, pack, part
from specdec.models.backends.ragged_model import Sigmoid, Tanh

pytestmark = pytest.mark.usefixtures("built")
DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": Sigmoid(1.702), "tanh": Tanh(),
}  # fmt: skip


def linear(weight: Tensor) -> tuple[Any, Any]:
    """A layer, and the same as a part."""
    layer = pack(weight)
    return layer, part("Linear", [layer._buffers[name] for name in LAYER_TENSORS], layer.outputs, 0, 0, layer.rounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 32, 100, 896, 1537])
def test_norms(width: int, dtype: torch.dtype) -> None:
    """As in LLaMA (a rounded row times the weight) and Gemma (times 1 + the weight in float32, rounded then)."""
    torch.manual_seed(width)
    weight, eps = torch.randn(width).to(dtype), 1e-6
    for shape in ((1, 1), (2, 5), (1, 33)):
        x = (3 * torch.randn(*shape, width)).to(dtype)
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        assert torch.equal(norm(part("Norm", weight, eps), x), weight * wide.to(dtype))
        assert torch.equal(norm(part("Norm", 1 + weight.float(), eps), x), (wide * (1 + weight.float())).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_products(name: str, dtype: torch.dtype) -> None:
    """Over every activation, with the layers apart and joined, between norms and added to the input."""
    torch.manual_seed(1)
    weights = [(torch.randn(*shape) / 6).to(dtype) for shape in ((64, 40), (64, 40), (40, 64))]
    (gate, one), (up, two), (down, three) = map(linear, weights)
    _, both = linear(torch.cat(weights[:2]))
    scale, unit = 1.702 if name == "sigmoid" else 1.0, part("Norm", torch.ones(40, dtype=dtype), 1e-6)
    for rows in (1, 4, 17):
        x = torch.randn(1, rows, 40).to(dtype)

        def expected(x: Tensor) -> Tensor:
            return down(ACTIVATIONS[name](gate(x)) * up(x))  # type: ignore[no-any-return]

        for layers in ([one, two], [both]):
            alone = part("Gated", layers, True, three, name, scale, None, None, False)
            assert torch.equal(gated(alone, x), expected(x))
            framed = part("Gated", layers, True, three, name, scale, unit, unit, True)
            assert torch.equal(gated(framed, x), x + norm(unit, expected(norm(unit, x))))


def test_wrong_layers_over_an_encoder() -> None:
    _, one = linear(torch.ones(8, 8))
    with pytest.raises(ValueError, match="`layers` must be five layers"):
        part("Crossed", [one], [one], [torch.ones(8)] * 6, 1e-5, 0.5, 2, "gelu")
    whole, x = part("Crossed", [one], [one] * 5, [torch.ones(8)] * 6, 1e-5, 0.5, 2, "gelu"), torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=r"`x` must be \[1, nodes, width\]"):
        crossed(whole, x, *[x] * 6)


def attention_part(dtype: torch.dtype, width: int, sizes: tuple[int, int, int, int] = (4, 2, 8, 8)) -> Any:
    heads, kv_heads, of_key, of_value = sizes
    outputs = (heads * of_key, kv_heads * of_key, kv_heads * of_value)
    layers = [linear(torch.randn(count, width).to(dtype))[1] for count in outputs]
    out = linear(torch.randn(width, heads * of_value).to(dtype))[1]
    return part("Attention", layers, out, None, None, list(sizes), 0.3, 0.0, None, None, None, False)


def test_wrong_operands() -> None:
    """An error names the argument."""
    x, table, turns = torch.ones(1, 2, 16), torch.zeros(2, 4, dtype=torch.int32), torch.ones(1, 2, 8)
    buffer, run = torch.zeros(1, 2, 4, 8), partial(attention, attention_part(torch.float32, 16))
    table[:, 3] = 1
    assert run(x, turns, turns, table, buffer, buffer).shape == (1, 2, 16)
    for cos in (torch.ones(1, 3, 8), torch.ones(1, 2, 7), torch.ones(1, 2, 10), turns.double(), turns.bfloat16()):
        with pytest.raises(ValueError, match="`cos` and `sin` must be"):
            run(x, cos, turns, table, buffer, buffer)
    with pytest.raises(ValueError, match="`x` must be"):
        run(torch.ones(2, 2, 16), turns, turns, table, buffer, buffer)
    with pytest.raises(ValueError, match="`x` must be"):
        norm(part("Norm", torch.ones(8), 1e-6), torch.ones(3, 9))
    with pytest.raises(ValueError, match="`x` must be float32 or bfloat16"):
        norm(part("Norm", torch.ones(8), 1e-6), torch.ones(3, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="`weight` must be"):
        part("Norm", torch.ones(8, dtype=torch.float16), 1e-6)
    with pytest.raises(ValueError, match="`tensors` must be"):
        part("Linear", [], 1, 0, 0, False)
    _, one = linear(torch.ones(8, 8))
    with pytest.raises(ValueError, match="`name` must be"):
        gated(part("Gated", [one, one], True, one, "relu", 1.0, None, None, False), torch.ones(1, 1, 8))
    with pytest.raises(ValueError, match="`gate_up` must give pieces"):
        gated(part("Gated", [one, one, one], True, one, "silu", 1.0, None, None, False), torch.ones(1, 1, 8))
