"""Tiny models saved as AWQ, GPTQ, compressed-tensors and FP8 lay them out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.folders import saved

SIZES = {"llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}, "gpt2": {"n_embd": 64}}
GROUP = 32
_INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for linear layers of one kind."""
    group = {"targets": ["Linear"], "format": form, "weights": {**_INTS, **weights}, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 32], "activation_scheme": "dynamic"}
SCHEMES: dict[str, dict[str, Any]] = {
    "awq": AWQ, "gptq": GPTQ, "gptq in 8 bits": {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "desc_act": False},
    "pack-quantized": compressed("pack-quantized"),
    "int-quantized": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True), "fp8 in blocks": FP8,
    "fp8": {**FP8, "weight_block_size": None},
}  # fmt: skip


def words(values: Tensor, bits: int) -> Tensor:
    """Integers `[rows, n]` in rows of 32 bits, the first in the lowest bits."""
    places = torch.arange(32 // bits) * bits
    total = (values.long().unflatten(1, (-1, 32 // bits)) << places).sum(2)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _integers(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and zeros of a weight `[outputs, inputs]` whose inputs are in these `groups` `[inputs]`."""
    members = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low, high = (torch.stack([part(one) for one in members], 1) for part in (_least, _most))
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    levels = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1)
    return levels, scales, zeros


def _least(part: Tensor) -> Tensor:
    return part.amin(1).clamp(max=-1e-3)


def _most(part: Tensor) -> Tensor:
    return part.amax(1).clamp(min=1e-3)


def _awq(weight: Tensor, scheme: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    groups = torch.arange(weight.shape[1]) // GROUP
    levels, scales, zeros = _integers(weight, 4, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    turned = [words(one.T.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4) for one in (levels, zeros)]
    tensors = {"qweight": turned[0], "qzeros": turned[1], "scales": scales.T.half()}
    return tensors, (levels - zeros[:, groups]) * scales[:, groups]


def _gptq(weight: Tensor, scheme: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    bits, groups = scheme["bits"], torch.arange(weight.shape[1]) // GROUP
    if scheme["desc_act"]:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    levels, scales, zeros = _integers(weight, bits, groups)
    less = scheme["checkpoint_format"] == "gptq"
    tensors = {"qweight": words(levels, bits).T, "qzeros": words(zeros.T - int(less), bits)}
    tensors |= {"scales": scales.T.half(), "g_idx": groups.int()}
    return tensors, (levels - zeros[:, groups]) * scales[:, groups]


def _compressed(weight: Tensor, scheme: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    if scheme["format"] == "int-quantized":
        scales = weight.abs().amax(1, keepdim=True) / 127
        levels = (weight / scales).round()
        return {"weight": levels.to(torch.int8), "weight_scale": scales}, levels * scales
    groups = torch.arange(weight.shape[1]) // GROUP
    levels, scales, zeros = _integers(weight, 4, groups)
    tensors = {"weight_packed": words(levels, 4), "weight_scale": scales.half()}
    tensors |= {"weight_zero_point": words(zeros.T, 4).T, "weight_shape": torch.tensor(weight.shape)}
    return tensors, (levels - zeros[:, groups]) * scales[:, groups]


def _fp8(weight: Tensor, scheme: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    size = scheme["weight_block_size"]
    if size is None:
        scales = weight.abs().amax() / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scales}, values.float() * scales
    rows, columns = size
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % rows))
    scales = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
    values = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * wide


_MAKERS: dict[str, Callable[[Tensor, dict[str, Any]], tuple[dict[str, Tensor], Tensor]]] = {
    "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8,
}  # fmt: skip


def saved_quantized(folder: Path, scheme: dict[str, Any], name: str = "llama", **sizes: Any) -> dict[str, Tensor]:
    """Saves a tiny model whose layers' linear weights are quantized so; returns the floats that these stand for."""
    saved(name, folder, **{**SIZES[name], **sizes})
    state, floats = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for key in [key for key in state if key.endswith(("proj.weight", "c_attn.weight", "c_fc.weight"))]:
        weight = state.pop(key)  # GPT-2 has it transposed
        tensors, numbers = _MAKERS[scheme["quant_method"]](weight.T if name == "gpt2" else weight, scheme)
        floats[key] = numbers.T if name == "gpt2" else numbers
        state |= {f"{key.removesuffix('weight')}{leaf}": one.contiguous() for leaf, one in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": scheme}))
    return floats
