"""Runs a suite: plain and assisted decoding in turn, every sample kept as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from specdec.bench.extras import check_extras
from specdec.bench.group import GroupRun, in_words
from specdec.bench.machine import Watch, provenance
from specdec.bench.prompts import batches, read_prompts
from specdec.bench.samples import Failure, Run, Store, fingerprint
from specdec.bench.suite import PLAIN, Group, Suite
from specdec.bench.systems import Systems
from specdec.options.versions import versions

Notify = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: the records of this suite, and the systems that could not be measured."""

    suite: Suite
    store: Store
    failures: list[Failure]
    fingerprint: str


def run(suite: Suite, folder: Path, notify: Notify = lambda done, total, doing: None) -> Outcome:
    """Measures whatever `folder/samples.jsonl` does not hold yet; `notify(done, total, doing)` hears of every step.

    A system that fails is noted and the others go on. Raises SpecdecError where a library is missing, OptionError for
    prompts that cannot be read, and where the folder belongs to another configuration.
    """
    check_extras()
    prompts = [read_prompts(p.source, p.count) for p in suite.prompts]
    texts = [[prompt.text for prompt in found] for found in prompts]
    mark = fingerprint(suite.model_dump(mode="json"), texts, {**versions(), "threads": torch.get_num_threads()})
    work = _Work(suite, Store(folder, mark), notify)
    for group in suite.groups():
        of_group = batches(prompts[suite.prompts.index(group.prompts)], group.batch)
        work.groups.append(GroupRun(suite, group, of_group, work.store, work.failures, work.tell))
    work.run()
    return Outcome(suite, work.store, work.failures, mark)


@dataclass
class _Work:
    """A suite at work."""

    suite: Suite
    store: Store
    notify: Notify
    groups: list[GroupRun] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def run(self) -> None:
        """All groups that are not finished, those of one target and mode together."""
        unfinished = [group for group in self.groups if not group.is_finished()]
        if not unfinished:
            return
        self.store.add(Run(provenance()))
        watch = Watch()
        for _, some in groupby(unfinished, key=lambda g: (g.group.target, g.group.mode.label)):
            self._measure(list(some), watch)

    def _measure(self, groups: Sequence[GroupRun], watch: Watch) -> None:
        """All groups of one target and mode."""
        first: Group = groups[0].group
        self.tell(f"loading {first.target}, {first.mode.label}")
        try:
            systems = Systems(first.target, first.mode)
        except Exception as error:
            self.failures += [Failure(g.group.label, PLAIN, in_words(error)) for g in groups]
            return
        for group in groups:
            group.run(systems, watch)

    def tell(self, doing: str) -> None:
        """Passes on what happens now, and how much of the whole is done."""
        self.notify(len(self.store.samples), sum(group.size for group in self.groups), doing)
