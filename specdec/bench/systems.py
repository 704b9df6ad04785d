"""The generators of a benchmark, which share one target; one measured call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter as clock
from typing import Any

from specdec.bench.machine import peak_memory, reset_peak_memory
from specdec.bench.parts import Mode
from specdec.bench.suite import Cell
from specdec.generator.drafts_by_name import Drafts, HeadAt, loaded
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator
from specdec.generator.memories import MemoryWish
from specdec.models import packed_weights_unwritten
from specdec.options.load import Loading


class Systems:
    """A target, loaded by a mode, and the generators of its cells.

    Each cell has its own generator, since a schedule learns costs. `models`: loaded draft models, by name.
    """

    def __init__(self, target: str, mode: Mode, models: dict[str, Any] | None = None) -> None:
        how = mode.loading
        with packed_weights_unwritten():
            self.plain = SpecGenerator.from_pretrained(target, prefix_cache=False, **how)
        self._memory = MemoryWish.read(mode.memory)
        self._how, self._draft_options = Loading.split(how)[0], mode.draft_options
        self._models, self._heads = {} if models is None else models, dict[str, Any]()
        self._cells: dict[tuple[str, Cell], SpecGenerator] = {}

    def generator(self, group: str, cell: Cell | None) -> SpecGenerator:
        """The generator of a cell, the plain generator for None; raises what loading a draft raises."""
        if cell is None:
            return self.plain
        key = (group, cell)
        if key not in self._cells:
            self._cells[key] = self._assisted(cell)
        return self._cells[key]

    def forget(self, group: str, cell: Cell | None) -> None:
        """Has a memory forget requests, so that no repeat finds the answers of the last one."""
        if (memory := self.generator(group, cell).memory) is not None:
            memory.forget()

    def close(self) -> None:
        """Ends all calls."""
        for generator in (self.plain, *self._cells.values()):
            generator.close()

    def _assisted(self, cell: Cell) -> SpecGenerator:
        draft: Any = cell.draft
        if (name := cell.name).model is not None:
            model = self._model(name.model)
            draft = model if name.word is None else (name.word, model)
        memory = self._memory if name.copies else False
        return SpecGenerator(
            self.plain.target, draft, tokenizer=self.plain.tokenizer, prefix_cache=False, memory=memory
        )

    def _model(self, name: str) -> Any:
        """A draft model or head, which its cells share."""
        if name not in self._models:
            with packed_weights_unwritten():
                self._models[name] = loaded(name, self._how.of_draft(self._draft_options))
        if not isinstance(draft := self._models[name], HeadAt):
            return draft
        if name not in self._heads:
            self._heads[name] = Drafts(self.plain.target).make(draft, self.plain.tokenizer)
        return self._heads[name]


def measure(generator: SpecGenerator, call: Mapping[str, Any]) -> tuple[Generation, dict[str, Any]]:
    """Runs one call as a stream; returns its output, and the fields of a `Sample` about time and memory."""
    arrivals: dict[int, list[tuple[float, int]]] = {}
    reset_peak_memory()
    began = clock()
    events = generator.stream(**call)
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            out: Generation = end.value
            break
        arrivals.setdefault(event.row, []).append((clock() - began, len(event.token_ids)))
    seconds, memory = clock() - began, peak_memory()
    first = min(times[0][0] for times in arrivals.values())
    gaps = [round(gap, 7) for times in arrivals.values() for gap in token_gaps(times)]
    return out, {"seconds": seconds, "first_token": first, "gaps": gaps, "memory": memory}


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between the tokens of one row, from the (time, count) of its events.

    Tokens of one event share the time since the last event. The first event counts only if it is the only one, as in
    searches.
    """
    if len(arrivals) == 1:
        (time, count), *_ = arrivals
        return [time / count] * count
    gaps = []
    for (before, _), (time, count) in pairwise(arrivals):
        gaps += [(time - before) / count] * count
    return gaps
