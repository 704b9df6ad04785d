"""Small trained pairs that come with the package, so that it can be tried, tested and measured offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import OptionError, SpecdecError

_ROOT = Path(__file__).parent
NAMES = ("python-code", "speech", "python-summary")


@dataclass(frozen=True)
class Pair:
    """A target and its draft, as folders that `from_pretrained` reads; `card` records how good they are."""

    name: str
    target: Path
    draft: Path
    card: dict[str, Any]


def pair(name: str = "python-code") -> Pair:
    """The pair of this name; raises OptionError for an unknown one, SpecdecError where the weights are missing."""
    if name not in NAMES:
        raise OptionError.of("name", f"one of {', '.join(NAMES)}", name)
    folder = _ROOT / name.replace("-", "_")
    if not (folder / "target" / "model.safetensors").exists():
        raise SpecdecError(f"the weights of {name!r} are not in {folder}: install the package with its data files")
    return Pair(name, folder / "target", folder / "draft", json.loads((folder / "card.json").read_text()))


def locate(name: str, role: str, argument: str | None = None) -> str:
    """The folder of `zoo:NAME`'s target or draft (`role`); any other id or path as it is.

    Raises OptionError about `argument` (the role, by default) for a pair that does not exist.
    """
    if not name.startswith("zoo:"):
        return name
    own = name.removeprefix("zoo:")
    if own not in NAMES:
        known = ", ".join(f"zoo:{known}" for known in NAMES)
        raise OptionError.of(argument or role, f"a hub id, a folder or one of {known}", name)
    return str(getattr(pair(own), role))


def recordings() -> list[tuple[Path, str]]:
    """Speech that comes with the package: wav files (16 kHz, mono, a few seconds each) and what they say."""
    folder = _ROOT / "speech" / "demo"
    if not (folder / "transcripts.json").exists():
        raise SpecdecError(f"the recordings are not in {folder}: install the package with its data files")
    return [(folder / name, text) for name, text in json.loads((folder / "transcripts.json").read_text()).items()]
