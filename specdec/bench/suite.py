"""The matrix of a benchmark: targets, drafts, modes, strategies, schedules, prompts and batches; modules of the caller.

A *group* is one target, mode, strategy, prompt set and batch size; a *cell* of it is a draft with a schedule. Plain
decoding and the cells of a group are measured in turn.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from specdec.bench.parts import Count, Drafting, Mode, PromptSet, SuitePart, Target, as_list
from specdec.core.draft_schedules import SCHEDULES
from specdec.decoding import strategies
from specdec.errors import OptionError
from specdec.options.drafts import DraftName, read_draft
from specdec.options.fields import COPYING, SAMPLING
from specdec.options.resolve import read_yaml, resolve
from specdec.proposers import DRAFTS

PRESETS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sample": {"do_sample": True}}
PLAIN = "plain"  # the system without a draft


@dataclass(frozen=True)
class StrategyOptions:
    """Options of `generate`, the temperature that the suite set, and whether they take a draft (`drafts`)."""

    label: str
    options: Mapping[str, Any] = field(hash=False)
    temperature: float | None = None
    drafts: bool = True

    @property
    def comparable(self) -> bool:
        """Whether a draft must not change the text; sampling that looks at q keeps the distribution alone."""
        return not SAMPLING.get(self.options.get("sampling") or "", False)


@dataclass(frozen=True)
class Cell:
    """A draft with a schedule."""

    draft: str
    drafting: Drafting

    @property
    def label(self) -> str:
        return f"{self.draft}, {self.drafting.label}"

    @property
    def name(self) -> DraftName:
        """The parts of the draft's spelling."""
        return read_draft(self.draft, "drafts", DRAFTS)


@dataclass(frozen=True)
class Group:
    """One target, mode, strategy, prompt set and batch size, with the cells to compare."""

    target: str
    mode: Mode
    strategy: StrategyOptions
    prompts: PromptSet
    batch: int
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """A name that is unique in the suite."""
        strategy = self.strategy.label
        return " · ".join([self.target, self.mode.label, strategy, self.prompts.label, f"batch {self.batch}"])


def _under(key: str) -> BeforeValidator:
    """Reads a bare string as the part with this key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _spread(schedules: Any) -> Any:
    """One entry per length of a schedule."""
    entries: list[Any] = []
    for entry in as_list(schedules):
        lengths = entry.get("num_assistant_tokens") if isinstance(entry, Mapping) else None
        entries += [{**entry, "num_assistant_tokens": k} for k in lengths] if isinstance(lengths, list) else [entry]
    return entries


class Suite(BaseModel):
    """A benchmark; every list is one side of the matrix.

    `imports` are modules of the caller that register drafts, schedules or strategies, imported before the other keys
    are read. `options` go to every call of `generate`. A text may differ from plain decoding's where the target's two
    best logits are at most `near_tie` apart.
    """

    model_config = SuitePart.model_config

    name: str = "bench"
    imports: Annotated[list[str], BeforeValidator(as_list)] = []
    targets: Annotated[list[Annotated[Target, _under("target")]], BeforeValidator(as_list), Field(min_length=1)]
    drafts: Annotated[list[str], BeforeValidator(as_list)] = []
    modes: Annotated[list[Mode], Field(min_length=1)] = [Mode()]
    strategies: Annotated[list[str | dict[str, Any]], BeforeValidator(as_list), Field(min_length=1)] = ["greedy"]
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], BeforeValidator(as_list)] = []
    schedules: Annotated[
        list[Annotated[Drafting, _under("schedule")]], BeforeValidator(_spread), Field(min_length=1)
    ] = [Drafting(schedule="auto")]
    prompts: Annotated[list[Annotated[PromptSet, _under("source")]], BeforeValidator(as_list), Field(min_length=1)] = [
        PromptSet(source="code")
    ]
    batches: Annotated[list[Count], BeforeValidator(as_list), Field(min_length=1)] = [1]
    max_new_tokens: Count = 128
    options: dict[str, Any] = {}
    repeats: Count = 3
    warm_up: Annotated[int, Field(ge=0)] = 1
    seed: int = 0
    near_tie: Annotated[float, Field(ge=0)] = 0.0

    def groups(self) -> list[Group]:
        """The groups; groups of one target and mode stand in a row."""
        groups = []
        for target in self.targets:
            name = target.target
            default = self.drafts or [name if name.startswith("zoo:") else COPYING[0]]
            drafts = default if target.drafts is None else target.drafts
            cells = tuple(Cell(draft, drafting) for draft in drafts if draft != "none" for drafting in self.schedules)
            groups += [
                Group(name, mode, strategy, prompts, batch, cells if strategy.drafts else ())
                for mode in self.modes
                for strategy in self._strategies()
                for prompts in self.prompts
                for batch in self.batches
            ]
        return groups

    def call(self, strategy: StrategyOptions, cell: Cell | None = None) -> dict[str, Any]:
        """The options of one call of `generate`."""
        common = {"max_new_tokens": self.max_new_tokens, "seed": self.seed, **self.options}
        return {**common, **strategy.options, **(cell.drafting.options if cell else {})}

    def _strategies(self) -> Iterator[StrategyOptions]:
        for entry in self.strategies:
            name, options = _strategy(entry)
            if (draft := options.pop("draft", None)) not in (None, "none"):
                raise OptionError.of("draft", f"'none' in strategy {name!r}", draft, "name drafts in `drafts`")
            drafts = draft is None
            if not self.temperatures:
                yield StrategyOptions(name, options, drafts=drafts)
            elif "temperature" in options:
                raise OptionError(
                    f"strategy {name!r} sets its own `temperature`, and so do `temperatures`: pass one of them"
                )
            for temperature in self.temperatures:
                draws = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
                label = f"{'sampling' if name == 'greedy' and temperature else name}, temperature {temperature:g}"
                yield StrategyOptions(label, {**options, **draws}, temperature, drafts)


def _strategy(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a strategy: a preset, a YAML file of options, or a mapping with a `name`."""
    if isinstance(entry, str):
        if entry not in PRESETS and not Path(entry).exists():
            raise OptionError.of("strategies", f"{', '.join(PRESETS)} or a YAML file of options", entry)
        return Path(entry).stem, dict(PRESETS[entry] if entry in PRESETS else read_yaml(entry))
    options = dict(entry)
    label = options.pop("name", None) or ", ".join(f"{name} {value}" for name, value in options.items())
    return str(label), options


def read_suite(config: Mapping[str, Any]) -> Suite:
    """The suite of a config; raises OptionError for unknown keys, wrong values, contradictions and repetitions."""
    if isinstance(imports := config.get("imports"), str | list):
        import_modules([name for name in as_list(imports) if isinstance(name, str)])
    try:
        suite = Suite(**config)
    except ValidationError as error:
        # An entry may have several types: the deepest error is about the nearest of them.
        first = max(error.errors(), key=lambda e: len(e["loc"]))
        kinds = ("str", "int", "Mode")  # pydantic puts these between keys
        key = ".".join(str(part) for part in first["loc"] if part not in kinds and "[" not in str(part))
        if first["type"] == "extra_forbidden":
            raise OptionError(f"`{key}` is not a key of a benchmark") from None
        if first["type"] == "missing":
            raise OptionError(f"a benchmark needs `{key}`: add it") from None
        if isinstance(cause := first.get("ctx", {}).get("error"), OptionError):
            raise OptionError(f"`{key}`: {cause}") from None
        must = re.sub(r"^\w+ should ", "", first["msg"])
        raise OptionError(f"`{key}` must {must}, got {first['input']!r}") from None
    groups = suite.groups()
    for group in groups:
        for cell in group.cells or (None,):
            resolve(suite.call(group.strategy, cell))
            if cell is not None:
                read_draft(cell.draft, "drafts", DRAFTS)
    for labels in ([group.label for group in groups], *([cell.label for cell in group.cells] for group in groups)):
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise OptionError(f"{twice[0]!r} is in the benchmark twice: leave one out, or give the modes a `name`")
    return suite


def import_modules(names: Sequence[str]) -> None:
    """Imports modules, also from the working folder; raises OptionError for a module that cannot be imported."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        if name.endswith(".py") or "/" in name:
            raise OptionError.of("imports", "the name of a module", name, f"pass {Path(name).stem!r}, without its path")
        try:
            import_module(name)
        except Exception as error:
            is_absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            failure = f"its own code failed at {line_of(error)}"
            advice = "run the command in its folder, or install it" if is_absent else failure
            raise OptionError(
                f"`imports` (--import): module {name!r} cannot be imported ({type(error).__name__}: {error}): {advice}"
            ) from error


def line_of(error: BaseException) -> str:
    """The file and line where an error was raised, or of the syntax that cannot be read."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def digests(names: Sequence[str]) -> dict[str, str]:
    """Digests of the code of imported modules, and of modules that define drafts, schedules or strategies, by name.

    A module in a package has the digest of what is imported of its package. Other code makes other samples.
    """
    kinds = [*DRAFTS.values(), *SCHEDULES.values(), *strategies.STRATEGIES] if names else []
    roots = {name.partition(".")[0] for name in [*names, *(kind.__module__ for kind in kinds)]} - {"specdec"}
    hashes = {root: hashlib.sha256() for root in sorted(roots)}
    for name in sorted(name for name in sys.modules if name.partition(".")[0] in hashes):
        if (file := getattr(sys.modules[name], "__file__", None)) is not None:
            hashes[name.partition(".")[0]].update(Path(file).read_bytes())
    return {root: digest.hexdigest() for root, digest in hashes.items()}
