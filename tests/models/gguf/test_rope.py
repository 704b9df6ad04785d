"""Rotary positions of GGUF files: the angles and the scale that llama.cpp computes from the same keys and tensors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import UnsupportedError
from specdec.models.gguf import GgufReader, empty_model, read_config
from tests.models.gguf.models import KINDS, model_of, saved

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, BASE = 16, 10000.0  # of heads
FREQS = np.array([1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0])


def theirs(keys: dict[str, Any], factors: Any = None, base: float = BASE) -> tuple[np.ndarray, float]:
    """Angles per position and the scale of cosines, by ggml's `ggml_rope_cache_init` and llama.cpp's context."""
    kind = keys.get(".rope.scaling.type", "linear")
    given = keys.get(".rope.scaling.factor") or keys.get(".rope.scale_linear") or 1.0
    scale = 1.0 if kind == "none" else 1 / given
    pairs = np.arange(WIDTH // 2)
    plain = base ** (-2 * pairs / WIDTH) / (1.0 if factors is None else factors)
    magnitude = keys.get(".rope.scaling.attn_factor", 1.0)
    if kind != "yarn":
        return plain * scale, magnitude
    length = keys.get(".rope.scaling.original_context_length", 256)
    corner = [
        WIDTH * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (keys.get(".rope.scaling.yarn_beta_fast", 32.0), keys.get(".rope.scaling.yarn_beta_slow", 1.0))
    ]
    low, high = max(0, math.floor(corner[0])), min(WIDTH - 1, math.ceil(corner[1]))
    ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return plain * scale * (1 - ramp) + plain * ramp, magnitude * (1 + 0.1 * math.log(1 / scale))


def mine(path: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None, name: str = "llama") -> Any:
    """The rotary module of a model in a file with these keys and tensors."""
    model = model_of(KINDS[name], hidden_size=64, max_position_embeddings=256)
    file = saved(path / "a.gguf", KINDS[name], model, keys, tensors)
    return empty_model(read_config(GgufReader(file)), torch.float32).model.rotary_emb


LINEAR = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
YARN = {**LINEAR, ".rope.scaling.type": "yarn", ".rope.scaling.original_context_length": 64}
CASES: dict[str, dict[str, Any]] = {
    "none": {}, "linear": LINEAR, "linear without its type": {".rope.scaling.factor": 4.0},
    "linear by its old name": {".rope.scale_linear": 2.0},
    "none in spite of a factor": {**LINEAR, ".rope.scaling.type": "none"}, "yarn": YARN,
    "yarn from the context": {**LINEAR, ".rope.scaling.type": "yarn"},
    "yarn with corners": {**YARN, ".rope.scaling.yarn_beta_fast": 8.0, ".rope.scaling.yarn_beta_slow": 2.0},
    "yarn with a scale": {**YARN, ".rope.scaling.attn_factor": 0.75},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_scaling(name: str, tmp_path: Path) -> None:
    """transformers' loader left all positions unscaled."""
    rotary, (angles, scale) = mine(tmp_path, CASES[name]), theirs(CASES[name])
    np.testing.assert_allclose(rotary.inv_freq.numpy(), angles, rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("keys", [{}, LINEAR], ids=["alone", "and linear"])
def test_factors_of_frequencies(keys: dict[str, Any], tmp_path: Path) -> None:
    """The tensor rope_freqs, whatever formula it came from."""
    rotary = mine(tmp_path, keys, {"rope_freqs.weight": FREQS})
    np.testing.assert_allclose(rotary.inv_freq.numpy(), theirs(keys, FREQS)[0], rtol=1e-5)
    with torch.no_grad():
        rotary(torch.zeros(1, 1, 4), torch.arange(300)[None])  # beyond the context, too
    np.testing.assert_allclose(rotary.inv_freq.numpy(), theirs(keys, FREQS)[0], rtol=1e-5)
    assert rotary.attention_scaling == 1.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3(factor: float, tmp_path: Path) -> None:
    """Its factors become its formula, which needs no care for lengths of text."""
    base = 500000.0
    wave = 2 * math.pi * base ** (2 * np.arange(8) / WIDTH)
    smooth = (8192 / wave - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wave < 2048, 1.0, np.where(wave > 8192, factor, middle))
    rotary = mine(tmp_path, {".rope.freq_base": base}, {"rope_freqs.weight": factors})
    assert rotary.config.rope_parameters["rope_type"] == "llama3"
    np.testing.assert_allclose(rotary.inv_freq.numpy(), theirs({}, factors, base)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("scale", [None, 1.25])
def test_longrope(name: str, scale: float | None, tmp_path: Path) -> None:
    """Two tensors of factors, one for texts within the original context, and the scale of the file."""
    keys = {
        ".rope.scaling.original_context_length": 32,
        ".rope.scaling.attn_factor": scale,
        ".attention.sliding_window": None,
    }
    long = 2 * FREQS
    rotary = mine(tmp_path, keys, {"rope_factors_short.weight": FREQS, "rope_factors_long.weight": long}, name)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), theirs({}, FREQS)[0], rtol=1e-5)
    assert rotary.attention_scaling == (scale or 1.0)
    with torch.no_grad():
        rotary(torch.zeros(1, 1, 4), torch.arange(33)[None])
    np.testing.assert_allclose(rotary.inv_freq.numpy(), theirs({}, long)[0], rtol=1e-5)


def test_layers_with_a_window_turn_by_their_own_base(tmp_path: Path) -> None:
    """Of Gemma 3: scaling is for the others."""
    model = model_of(KINDS["gemma3"])
    keys = {**LINEAR, ".rope.freq_base": 1000000.0}
    path = saved(tmp_path / "a.gguf", KINDS["gemma3"], model, keys)
    rotary = empty_model(read_config(GgufReader(path)), torch.float32).model.rotary_emb
    half = np.arange(4) / 4
    np.testing.assert_allclose(rotary.sliding_attention_inv_freq.numpy(), 10000.0**-half, rtol=1e-5)
    np.testing.assert_allclose(rotary.full_attention_inv_freq.numpy(), 1000000.0**-half / 4, rtol=1e-5)


def test_what_is_not_computed(tmp_path: Path) -> None:
    """Key and value are named."""
    refused = {
        ".rope.scaling.type": "spiral", ".rope.scaling.attn_factor": 0.5, ".rope.scaling.alpha": 2.0,
        ".rope.dimension_count": 8, ".rope.dimension_sections": [1, 2],
    }  # fmt: skip
    for key, value in refused.items():
        with pytest.raises(UnsupportedError, match=rf"says llama{key} = .*{value if key[-1] != 's' else ''}.*, and "):
            mine(tmp_path, {key: value})
    with pytest.raises(UnsupportedError, match=r"llama.rope.scaling.yarn_ext_factor = 0.5, and only 1 is computed"):
        mine(tmp_path, {**YARN, ".rope.scaling.yarn_ext_factor": 0.5})
    with pytest.raises(UnsupportedError, match=r"YaRN beside tensors of factors is not computed"):
        mine(tmp_path, YARN, {"rope_freqs.weight": FREQS})
