"""Batches and servers on a Ray cluster; Ray is imported on first use."""

from __future__ import annotations

import logging
import os
from typing import Any

from specdec.errors import OptionError, SpecdecError


def ray_module() -> Any:
    """The module; raises SpecdecError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError:
        raise SpecdecError("Ray is not installed: pip install -e '.[ray]'") from None
    return ray


def connect(address: str) -> None:
    """Connects to the cluster at `address` ("auto": this machine's; "local": a new one on this machine)."""
    ray = ray_module()
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level="error", **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError.of("ray", "the address of a cluster, auto or local", address, str(error)) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


def between(name: str, text: str, expected: str) -> tuple[int, int]:
    """(1, 4) for "1-4", (4, 4) for "4"; raises an OptionError about `name` for anything else."""
    least, _, most = text.partition("-")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise OptionError.of(name, expected, text)
    return int(least), int(most)
