"""Texts against references: ROUGE, how much of their wording a summary has, and the word error rate of speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from specdec.errors import OptionError, SpecdecError
from specdec.pipelines.summaries.chunks import sentences

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE F1 of summaries against one reference each, stemmed, by the package rouge-score (Lin 2004).

    It reads only the letters a to z and digits: other scripts score 0. Raises OptionError for another number of
    references, SpecdecError without rouge-score.
    """
    if len(summaries) != len(references) or not references:
        raise OptionError.of("references", f"one text for each of {len(summaries)} summaries", len(references))
    score = scorer().score
    scores = [score(_lines(r), _lines(s)) for s, r in zip(summaries, references, strict=True)]
    return {kind: mean(found[kind].fmeasure for found in scores) for kind in KINDS}


def scorer() -> Any:
    """The scorer; raises SpecdecError without rouge-score."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise SpecdecError("ROUGE needs rouge-score: pip install -e '.[summaries]'") from None
    return RougeScorer(KINDS, use_stemmer=True)


def _lines(text: str) -> str:
    """The text with one sentence per line, as rougeLsum needs it."""
    return "\n".join(" ".join(sentence.split()) for sentence in sentences(text))


def error_rate(texts: Sequence[str], references: Sequence[str], normalize: Callable[[str], str]) -> float:
    """Word errors (wrong, missing, added) of all texts per word of their references, both normalised, by jiwer.

    Raises OptionError for another number of references and for one without words, SpecdecError without jiwer.
    """
    if len(texts) != len(references) or not references:
        raise OptionError.of("references", f"one text for each of {len(texts)} transcriptions", len(references))
    try:
        from jiwer import wer
    except ImportError:
        raise SpecdecError("a word error rate needs jiwer: pip install -e '.[audio]'") from None
    expected = [normalize(reference) for reference in references]
    if not all(text.strip() for text in expected):
        raise OptionError("a reference has no words: leave that recording out")
    return float(wer(expected, [normalize(text) for text in texts]))
