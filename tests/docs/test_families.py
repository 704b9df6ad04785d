"""Every generative class of transformers writes what `model.generate` writes, or is refused in words."""

import re

import pytest
import transformers

from docs.make import families
from tests.families import mapped, verdicts

pytestmark = pytest.mark.filterwarnings("ignore")  # missing kernels, odd configs

PAGE = families.PAGE.read_text(encoding="utf-8")
MADE_WITH = "5.23.0"  # transformers' release that the page speaks of
QUICK = ["ApertusForCausalLM", "Speech2TextForConditionalGeneration"]


def test_the_page_lists_every_class() -> None:
    """Also those that transformers' mappings for text name, and no line is a mistake."""
    lines = families.lines_of(PAGE)
    assert mapped() <= lines.keys() or transformers.__version__ != MADE_WITH
    assert not [name for name, line in lines.items() if re.search(r"(^|\| )(differs|fails): ", line)]


@pytest.mark.parametrize("name", QUICK)
def test_a_class_is_what_the_page_says(name: str) -> None:
    """One with an encoder and one without, in seconds."""
    made = families.lines({name: verdicts(getattr(transformers, name))})
    assert made[name] == families.lines_of(PAGE)[name]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_class_is_equal_or_refused() -> None:
    """`python -m docs.make.families` would change nothing, and no call ends in another text or in Python's words."""
    found = families.all_tried()
    wrong = {name for name, by in found.items() if {one.kind for one in by.values()} & {"differs", "fails"}}
    assert not wrong, {name: found[name] for name in wrong}
    if transformers.__version__ == MADE_WITH:
        assert families.with_table(PAGE, families.lines(found)) == PAGE, "run python -m docs.make.families"
