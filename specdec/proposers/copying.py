"""Drafts that copy from the text: an index of the text per sequence, and learned confidence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Proposer, SequenceView
from specdec.core.tree import Tree
from specdec.proposers.chains import chain_per_leaf, cut, known_tokens

SEPARATOR = -1
"""Separates texts in one index; no text contains it, and guesses are cut before it."""

_NUM_BINS = 8
_FORGET_AFTER = 256
_PROMPT_END = 16  # tokens of the prompt that are indexed again before a prediction


class Index(Protocol):
    """A growing text that is searched for earlier occurrences of its end."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`."""

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens that may follow text + `tail`, and the length of the match before them."""


class Calibration:
    """The share of right guesses by length of the match, learned from the emitted tokens.

    Bins double in length; each is shrunk towards the overall rate, which starts at one half. Old counts fade.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * _NUM_BINS
        self._tested = [0.0] * _NUM_BINS

    def rates(self, match: int, count: int) -> list[float]:
        """The probability of each of `count` guesses after `match` matched tokens, if those before it are right."""
        pooled = (sum(self._hits) + 1.0) / (sum(self._tested) + 2.0)
        by_bin = [(h + 2.0 * pooled) / (n + 2.0) for h, n in zip(self._hits, self._tested, strict=True)]
        return [by_bin[_bin(match + depth)] for depth in range(count)]

    def learn(self, guess: Sequence[int], match: int, emitted: Sequence[int]) -> None:
        """Compares a guess with the emitted tokens, up to its first miss."""
        for depth, (guessed, came) in enumerate(zip(guess, emitted, strict=False)):
            number = _bin(match + depth)
            if self._tested[number] >= _FORGET_AFTER:
                self._hits[number] /= 2.0
                self._tested[number] /= 2.0
            self._hits[number] += guessed == came
            self._tested[number] += 1.0
            if guessed != came:
                return


def _bin(match: int) -> int:
    return min(match.bit_length(), _NUM_BINS - 1)


@dataclass(slots=True)
class _Reading:
    """One sequence's index, of which `text` it has `seen` tokens, and the last guess after `match` matched tokens."""

    index: Index
    text: list[int]
    seen: int = 0
    guess: list[int] = field(default_factory=list)
    match: int = 0


class TextDraft(Draft):
    """A draft that copies from the text; its guesses are deterministic and nearly free.

    `reads_encoder`: it also searches an encoder-decoder target's input. `source` names it in its proposals, by default
    as its class.
    """

    reads_predictions = True
    instant = True
    reads_encoder: ClassVar[bool] = False
    source: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "source"):
            cls.source = cls.__name__

    @cached_property
    def calibration(self) -> Calibration:
        """The confidence that its proposers learned."""
        return Calibration()

    @abstractmethod
    def index(self) -> Index:
        """An empty index for one sequence."""

    def start(self, vocab_size: int) -> TextProposer:
        """A proposer without sequences; all proposers share the learned confidence."""
        return TextProposer(self, vocab_size)


class TextProposer(Proposer):
    """Copies for each sequence from its own index."""

    def __init__(self, draft: TextDraft, vocab_size: int) -> None:
        self._draft, self._vocab_size, self._calibration = draft, vocab_size, draft.calibration
        self._readings: dict[int, _Reading] = {}

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def guess(self, seq: SequenceView, limit: int) -> tuple[list[int], list[float]]:
        """At most `max(limit, 1)` tokens for `seq` and their confidence; one is looked up always, to keep learning."""
        reading = self._readings.pop(seq.id, None)
        if reading is None or reading.text is not seq.tokens:  # new, or written anew
            reading = self._open(seq)
        new = reading.text[reading.seen :]
        self._calibration.learn(reading.guess, reading.match, new)
        reading.index.extend(new)
        reading.seen += len(new)
        found, reading.match = reading.index.lookup(max(limit, 1))
        reading.guess, confidence = self._usable(seq, found, reading.match)
        # Stored only now, so that after an exception the text is indexed anew.
        self._readings[seq.id] = reading
        return reading.guess, confidence

    def after(self, seq: SequenceView, tail: list[int], limit: int) -> tuple[list[int], list[float]]:
        """At most `limit` tokens that may follow the text and `tail`, and their confidence; `guess` comes first."""
        return self._usable(seq, *self._readings[seq.id].index.lookup(limit, tail))

    def _propose(self, seq: SequenceView, budget: Budget) -> Tree:
        guess, source = self.guess(seq, budget.limit), self._draft.source
        if not seq.tree.tokens:
            return cut(*guess, seq, budget, source)
        return chain_per_leaf(seq, budget, source, lambda tail: self.after(seq, tail, max(budget.limit, 1)))

    def _usable(self, seq: SequenceView, found: list[int], match: int) -> tuple[list[int], list[float]]:
        """The tokens of `found` that may be proposed, and their confidence after `match` matched tokens."""
        guess = known_tokens(found, self._vocab_size, seq.task.ends)
        return guess, self._calibration.rates(match, len(guess))

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._readings.pop(seq_id, None)

    def _open(self, seq: SequenceView) -> _Reading:
        reading = _Reading(self._draft.index(), seq.tokens)
        if self._draft.reads_encoder and seq.encoder_tokens:
            reading.index.extend([*seq.encoder_tokens, SEPARATOR])
        if seq.prediction:
            # Behind the prompt's end, so that the first lookup finds the prediction's beginning.
            prompt = seq.tokens[: seq.prompt_length]
            reading.index.extend([*prompt[-_PROMPT_END:], *seq.prediction, SEPARATOR])
        return reading
