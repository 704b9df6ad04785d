"""docs/guides/tools.md: its Python runs as printed."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "tools.md"


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs() -> None:
    """One block after the other, with the pair of the package."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
            exec(block, names)
    length, _, text = printed.getvalue().partition("\n")
    assert float(length) > 1.5
    assert text.startswith("def mean(values):")
