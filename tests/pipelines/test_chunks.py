"""Long text in pieces: whole sentences, within the limit, nothing lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import OptionError
from specdec.pipelines.summaries.chunks import cut_text, sentences, whole_sentences

SPLITS = [
    ("One. Two! Three? Four", ["One. ", "Two! ", "Three? ", "Four"]),
    ("Dr. Smith met J. R. Smith. He left.", ["Dr. Smith met J. R. Smith. ", "He left."]),
    ("Fruit, e.g. apples, cost 3.14 euros. Cheap.", ["Fruit, e.g. apples, cost 3.14 euros. ", "Cheap."]),
    ("The U.S. Army (cf. Fig. 3) came. It saw.", ["The U.S. Army (cf. Fig. 3) came. ", "It saw."]),
    ('He said "Stop." Then (at last!) it did.', ['He said "Stop." ', "Then (at last!) ", "it did."]),
    ("Wait... what? Yes.", ["Wait... what? ", "Yes."]),
    ("版本一。版本二！好", ["版本一。", "版本二！", "好"]),
    ("A title\n\nA body that\nis wrapped. End", ["A title\n\n", "A body that\nis wrapped. ", "End"]),
    ("Cut vs.\n\nNext", ["Cut vs.\n\n", "Next"]),
    ("no marks at all", ["no marks at all"]),
    ("", []),
]


def letters(texts: Sequence[str]) -> list[int]:
    """A token per character and two around each text."""
    return [len(text) + 2 for text in texts]


ENDS = [
    ("It sat. It was wa", "It sat."), ("It sat. It slept.", "It sat. It slept."),
    ('He said "stop."', 'He said "stop."'), ("Two points.\n\n- one\n- two\n- thr", "Two points.\n\n- one\n- two"),
    ("`logprobs`, `logit_bias", "`logprobs`, `logit_bias"), ("", ""),
    ("It sat. **It slept.**", "It sat. **It slept.**"), ("**It sat.** It was wa", "**It sat.**"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), ENDS)
def test_whole_sentences(text: str, expected: str) -> None:
    """What a limit cut ends with its last sentence or line, if it has one. (Parts were merged with half words.)"""
    assert whole_sentences(text) == expected


@pytest.mark.parametrize(("text", "expected"), SPLITS)
def test_sentences(text: str, expected: list[str]) -> None:
    """Marks end sentences; abbreviations, initials, numbers and wrapped lines do not."""
    assert sentences(text) == expected


@given(st.text(alphabet="aB.!? \n。\"'é\U0001f600", max_size=80), st.integers(4, 40), st.booleans())
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_and_everything_fits(text: str, limit: int, even: bool) -> None:
    """Sentences are the text again; pieces have all its words in order, each within the limit."""
    assert "".join(sentences(text)) == text
    pieces = cut_text(text, limit, letters, even=even)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert max(letters(pieces)) <= limit
    assert all(pieces) or not text.strip()


def test_sentences_stay_whole() -> None:
    """Every piece ends with a sentence, and there are no more pieces than filling one after the other needs."""
    text = " ".join(f"This is the sentence with number {i}." for i in range(40))
    for limit in (60, 100, 333):
        filled, even = (cut_text(text, limit, letters, even=even) for even in (False, True))
        assert all(piece.endswith(".") and piece.startswith("This") for piece in filled + even)
        assert len(filled) == len(even) > 1
        assert max(map(len, even)) - min(map(len, even)) <= max(map(len, filled)) - min(map(len, filled))


def test_the_last_piece_is_no_scrap() -> None:
    """Seven sentences where six fit are three and four, unless the first piece is to be filled."""
    text = " ".join(["Abcdefgh."] * 7)
    assert [piece.count(".") for piece in cut_text(text, 62, letters)] == [3, 4]
    assert [piece.count(".") for piece in cut_text(text, 62, letters, even=False)] == [6, 1]


def test_a_sentence_that_is_too_long() -> None:
    """It is cut at spaces, its neighbours are not; a word that is too long is cut inside."""
    long = " ".join(["word"] * 30) + "."
    pieces = cut_text(f"Before it. {long} After it.", 50, letters)
    assert set(" ".join(pieces).replace(".", "").split()) == {"Before", "it", "word", "After"}
    assert "".join(cut_text("x" * 1000, 50, letters)) == "x" * 1000


def test_pieces_that_are_longer_together() -> None:
    """Where two sentences make more tokens than each alone, the pieces shrink until they fit."""

    def dear(texts: Sequence[str]) -> list[int]:
        return [len(text) + 5 * text.count(". ") for text in texts]

    text = " ".join(["abcd."] * 50)
    pieces = cut_text(text, 40, lambda all_: [n - 5 * t.endswith(" ") for n, t in zip(dear(all_), all_, strict=True)])
    assert max(dear(pieces)) <= 40
    assert " ".join(pieces) == text


def test_no_room() -> None:
    """What is put around a text may leave no room, or less than a character takes."""
    with pytest.raises(OptionError, match="5 tokens leave no room for text, since the template takes 6"):
        cut_text("some text", 5, lambda texts: [len(t) + 6 for t in texts])
    with pytest.raises(OptionError, match="a single character takes 4"):
        cut_text("\U0001f600\U0001f600", 3, lambda texts: [len(t.encode()) for t in texts])
