"""Records of measured calls: lines of `samples.jsonl`, written when a call ends, so that a killed run can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from specdec.bench.suite import Suite
from specdec.core.stats import Stats
from specdec.errors import OptionError, SpecdecError
from specdec.options import bundled_models
from specdec.options.line_files import whole_lines


@dataclass(frozen=True)
class Key:
    """A call's group, system (a cell's label, or plain), number of its batch, and repetition."""

    group: str
    system: str
    batch: int
    repeat: int

    @property
    def key(self) -> Key:
        """The call of this record."""
        return Key(self.group, self.system, self.batch, self.repeat)


@dataclass(frozen=True)
class Sample(Key):
    """One measured call.

    `tokens`: new ids by row. `first_token`, `seconds`: since the start of the call. `gaps`: seconds between the tokens
    of each row, where tokens of one round share its time. `memory`: the peak in bytes. `spin`: seconds of a fixed piece
    of work just before.
    """

    category: str
    tokens: list[list[int]]
    stats: Stats
    seconds: float
    first_token: float
    gaps: list[float]
    memory: int | None
    spin: float

    @property
    def count(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))


class Difference(NamedTuple):
    """The first new position at which two rows differ, and the rows' tokens there; None past a row's end."""

    row: int
    position: int
    plain: int | None
    other: int | None


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Iterator[Difference]:
    """One difference for each row of new ids that differs."""
    for row, tokens in enumerate(zip(plain, other, strict=True)):
        for position, (a, b) in enumerate(zip_longest(*tokens)):
            if a != b:
                yield Difference(row, position, a, b)
                break


@dataclass(frozen=True)
class Mismatch(Key):
    """A `Difference` from plain decoding.

    `gap` is the difference of the target's two best logits there; None for searches, which weigh whole texts, and past
    the plain text's end.
    """

    row: int
    position: int
    plain: int | None
    other: int | None
    gap: float | None


_ANEW = "choose another --out, or pass --restart to begin anew"


class Store:
    """The records of a suite: reads the folder's records, and appends a line for each new one.

    `failures`: why a system of a group could not be measured; the next run tries again.
    Raises OptionError for a folder that cannot be written to, or whose samples belong to another configuration.
    """

    def __init__(self, folder: Path, suite: Suite, fingerprint: str) -> None:
        self._file = folder / "samples.jsonl"
        self.suite, self.fingerprint = suite, fingerprint
        self.samples: dict[Key, Sample] = {}
        self.mismatches: list[Mismatch] = []
        self.runs: list[dict[str, Any]] = []
        self.failures: dict[tuple[str, str], str] = {}
        first = {"kind": "benchmark", "fingerprint": fingerprint}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                records = [json.loads(line) for line in whole_lines(file)]
            if not records:
                self._append(first)
        except OSError as error:
            raise OptionError.of("out", "a folder that can be written to", str(folder), str(error)) from None
        except ValueError as error:
            raise OptionError(f"{self._file} is damaged, or no record of a benchmark ({error}): {_ANEW}") from None
        if records and records[0] != first:
            raise OptionError(f"{self._file} belongs to another configuration, other models or other versions: {_ANEW}")
        for fields in records[1:]:
            kind = fields.pop("kind")
            if kind == "sample":
                self._keep(Sample(**{**fields, "stats": Stats(**fields["stats"])}))
            elif kind == "mismatch":
                self._keep(Mismatch(**fields))
            else:
                self.runs.append(fields["provenance"])

    def begin(self, provenance: dict[str, Any]) -> None:
        """Adds a start of the benchmark (see `machine.provenance`)."""
        self._append({"kind": "run", "provenance": provenance})
        self.runs.append(provenance)

    def add(self, record: Sample | Mismatch) -> None:
        """Adds a record, in memory and on disk."""
        self._append({"kind": type(record).__name__.lower(), **asdict(record)})
        self._keep(record)

    def of(self, group: str, system: str) -> list[Sample]:
        """The samples of one system, by batch and repetition."""
        samples = [s for s in self.samples.values() if (s.group, s.system) == (group, system)]
        return sorted(samples, key=lambda s: (s.batch, s.repeat))

    def _keep(self, record: Sample | Mismatch) -> None:
        if isinstance(record, Sample):
            self.samples[record.key] = record
        else:
            self.mismatches.append(record)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def fingerprint(suite: Suite, prompts: Sequence[Any], place: Mapping[str, Any]) -> str:
    """A hash of the configuration: suite, prompts, versions and threads, files of local models, fields of samples."""
    names, models = {(group.target, "target") for group in suite.groups()}, {}
    names |= {(cell.name.model or "", "draft") for group in suite.groups() for cell in group.cells}
    for name, role in names:
        with suppress(SpecdecError):  # an unknown pair has no files
            folder = Path(bundled_models.locate(name, role))
            if name and folder.is_dir():
                files = [(f.name, f.stat()) for f in sorted(folder.iterdir()) if f.is_file()]
                models[str(folder)] = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in files]
    parts = [suite.model_dump(mode="json"), prompts, place, models, list(Sample.__dataclass_fields__)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
