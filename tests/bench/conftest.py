"""A benchmark of a moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import read_suite, results, run


@pytest.fixture
def keys(folders: tuple[str, str], tmp_path: Path) -> dict[str, Any]:
    """Two prompts, two drafts, twice."""
    (tmp_path / "p.txt").write_text("abab\n\nxyzxyz")
    constant = {"schedule": "constant", "num_assistant_tokens": 2}
    shared = {"prompts": str(tmp_path / "p.txt"), "max_new_tokens": 6, "repeats": 2, "schedules": [constant]}
    return {"targets": folders[0], "drafts": [folders[1], "suffix"], "options": {"eos_token_id": []}, **shared}


@pytest.fixture
def measured(keys: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    """The results of that benchmark with other keys."""
    return lambda **others: results(run(read_suite({**keys, **others}), tmp_path / "out"))
