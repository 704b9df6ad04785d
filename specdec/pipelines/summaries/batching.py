"""A summarizer's calls of its generator: checked options, seeds, and prompts decoded in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.stats import Stats, total
from specdec.decoding.noise import fold
from specdec.errors import OptionError
from specdec.generator.generator import SpecGenerator
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


def decode(
    generator: SpecGenerator,
    prompts: Sequence[list[int]],
    given: Mapping[str, Any],
    *,
    batch_size: int,
    seeds: Sequence[int] | None,
) -> Decoded:
    """Decodes prompts of ids, `batch_size` at a time; `seeds` of all rows, and the call's other options (`given`)."""
    decoded, starts, stats = [], [], []
    rows = len(seeds) // len(prompts) if seeds else 0
    for first in range(0, len(prompts), batch_size):
        batch = list(prompts[first : first + batch_size])
        own = {"seed": list(seeds[first * rows : (first + len(batch)) * rows])} if seeds else {}
        out = generator.generate(batch, **{**given, **own})
        assert out.sequences is not None
        assert out.stats is not None
        new = out.new_tokens()
        copies = len(new) // len(batch)
        decoded.extend(new[i : i + copies] for i in range(0, len(new), copies))
        start = out.sequences.shape[1] - max(map(len, new))
        starts.extend(out.sequences[::copies, :start].tolist())
        stats.append(out.stats)
    return Decoded(decoded, starts, total(stats))
