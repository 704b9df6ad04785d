"""The README's own draft works as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specdec import SpecGenerator
from tests.tiny import tiny

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_draft_of_your_own() -> None:
    """The example class drafts, is sometimes right, and leaves the text alone."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "class LastTime" in b)
    names: dict[str, Any] = {}
    exec(block.split("\ngen = ")[0], names)
    model = tiny("llama")
    options = {"max_new_tokens": 60, "eos_token_id": [], "pad_token_id": 0}
    plain = SpecGenerator(model).generate([[5, 9, 12, 5, 9]], **options)
    out = SpecGenerator(model, names["LastTime"]()).generate([[5, 9, 12, 5, 9]], **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.num_draft_tokens > 0
