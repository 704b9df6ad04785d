"""The sizes of the Python-code pair: one depth, several widths."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
POSITIONS = 2048
HEAD = 64
WIDTHS = {"base": 192, "small": 320, "medium": 640, "large": 1024}  # 11, 32, 122 and 308 million weights
TARGET_LAYERS = 24


@dataclass(frozen=True)
class Shape:
    """Layers and width of one Llama-shaped model with heads of 64."""

    layers: int
    width: int

    @property
    def config(self) -> LlamaConfig:
        """What transformers builds it from."""
        heads = self.width // HEAD
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=-(-8 * self.width // (3 * HEAD)) * HEAD,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )

    def build(self) -> LlamaForCausalLM:
        """A freshly initialised model of this shape."""
        return LlamaForCausalLM(self.config)

    @property
    def parameters(self) -> int:
        """About how many weights it has: those of its matrices."""
        config = self.config
        layer = 4 * self.width**2 + 3 * self.width * config.intermediate_size
        return int(VOCABULARY * self.width + self.layers * layer)


def target_shape(size: str) -> Shape:
    """The target of a size: a name in `WIDTHS`, or about so many weights ("300M").

    Raises ValueError for others, and for numbers that no width comes near.
    """
    if size in WIDTHS:
        return Shape(TARGET_LAYERS, WIDTHS[size])
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kMB]?)", size)
    if number is None:
        raise ValueError(size)
    wanted = float(number[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[number[2]]
    shapes = (Shape(TARGET_LAYERS, HEAD * heads) for heads in range(1, 65))
    nearest = min(shapes, key=lambda shape: abs(shape.parameters - wanted))
    if not nearest.parameters / 2 <= wanted <= nearest.parameters * 2:
        raise ValueError(size)
    return nearest
