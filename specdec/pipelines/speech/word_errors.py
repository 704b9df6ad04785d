"""The word error rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.errors import OptionError, SpecdecError


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
