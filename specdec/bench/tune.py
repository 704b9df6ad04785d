"""The best schedule of one pair, or none, as a configuration for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.bench.results import Results
from specdec.bench.suite import Suite, read_suite
from specdec.core.draft_schedules import SCHEDULES
from specdec.proposers import COPYING, is_word

LENGTHS = (1, 2, 3, 5, 8, 12)  # tokens of the constant schedules
ADAPTIVE = tuple(name for name in SCHEDULES if name != "constant")


def candidates(target: str, draft: str, given: Mapping[str, Any], lengths: Sequence[int] = LENGTHS) -> Suite:
    """A benchmark of all schedules of a pair; `given` are further keys of a suite."""
    constant = {"schedule": "constant", "num_assistant_tokens": list(lengths)}
    common = {"name": "tune", "prompts": [{"source": "code", "count": 6}], "max_new_tokens": 64}
    return read_suite({**common, **given, "targets": target, "drafts": draft, "schedules": [constant, *ADAPTIVE]})


def ranked(found: Results) -> list[Results]:
    """All systems, plain decoding included, the fastest first."""
    (group,) = found["groups"]
    return sorted(group["systems"], key=lambda system: float(system["ms_per_token"]))


def best(found: Results) -> Results:
    """The fastest system that is clearly faster than plain decoding, or plain decoding."""
    systems = ranked(found)
    (plain,) = (system for system in systems if system["speedup"] is None)
    faster = [system for system in systems if system["speedup"] and system["speedup"]["state"] == "faster"]
    return faster[0] if faster else plain


def snippet(target: str, system: Results) -> dict[str, Any]:
    """The keys of a `--config` file for this system."""
    if system["draft"] is None:
        return {"target": target, "method": "none"}
    text, _, model = system["draft"].rpartition("+")
    if is_word(model):
        return {"target": target, "method": model, **system["schedule"]}
    method = "draft" if not text else "hybrid" if text == COPYING[0] else f"hybrid:{text}"
    return {"target": target, "draft": model, "method": method, **system["schedule"]}
