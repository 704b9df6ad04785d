"""Small trained pairs of the package, to try, test and measure it offline.

Pairs that the user made with the repository's recipes are in a cache folder; both kinds are named `zoo:NAME`.
"""

from __future__ import annotations

import json
import os
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


def cache() -> Path:
    """The folder of pairs that this user made: `specdec/zoo` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "specdec" / "zoo"


def folders() -> dict[str, Path]:
    """All pairs by name: those of the package, and the finished ones in the cache."""
    own = {name: _ROOT / name.replace("-", "_") for name in NAMES}
    made = {card.parent.name: card.parent for card in sorted(cache().glob("*/card.json")) if _card(card) is not None}
    return own | {name: folder for name, folder in made.items() if name not in own}


def _card(file: Path) -> dict[str, Any] | None:
    """A card's content; None for an incomplete file."""
    try:
        card = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) else None


def pair(name: str = "python-code") -> Pair:
    """The pair of this name; raises OptionError for an unknown name, SpecdecError for missing weights."""
    known = folders()
    if name not in known:
        raise OptionError.of("name", f"one of {', '.join(known)}", name)
    folder = known[name]
    if not (folder / "target" / "model.safetensors").exists():
        raise SpecdecError(f"the weights of {name!r} are not in {folder}: install the package with its data files")
    return Pair(name, folder / "target", folder / "draft", _card(folder / "card.json") or {})


def locate(name: str, role: str, argument: str | None = None) -> str:
    """The folder of the target or draft (`role`) of `zoo:NAME`; any other id or path unchanged.

    Raises OptionError for an unknown pair, about `argument`, by default the role.
    """
    if not name.startswith("zoo:"):
        return name
    own, known = name.removeprefix("zoo:"), folders()
    if own not in known:
        named = ", ".join(f"zoo:{pair}" for pair in known)
        raise OptionError.of(argument or role, f"a hub id, a folder or one of {named}", name)
    return str(getattr(pair(own), role))


def recordings() -> list[tuple[Path, str]]:
    """The package's recordings, wav files (16 kHz, mono, a few seconds each), and their transcripts."""
    folder = _ROOT / "speech" / "demo"
    if not (folder / "transcripts.json").exists():
        raise SpecdecError(f"the recordings are not in {folder}: install the package with its data files")
    return [(folder / name, text) for name, text in json.loads((folder / "transcripts.json").read_text()).items()]


def functions() -> dict[str, str]:
    """Python functions for the summary pair, by name."""
    found: dict[str, str] = json.loads((_ROOT / "python_summary" / "demo.json").read_text(encoding="utf-8"))
    return found
