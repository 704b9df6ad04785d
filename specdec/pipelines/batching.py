"""Shared by pipelines: making a generator, decoding prompts in batches, and the statistics of several calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specdec.core.stats import Stats
from specdec.decoding.noise import fold
from specdec.errors import OptionError
from specdec.generator.generator import SpecGenerator
from specdec.options.fields import check_whole
from specdec.options.generate import Options
from specdec.options.load import check_loaded

BATCH = 8  # prompts decoded together
_NO_PLACE = ("streamer", "return_dict_in_generate")


@dataclass(frozen=True)
class Decoded:
    """`new[prompt][copy]`: new ids; `starts[prompt]`: the prompt's ids, of encoder-decoder targets the decoder's."""

    new: list[list[list[int]]]
    starts: list[list[int]]
    stats: Stats


def make_generator(
    target: Any, draft: Any, task: str, options: Mapping[str, Any], *, kind: str = "SpecGenerator"
) -> SpecGenerator:
    """The generator that is `target`, or one made of these parts for the class `kind`.

    Raises OptionError for a generator without a tokenizer, and for parts beside a generator.
    """
    if isinstance(target, SpecGenerator):
        if idle := [name for name, given in {"draft": draft is not None, **options}.items() if given]:
            raise OptionError(f"`{idle[0]}` belongs to the SpecGenerator: set it there, or pass the model")
        generator = target
    else:
        check_loaded(kind, options)
        generator = SpecGenerator(target, draft, task=task, **options)
    if generator.tokenizer is None:
        raise OptionError("a pipeline reads and writes text: pass `tokenizer=`")
    return generator


def check_call(batch_size: int, options: Mapping[str, Any]) -> None:
    """Raises OptionError for a wrong batch size and for options whose outputs a pipeline does not return."""
    check_whole("batch_size", batch_size)
    if options.get("prediction") is not None:
        raise OptionError("`prediction` goes with one prompt, and a pipeline makes its own: call SpecGenerator for it")
    for name, value in options.items():
        if value and (name in _NO_PLACE or name.startswith("output_")):
            raise OptionError(f"`{name}` has no place in a pipeline's result: call SpecGenerator for it")


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
    found = Decoded([], [], Stats())
    stats = []
    for first in range(0, len(prompts), batch_size):
        batch = list(prompts[first : first + batch_size])
        rows = len(seeds) // len(prompts) if seeds else 0
        own = {"seed": list(seeds[first * rows : (first + len(batch)) * rows])} if seeds else {}
        out = generator.generate(batch, **{**given, **own})
        assert out.sequences is not None
        assert out.stats is not None
        new = out.new_tokens()
        copies = len(new) // len(batch)
        found.new.extend(new[i : i + copies] for i in range(0, len(new), copies))
        start = out.sequences.shape[1] - max(map(len, new))
        found.starts.extend(out.sequences[::copies, :start].tolist())
        stats.append(out.stats)
    return Decoded(found.new, found.starts, total(stats))


def total(parts: Sequence[Stats]) -> Stats:
    """The statistics of several calls of one generator: sums of counts and seconds, rows one after the other."""
    joined: dict[str, Any] = {}
    for field in fields(Stats) if parts else ():
        values = [getattr(part, field.name) for part in parts]
        if isinstance(field.default, tuple):
            joined[field.name] = tuple(item for value in values for item in value)
        elif isinstance(field.default, int | float):
            joined[field.name] = sum(values)
        else:
            joined[field.name] = values[-1]
    return Stats(**joined)
