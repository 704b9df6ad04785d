"""Runs a suite: plain and assisted decoding in turn, texts compared, every sample saved as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from specdec.bench.machine import Watch, provenance
from specdec.bench.prompts import PromptText, batches, pick_prompts
from specdec.bench.samples import Difference, Key, Mismatch, Sample, Store, differences, fingerprint
from specdec.bench.suite import PLAIN, Cell, Group, Suite, digests, line_of
from specdec.bench.systems import Systems, measure
from specdec.errors import OptionError, SpecdecError
from specdec.generator.generation import Generation
from specdec.options.versions import versions

Notify = Callable[[int, int, str], None]

WARM_UP = 16  # new tokens of a warm-up call


@dataclass
class GroupRun:
    """A group, its prompts in batches, and where its records and progress go."""

    group: Group
    batches: Sequence[Sequence[PromptText]]
    store: Store
    report: Callable[[str], None]

    @property
    def size(self) -> int:
        """The number of samples of a complete run."""
        return (1 + len(self.group.cells)) * len(self.batches) * self.store.suite.repeats

    def is_finished(self) -> bool:
        """Whether all samples exist and all differences are explained."""
        return all(key in self.store.samples for key in self._keys()) and not any(self._unexplained())

    def run(self, systems: Systems, watch: Watch) -> None:
        """Measures the samples that are missing, and compares their texts."""
        cells = [None, *self.group.cells]
        alive = [cell for cell in cells if self._attempt(cell, partial(self._warm_up, systems, cell))]
        if None not in alive or (self.group.cells and alive == [None]):
            return  # nothing to compare
        for turn in range(len(self.batches) * self.store.suite.repeats):
            repeat, batch = divmod(turn, len(self.batches))
            first = turn % len(alive)
            for cell in alive[first:] + alive[:first]:
                self._attempt(cell, partial(self._sample, systems, watch, cell, batch, repeat))
        self._compare(systems)

    def _attempt(self, cell: Cell | None, action: Callable[[], None]) -> bool:
        """Runs `action` unless the system failed before; returns whether it succeeded, and notes the failure."""
        system, failures = (self.group.label, name_of(cell)), self.store.failures
        if system not in failures:
            try:
                action()
            except Exception as error:
                failures[system] = in_words(error)
        return system not in failures

    def _warm_up(self, systems: Systems, cell: Cell | None) -> None:
        """Makes short calls, of which the first loads the draft."""
        self.report(f"warming up: {name_of(cell)}")
        generator = systems.generator(self.group.label, cell)
        for _ in range(self.store.suite.warm_up):
            generator.generate(**self._call(cell, self.batches[0], most=WARM_UP))

    def _sample(self, systems: Systems, watch: Watch, cell: Cell | None, batch: int, repeat: int) -> None:
        key = Key(self.group.label, name_of(cell), batch, repeat)
        if key in self.store.samples:
            return
        self.report(f"{self.group.label}: {name_of(cell)}")
        prompts = self.batches[batch]
        if batch == 0:
            systems.forget(self.group.label, cell)
        generator = systems.generator(self.group.label, cell)
        watch.look()
        out, fields = measure(generator, self._call(cell, prompts))
        assert out.stats is not None
        sample = Sample(
            **vars(key),
            category=prompts[0].category,
            tokens=out.new_tokens(),
            stats=replace(out.stats, per_row=()),
            **fields,
            spin=watch.spins[-1],
        )
        self.store.add(sample)

    def _call(self, cell: Cell | None, prompts: Sequence[PromptText], most: int | None = None) -> dict[str, Any]:
        """The arguments of `generate`, with at most `most` new tokens."""
        options = self.store.suite.call(self.group.strategy, cell)
        if most is not None:
            options["max_new_tokens"] = min(most, options["max_new_tokens"])
        if self.group.prompts.chat:
            return {"messages": [[{"role": "user", "content": prompt.text}] for prompt in prompts], **options}
        return {"prompt": [prompt.text for prompt in prompts], **options}

    def _compare(self, systems: Systems) -> None:
        """Records the mismatches of each text that should equal plain decoding's and does not."""
        for key, row_differences in self._unexplained():
            out = systems.plain.generate(**self._call(None, self.batches[key.batch]), output_logits=True)
            for difference in row_differences:
                self.store.add(Mismatch(**vars(key), **difference._asdict(), gap=_gap(out, difference)))

    def _unexplained(self) -> Iterator[tuple[Key, list[Difference]]]:
        """Samples that should have plain decoding's text, with the differences from it that are not recorded yet."""
        recorded = {mismatch.key for mismatch in self.store.mismatches}
        for key in self._keys() if self.group.strategy.comparable else ():
            plain, assisted = self.store.samples.get(replace(key, system=PLAIN)), self.store.samples.get(key)
            if plain is None or assisted is None or key in recorded:
                continue
            if row_differences := list(differences(plain.tokens, assisted.tokens)):
                yield key, row_differences

    def _keys(self) -> Iterator[Key]:
        for cell in (None, *self.group.cells):
            for batch in range(len(self.batches)):
                for repeat in range(self.store.suite.repeats):
                    yield Key(self.group.label, name_of(cell), batch, repeat)


def _gap(out: Generation, at: Difference) -> float | None:
    """Best minus second-best logit at the position; None for a search, and where the plain text had ended."""
    if out.logits is None or at.plain is None or out.beam_indices is not None or out.sequences_scores is not None:
        return None
    best = out.logits[at.position][at.row].float().topk(2).values
    return float(best[0] - best[1])


def name_of(cell: Cell | None) -> str:
    return cell.label if cell is not None else PLAIN


def in_words(error: BaseException) -> str:
    """An error in one line, with its place in the code unless specdec raised it on purpose."""
    place = "" if isinstance(error, SpecdecError) else f" ({line_of(error)})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def run(suite: Suite, folder: Path, notify: Notify = lambda done, total, doing: None) -> Store:
    """Measures what `folder/samples.jsonl` lacks; calls `notify(done, total, doing)` before every step.

    A system that fails is noted and the other systems go on. Raises, before anything is loaded, OptionError for names
    without a model, prompts that cannot be read, and where the folder belongs to another configuration.
    """
    check_names(suite)
    prompts = [pick_prompts(p.source, p.count) for p in suite.prompts]
    texts = [[prompt.text for prompt in prompt_set] for prompt_set in prompts]
    place = {**versions(), "threads": torch.get_num_threads(), "imports": digests(suite.imports)}
    store, groups = Store(folder, suite, fingerprint(suite, texts, place)), list[GroupRun]()

    def report(doing: str) -> None:
        notify(len(store.samples), sum(group.size for group in groups), doing)

    for group in suite.groups():
        prompt_set = prompts[suite.prompts.index(group.prompts)]
        groups.append(GroupRun(group, batches(prompt_set, group.batch), store, report))
    if unfinished := [group for group in groups if not group.is_finished()]:
        store.begin(provenance())
        watch = Watch()
        for _, same_mode in groupby(unfinished, key=lambda g: (g.group.target, g.group.mode.label)):
            _measure(list(same_mode), watch)
    return store


def check_names(suite: Suite) -> None:
    """Raises OptionError for a target or draft that names no model, and LoadError where the hub cannot say."""
    for group in suite.groups():
        for name in (None, *dict.fromkeys(cell.name.model for cell in group.cells)):
            try:
                group.mode.check(group.target, name)
            except SpecdecError as error:
                if name is None or "/" in name:
                    raise
                way_out = f"pass `specdec bench --import` the module that registers the word ({error})"
                expected = "a registered word, a folder or an id of the hub"
                raise OptionError.of("drafts", expected, name, way_out) from error


def _measure(groups: Sequence[GroupRun], watch: Watch) -> None:
    """Measures groups of one target and mode."""
    target, mode = groups[0].group.target, groups[0].group.mode
    groups[0].report(f"loading {target}, {mode.label}")
    try:
        systems = Systems(target, mode)
    except Exception as error:
        for group in groups:
            group.store.failures[group.group.label, PLAIN] = in_words(error)
        return
    for group in groups:
        group.run(systems, watch)
