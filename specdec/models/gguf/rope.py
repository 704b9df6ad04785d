"""Rotary positions of a GGUF file, as transformers' rope parameters that compute the same angles.

llama.cpp turns position p of pair i by p · base^(-2i/d) / (factor · factors[i]), where `factors` is a tensor of the
file; YaRN mixes in the angle without `factor`. The parameters hold all of it, so that the config alone says the angles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.models.gguf.header import Header

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The formula of all Llama 3.x; its factors are in the tensor rope_freqs."""
_TOLERANCE = 1e-5  # float32 factors of one formula may differ by this share


def rope_parameters(header: Header) -> dict[str, Any]:
    """The rope parameters of all layers, or of the layers without a window where some have one.

    Raises UnsupportedError for scalings, and combinations of scalings, that transformers does not compute.
    """
    base = float(header.get("rope.freq_base", 10000.0))
    kind, factor = header.get("rope.scaling.type", "linear"), _factor(header)
    original = header.get("rope.scaling.original_context_length")
    attention = header.get("rope.scaling.attn_factor")
    freqs = header.floats("rope_freqs.weight")
    short, long = (header.floats(f"rope_factors_{name}.weight") for name in ("short", "long"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if kind == "none":
        factor = 1.0
    if kind == "yarn":
        if freqs or short or long:
            raise header.refusal("rope.scaling.type", kind, "YaRN beside tensors of factors is not computed")
        return rope | _yarn(header, factor, original, attention)
    if kind not in ("none", "linear", "longrope"):
        raise header.refusal("rope.scaling.type", kind, "this scaling is not known")
    if freqs and llama3_factor(freqs, base) and factor == 1.0:
        return rope | {"rope_type": "llama3", "factor": llama3_factor(freqs, base), **_LLAMA3}
    if freqs or short or long:  # rope_freqs comes before the two others
        original = int(original or header.need("context_length"))
        short, long = freqs or short or long, freqs or long or short
        scaling: dict[str, Any] = {"short_factor": [number * factor for number in short or ()]}
        scaling |= {"long_factor": [number * factor for number in long or ()]}
        scaling |= {"original_max_position_embeddings": original, "attention_factor": float(attention or 1.0)}
        scaling["factor"] = max(1.0, header.need("context_length") / original)  # without effect beside attention_factor
        return rope | {"rope_type": "longrope", **scaling}
    if attention not in (None, 1.0):
        raise header.refusal("rope.scaling.attn_factor", attention, "no scaling is there that it could belong to")
    return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}


def llama3_factor(freqs: list[float], base: float) -> float | None:
    """The factor of Llama 3's formula that gives these factors of frequencies; None if another formula does."""
    factor, low, high = max(freqs), 8192.0, 8192 / 4.0  # wavelengths, in positions
    wave = 2 * math.pi * base ** (np.arange(len(freqs)) / len(freqs))
    smooth = (8192 / wave - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(wave < high, 1.0, np.where(wave > low, factor, between))
    return factor if factor > 1 and np.allclose(expected, freqs, rtol=_TOLERANCE) else None


def _factor(header: Header) -> float:
    factor = header.get("rope.scaling.factor")
    factor = header.get("rope.scale_linear") if factor is None else factor
    return float(factor or 1.0)


def _yarn(header: Header, factor: float, original: int | None, attention: float | None) -> dict[str, Any]:
    mix = header.get("rope.scaling.yarn_ext_factor", 1.0)
    if mix not in (1.0, -1.0):  # -1: llama.cpp's word for its default
        raise header.refusal("rope.scaling.yarn_ext_factor", mix, "only 1 is computed")
    # Without the key, llama.cpp computes this number, which transformers' converted configs have.
    scale = header.get("rope.scaling.yarn_attn_factor", 1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original or header.need("context_length")),
        "attention_factor": float(scale) * float(attention or 1.0),
        "beta_fast": float(header.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(header.get("rope.scaling.yarn_beta_slow", 1.0)),
    }
