"""Runs a suite: plain and assisted decoding in turn, every sample kept as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch

from specdec.bench.group import GroupRun, in_words
from specdec.bench.imports import digests
from specdec.bench.machine import Watch, provenance
from specdec.bench.prompts import batches, read_prompts
from specdec.bench.samples import Failure, Run, Store, fingerprint
from specdec.bench.suite import PLAIN, Suite
from specdec.bench.systems import Systems
from specdec.errors import SpecdecError
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
    """Measures what `folder/samples.jsonl` lacks, and calls `notify(done, total, doing)` before every step.

    A system that fails is noted and the others go on. Raises SpecdecError where a library is missing, OptionError for
    prompts that cannot be read, and where the folder belongs to another configuration.
    """
    check_extras()
    prompts = [read_prompts(p.source, p.count) for p in suite.prompts]
    texts = [[prompt.text for prompt in found] for found in prompts]
    place = {**versions(), "threads": torch.get_num_threads(), "imports": digests(suite.imports)}
    mark = fingerprint(suite.model_dump(mode="json"), texts, place)
    store, failures, groups = Store(folder, mark), list[Failure](), list[GroupRun]()

    def report(doing: str) -> None:
        notify(len(store.samples), sum(group.size for group in groups), doing)

    for group in suite.groups():
        of_group = batches(prompts[suite.prompts.index(group.prompts)], group.batch)
        groups.append(GroupRun(suite, group, of_group, store, failures, report))
    if unfinished := [group for group in groups if not group.is_finished()]:
        store.add(Run(provenance()))
        watch = Watch()
        for _, some in groupby(unfinished, key=lambda g: (g.group.target, g.group.mode.label)):
            _measure(list(some), watch)
    return Outcome(suite, store, failures, mark)


def check_extras() -> None:
    """Raises SpecdecError where a library is missing that the statistics or the report need."""
    if missing := [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]:
        raise SpecdecError(f"the benchmark needs {', '.join(missing)}: pip install -e '.[bench]'")


def _measure(groups: Sequence[GroupRun], watch: Watch) -> None:
    """All groups of one target and mode."""
    target, mode = groups[0].group.target, groups[0].group.mode
    groups[0].report(f"loading {target}, {mode.label}")
    try:
        systems = Systems(target, mode)
    except Exception as error:
        groups[0].failures += [Failure(group.group.label, PLAIN, in_words(error)) for group in groups]
        return
    for group in groups:
        group.run(systems, watch)
