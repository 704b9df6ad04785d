"""Small trained pairs of the package, to try, test and measure it offline; they are named `zoo:NAME`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import OptionError, SpecdecError

_ROOT = Path(__file__).parents[1] / "zoo"
NAMES = ("python-code", "speech", "python-summary")


@dataclass(frozen=True)
class Pair:
    """A target and its draft, as folders for `from_pretrained`; `card` holds their measured quality."""

    name: str
    target: Path
    draft: Path
    card: dict[str, Any]


def pair(name: str = "python-code") -> Pair:
    """The pair of this name; raises OptionError for an unknown name, SpecdecError for missing weights."""
    if name not in NAMES:
        raise OptionError.of("name", f"one of {', '.join(NAMES)}", name)
    folder = _ROOT / name.replace("-", "_")
    if not (folder / "target" / "model.safetensors").exists():
        raise SpecdecError(f"the weights of {name!r} are not in {folder}: install the package with its data files")
    return Pair(name, folder / "target", folder / "draft", json.loads((folder / "card.json").read_text("utf-8")))


def locate(name: str, role: str, argument: str | None = None) -> str:
    """The folder of the target or draft (`role`) of `zoo:NAME`; any other id or path unchanged.

    Raises OptionError for an unknown pair, about `argument`, by default the role.
    """
    if not name.startswith("zoo:"):
        return name
    word = name.removeprefix("zoo:")
    if word not in NAMES:
        names = ", ".join(f"zoo:{pair}" for pair in NAMES)
        raise OptionError.of(argument or role, f"a hub id, a folder or one of {names}", name)
    return str(getattr(pair(word), role))


def recordings() -> list[tuple[Path, str]]:
    """The package's recordings, wav files (16 kHz, mono, a few seconds each), and their transcripts."""
    folder = _ROOT / "speech" / "demo"
    if not (folder / "transcripts.json").exists():
        raise SpecdecError(f"the recordings are not in {folder}: install the package with its data files")
    return [(folder / name, text) for name, text in json.loads((folder / "transcripts.json").read_text()).items()]


def functions() -> dict[str, str]:
    """Python functions for the summary pair, by name."""
    sources: dict[str, str] = json.loads((_ROOT / "python_summary" / "demo.json").read_text(encoding="utf-8"))
    return sources
