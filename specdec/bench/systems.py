"""The generators of a benchmark, which share one target, and one measured call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter as clock
from typing import Any, NamedTuple

from specdec.bench.machine import PeakMemory
from specdec.bench.parts import Mode, Synthetic
from specdec.bench.suite import Cell
from specdec.bench.synthetic import SyntheticDraft, passes_of
from specdec.core.drafts import Commit, Draft, Plan, Proposer, SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.errors import OptionError
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator
from specdec.options import bundled_models
from specdec.proposers import COPYING, is_word

_SHARED = ("dtype", "device_map", "backend", "trust_remote_code")  # of target and draft
_IN_VAIN = 24  # characters shown of drafted text that was not accepted


class Systems:
    """A target, loaded by a mode, and the generators of its cells.

    Each cell has its own generator, since a schedule learns costs.
    """

    def __init__(self, target: str, mode: Mode) -> None:
        how = mode.loading
        if target.startswith("zoo:"):
            how = {"dtype": "float32", **how}
        self.plain = SpecGenerator.from_pretrained(bundled_models.locate(target, "target"), **how)
        _compile(self.plain)
        self._draft_loading = {**{name: how[name] for name in _SHARED if name in how}, **mode.draft_options}
        self._models: dict[str, SpecGenerator] = {}
        self._cells: dict[tuple[str, Cell], SpecGenerator] = {}

    def generator(self, group: str, cell: Cell | None) -> SpecGenerator:
        """The generator of a cell, None is the plain one; raises what loading a draft raises."""
        if cell is None:
            return self.plain
        key = (group, cell)
        if key not in self._cells:
            self._cells[key] = self._assisted(cell.model)
            _compile(self._cells[key])
        return self._cells[key]

    def _assisted(self, draft: str | Synthetic) -> SpecGenerator:
        target, tokenizer = self.plain.target, self.plain.tokenizer
        if isinstance(draft, Synthetic):
            drafter = SyntheticDraft(draft.synthetic, passes_of(self._model(draft.like).target))
            return SpecGenerator(target, drafter, tokenizer=tokenizer, prefix_cache=False)
        text, plus, name = draft.rpartition("+")
        if is_word(draft):
            return SpecGenerator(target, draft, tokenizer=tokenizer, prefix_cache=False)
        if plus and (text not in COPYING or is_word(name)):
            raise OptionError.of("drafts", f"one draft, or a pair such as {COPYING[0]}+MODEL", draft)
        model = self._model(name)
        both = {"tokenizer": tokenizer}
        if tokenizer is not None:
            both["assistant_tokenizer"] = model.tokenizer
        return SpecGenerator(target, (text, model.target) if plus else model.target, **both, prefix_cache=False)

    def _model(self, name: str) -> SpecGenerator:
        if name not in self._models:
            self._models[name] = SpecGenerator.from_pretrained(
                bundled_models.locate(name, "draft"), **self._draft_loading
            )
        return self._models[name]


def _compile(generator: SpecGenerator) -> None:
    """Waits for the passes that programs run on after their first minute."""
    generator.compile()
    generator.wait_until_compiled()


class Measured(NamedTuple):
    """A finished call: its output, seconds in all, to the first token and between tokens, and peak memory in bytes."""

    out: Generation
    seconds: float
    first_token: float
    gaps: list[float]
    memory: int | None


def measure(generator: SpecGenerator, call: Mapping[str, Any]) -> Measured:
    """Runs one call as a stream and measures it."""
    arrivals: dict[int, list[tuple[float, int]]] = {}
    with PeakMemory() as memory:
        began = clock()
        events = generator.stream(**call)
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                out: Generation = end.value
                break
            arrivals.setdefault(event.row, []).append((clock() - began, len(event.token_ids)))
        seconds = clock() - began
    first = min(times[0][0] for times in arrivals.values())
    gaps = [gap for times in arrivals.values() for gap in token_gaps(times)]
    return Measured(out, seconds, first, gaps, memory.bytes)


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between the tokens of one row, from the (time, count) of its events.

    Tokens of one event share the time since the event before. The first event counts only where it is the only one, as
    that of a search.
    """
    if len(arrivals) == 1:
        (time, count), *_ = arrivals
        return [time / count] * count
    gaps = []
    for (before, _), (time, count) in pairwise(arrivals):
        gaps += [(time - before) / count] * count
    return gaps


class _Recording(Draft, Proposer):
    """A draft that records its proposals, for one row."""

    def __init__(self, drafter: Draft) -> None:
        self._drafter, self.instant, self.models = drafter, drafter.instant, drafter.models
        self.guesses_trees, self.reads_predictions = drafter.guesses_trees, drafter.reads_predictions
        self.proposed: list[Tree] = []
        self._last = EMPTY

    def start(self, vocab_size: int) -> Proposer:
        self._proposer = self._drafter.start(vocab_size)
        return self

    def propose(self, rows: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        [self._last] = trees = self._proposer.propose(rows, plans)
        return trees

    def update(self, commits: Sequence[Commit]) -> None:
        self.proposed.append(self._last)
        self._last = EMPTY
        self._proposer.update(commits)

    def drop(self, seq_ids: Sequence[int]) -> None:
        self._proposer.drop(seq_ids)


def strip(generator: SpecGenerator, call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One text by rounds: `tokens`, how many the draft had (`accepted`), and the drafted text that was not (`vain`)."""
    assert generator.drafter is not None
    recording = _Recording(generator.drafter)
    tokenizer = generator.tokenizer
    shown = SpecGenerator(generator.target, recording, tokenizer=tokenizer, prefix_cache=False)
    rounds = []
    for number, event in enumerate(shown.stream(**call)):
        proposed = recording.proposed[number]
        left = proposed.tokens[event.accepted :]
        vain = tokenizer.decode(left).replace("\n", "↵") if proposed.is_chain else f"({len(left)} more)"
        rounds.append(
            {
                "tokens": [tokenizer.decode([i]) for i in event.token_ids],
                "accepted": event.accepted,
                "vain": vain if len(vain) <= _IN_VAIN else f"{vain[:_IN_VAIN]}…",
            }
        )
    return rounds
