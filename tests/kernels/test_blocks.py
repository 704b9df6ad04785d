"""Blocks of GGUF files: packed, they are the numbers that the package gguf reads, to the last bit."""

import pytest
import torch

from specdec.kernels import BLOCKS, IN_FLOATS, block_kind, pack_blocks
from tests.kernels.test_kernels import _library, in_eight_bits, numbers

assert _library  # which skips these tests where no library is
gguf = pytest.importorskip("gguf")


def blocks(name: str, outputs: int, inputs: int) -> torch.Tensor:
    """Random blocks, whose halves are numbers near 1."""
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = torch.randint(0, 256, (outputs, inputs // size, count), dtype=torch.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    for at in halves.get(name, (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)):
        scale = numbers(outputs, inputs // size, 1, seed=at).half()
        raw[:, :, at : at + 2] = scale.view(torch.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = torch.randint(0, 200, raw.shape[:2])
        raw[0, 0, 0], raw[1, 0, 0] = 0, 1
    return raw.flatten(1)


@pytest.mark.parametrize("name", BLOCKS)
def test_numbers(name: str) -> None:
    torch.manual_seed(0)
    for outputs, inputs in ((70, 512), (32, 256)):
        raw = blocks(name, outputs, inputs)
        expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name]))
        layer = pack_blocks(raw, name, inputs)
        layer.bias = numbers(outputs)
        assert torch.equal(layer.weight(), expected)
        assert block_kind(layer) == (None if name in {*IN_FLOATS, "IQ4_NL", "MXFP4"} else name)
        turned = torch.arange(outputs).flip(0)[: outputs - 3]
        assert torch.equal(pack_blocks(raw, name, inputs, order=turned).weight(), expected[turned])
        if name == "MXFP4":
            continue  # its numbers are too far apart for a comparison of sums
        x = numbers(5, inputs)
        exact = in_eight_bits(x) @ expected.double().T + layer.bias.double()
        assert (layer(x) - exact).abs().max() < 1e-5 * exact.abs().max()
