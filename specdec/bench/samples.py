"""Every measured call, kept as one line of `samples.jsonl` as soon as it ended, so that a killed run can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import OptionError, SpecdecError
from specdec.options import bundled_models


class Key(NamedTuple):
    """Which call this is: its group, its system (a cell, or plain), the number of its batch, and the repetition."""

    group: str
    system: str
    batch: int
    repeat: int


@dataclass(frozen=True)
class _Call:
    """What belongs to one call."""

    group: str
    system: str
    batch: int
    repeat: int

    @property
    def key(self) -> Key:
        """Which call it is."""
        return Key(self.group, self.system, self.batch, self.repeat)


@dataclass(frozen=True)
class Sample(_Call):
    """One measured call.

    `tokens` are the new ids of every row. `first_token` and `seconds` are seconds from the call on; `gaps` are those
    between tokens as they arrived, of all rows; the tokens of one round share its time. `memory` is the peak in bytes,
    `spin` the seconds of a fixed piece of work just before, `exactness` what a draft can change of the text (`Stats`),
    `backend` what the target's passes ran on, and `draft_backend` those of the draft, None where it has no model.
    """

    category: str
    tokens: list[list[int]]
    seconds: float
    first_token: float
    gaps: list[float]
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    passes: int
    weight_passes: float
    drafted: list[int]
    accepted: list[int]
    memory: int | None
    spin: float
    exactness: str
    backend: str
    draft_backend: str | None

    @property
    def count(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True)
class Mismatch(_Call):
    """Where the text of a row parts from plain decoding's: the new token's position, and what each wrote (None: end).

    `gap` is the difference of the target's two best logits there; None for searches, which weigh whole texts.
    """

    row: int
    position: int
    plain: int | None
    other: int | None
    gap: float | None


@dataclass(frozen=True)
class Failure:
    """A system that could not be measured, and why; tried again in the next run."""

    group: str
    system: str
    error: str


@dataclass(frozen=True)
class Strip:
    """One text, round by round: the pieces that it kept, how many were the draft's, and what was drafted in vain."""

    group: str
    system: str
    prompt: str
    rounds: list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One start of the benchmark: when, where, with which versions."""

    provenance: dict[str, Any]


Record = Sample | Mismatch | Strip | Run
_KINDS: dict[str, type[Record]] = {kind.__name__.lower(): kind for kind in (Sample, Mismatch, Strip, Run)}


_ANEW = "choose another --out, or pass --restart to begin anew"


class Store:
    """The records of one configuration in a folder; `add` appends a line, and opening reads what is there.

    Raises OptionError where the folder holds samples of another configuration, or of none, or cannot be written to.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._file = folder / "samples.jsonl"
        self.samples: dict[Key, Sample] = {}
        self.mismatches: list[Mismatch] = []
        self.strips: list[Strip] = []
        self.runs: list[Run] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            whole = self._whole_lines()
            if not whole:
                self._append({"kind": "benchmark", "fingerprint": fingerprint})
        except OSError as error:
            raise OptionError.of("out", "a folder that can be written to", str(folder), str(error)) from None
        if whole and whole[0] != {"kind": "benchmark", "fingerprint": fingerprint}:
            raise OptionError(f"{self._file} belongs to another configuration, other models or other versions: {_ANEW}")
        for line in whole[1:]:
            kind = _KINDS[line.pop("kind")]
            self._keep(kind(**line))

    def add(self, record: Record) -> None:
        """Keeps a record, in memory and on disk."""
        self._append({"kind": type(record).__name__.lower(), **asdict(record)})
        self._keep(record)

    def explained(self, key: Key) -> bool:
        """Whether the difference of this sample has been looked into."""
        return any(mismatch.key == key for mismatch in self.mismatches)

    def of(self, group: str, system: str) -> list[Sample]:
        """All samples of one system, in the order of their batches and repetitions."""
        found = [s for s in self.samples.values() if (s.group, s.system) == (group, system)]
        return sorted(found, key=lambda s: (s.batch, s.repeat))

    def _keep(self, record: Record) -> None:
        match record:
            case Sample():
                self.samples[record.key] = record
            case Mismatch():
                self.mismatches.append(record)
            case Strip():
                self.strips.append(record)
            case Run():
                self.runs.append(record)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The lines of earlier runs; a last one that a kill cut short is dropped."""
        if not self._file.exists():
            return []
        whole, newline, _ = self._file.read_bytes().rpartition(b"\n")
        with self._file.open("r+b") as file:
            file.truncate(len(whole) + len(newline))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise OptionError(f"{self._file} is damaged, or no record of a benchmark ({error}): {_ANEW}") from None


def fingerprint(suite: Mapping[str, Any], prompts: Sequence[Any], place: Mapping[str, Any]) -> str:
    """A hash of all that decides what is measured: suite, prompts, versions and threads, the files of local models."""
    folders = [folder for name, role in _models(suite) if (folder := _folder(name, role)) is not None]
    models = {str(folder): _files(folder) for folder in folders}
    whole = json.dumps([suite, prompts, place, models], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()) if f.is_file()]


def _folder(name: str, role: str) -> Path | None:
    """Where a model's files are; None for hub ids, text drafts, and pairs that there are not."""
    with suppress(SpecdecError):
        folder = Path(bundled_models.locate(name, role))
        return folder if name and folder.is_dir() else None
    return None


def _models(suite: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every target and draft of a suite, and which it is; `suffix+MODEL` is about the model, SYNTHETIC about `like`."""
    drafts = list(suite["drafts"])
    for target in suite["targets"]:
        yield (target["target"] if isinstance(target, Mapping) else target), "target"
        drafts += target["drafts"] if isinstance(target, Mapping) else [target]  # a pair is its own draft
    for draft in drafts:
        yield (draft["like"] if isinstance(draft, Mapping) else draft).rpartition("+")[2], "draft"
