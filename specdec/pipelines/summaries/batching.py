"""A summarizer's calls of its generator: checked options, seeds, and what comes of decoded prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.core.stats import Stats
from specdec.decoding.noise import fold
from specdec.errors import OptionError
from specdec.options.fields import check_whole
from specdec.options.generate import Options

BATCH = 8  # prompts decoded together
_NO_PLACE = ("streamer", "return_dict_in_generate")


@dataclass(frozen=True)
class Decoded:
    """`new[prompt][copy]`: new ids; `starts[prompt]`: the prompt's ids, of encoder-decoder targets the decoder's."""

    new: list[list[list[int]]]
    starts: list[list[int]]
    stats: Stats


def check_call(batch_size: int, options: Mapping[str, Any]) -> None:
    """Raises OptionError for a wrong batch size and for options whose outputs a summarizer does not return."""
    check_whole("batch_size", batch_size)
    if options.get("prediction") is not None:
        raise OptionError("`prediction` goes with one prompt, a Summarizer makes its own: call SpecGenerator for it")
    for name, value in options.items():
        if value and (name in _NO_PLACE or name.startswith("output_")):
            raise OptionError(f"`{name}` has no place in a Summarizer's result: call SpecGenerator for it")


def row_seeds(options: Options, prompts: int) -> list[int] | None:
    """One seed per row of all batches, so that a text does not depend on its batch; None without a seed."""
    if options.seed is None:
        return None
    rows = prompts * options.copies
    if isinstance(options.seed, int):
        return [fold(options.seed, row) for row in range(rows)]
    if len(options.seed) != rows:
        raise OptionError.of("seed", f"one number, or one for each of {rows} rows", options.seed)
    return options.seed
