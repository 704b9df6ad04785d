"""ROUGE of summaries."""

from __future__ import annotations

import sys

import pytest

from specdec.errors import OptionError, SpecdecError
from specdec.pipelines import rouge


def test_rouge() -> None:
    """F1 by hand: of two words and three, two are shared; the mean is over texts."""
    found = rouge(["cats sleep"], ["the cat sleeps"])
    assert found == pytest.approx({"rouge1": 0.8, "rouge2": 2 / 3, "rougeL": 0.8, "rougeLsum": 0.8})
    assert rouge(["cats sleep", "dogs"], ["the cat sleeps", "birds"])["rouge1"] == pytest.approx(0.4)


def test_sentences_are_lines_of_rougelsum() -> None:
    """Sentences in another order are matched one by one, by rougeLsum alone."""
    found = rouge(["The dog ran. The cat sat."], ["The cat sat. The dog ran."])
    assert found["rougeLsum"] == 1.0
    assert found["rougeL"] < 1.0


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reference each, and the package that measures."""
    for summaries, references in ((["a"], []), (["a"], ["b", "c"]), ([], [])):
        with pytest.raises(OptionError, match=f"`references` must be one text for each of {len(summaries)} summaries"):
            rouge(summaries, references)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(SpecdecError, match=r"pip install -e '.\[summaries\]'"):
        rouge(["a"], ["a"])
