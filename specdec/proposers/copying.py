"""Drafts that copy from the text: an index of the text per sequence, and learned confidence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from sys import maxsize
from typing import ClassVar, NamedTuple, Protocol

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Proposer, SequenceView
from specdec.core.tree import Tree
from specdec.proposers.chains import chain_per_leaf, cut, valid_tokens
from specdec.proposers.memory import DEPTH, Memory

SEPARATOR = -1
"""Separates texts in one index; no text contains it, and guesses are cut before it."""

# The share of right guesses by length of the match, in bins that double in length: as in code, edits of code, answers
# to questions and JSON by Qwen2.5-Coder-1.5B.
_USUAL = (0.2, 0.2, 0.5, 0.8, 0.93, 0.96, 0.98, 0.98)
_TRUST = 2.0  # tests that the usual share counts like
_FORGET_AFTER = 256
_PROMPT_END = 16  # tokens of the prompt that are indexed again before a prediction


class Index(Protocol):
    """A growing text that is searched for earlier occurrences of its end."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`."""

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens that may follow text + `tail`, and the length of the match before them."""


class Calibration:
    """The share of right guesses by length of the match, learned from the emitted tokens; old counts fade."""

    def __init__(self) -> None:
        self._hits = [_TRUST * share for share in _USUAL]
        self._tested = [_TRUST] * len(_USUAL)

    def rates(self, match: int, count: int) -> list[float]:
        """The probability of each of `count` guesses after `match` matched tokens, if those before it are right."""
        bins = [_bin(match + depth) for depth in range(count)]
        return [self._hits[number] / self._tested[number] for number in bins]

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
    return min(match.bit_length(), len(_USUAL) - 1)


class _Guess(NamedTuple):
    """Tokens after `match` matched ones, their confidence, and the `calibration` that learns what came of them."""

    tokens: list[int]
    match: int
    confidence: list[float]
    calibration: Calibration


@dataclass(slots=True)
class _Reading:
    """One sequence's index, of which `text` it has read `num_read` tokens, and the last guess."""

    index: Index
    text: list[int]
    salt: str
    num_read: int = 0
    guess: _Guess | None = None


class TextDraft(Draft):
    """A draft that copies from the text; its guesses are deterministic and nearly free.

    `reads_encoder`: it also searches an encoder-decoder target's input. `source` names it in its proposals, by default
    as its class. `memory`: where it searches besides, and keeps the texts of sequences that have ended. `longest`: the
    most tokens that its index compares.
    """

    reads_predictions = True
    instant = True
    reads_encoder: ClassVar[bool] = False
    source: ClassVar[str]
    memory: Memory | None = None
    longest = maxsize

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "source"):
            cls.source = cls.__name__

    @cached_property
    def calibration(self) -> Calibration:
        """The confidence that its proposers learned."""
        return Calibration()

    @cached_property
    def calibration_of_memory(self) -> Calibration:
        """The same, of guesses from the memory."""
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
        self._draft, self._vocab_size = draft, vocab_size
        self._readings: dict[int, _Reading] = {}

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def guess(self, seq: SequenceView, limit: int) -> tuple[list[int], list[float]]:
        """At most `max(limit, 1)` tokens for `seq` and their confidence; one is looked up always, to keep learning."""
        reading = self._readings.pop(seq.id, None)
        if reading is None or reading.text is not seq.tokens:  # new, or written anew
            reading = self._open(seq)
        new = reading.text[reading.num_read :]
        if reading.guess is not None:
            reading.guess.calibration.learn(reading.guess.tokens, reading.guess.match, new)
        reading.index.extend(new)
        reading.num_read += len(new)
        reading.guess = self._look(seq, reading, max(limit, 1))
        # Stored only now, so that after an exception the text is indexed anew.
        self._readings[seq.id] = reading
        return reading.guess.tokens, reading.guess.confidence

    def rate(self, match: int) -> float:
        """The probability of a guess where so many tokens match, or those of them that the index compares."""
        return self._draft.calibration.rates(min(match, self._draft.longest), 1)[0]

    def after(self, seq: SequenceView, tail: list[int], limit: int) -> tuple[list[int], list[float]]:
        """At most `limit` tokens that may follow the text and `tail`, and their confidence."""
        if seq.id not in self._readings or self._readings[seq.id].num_read < len(seq.tokens):
            self.guess(seq, 1)
        guess = self._look(seq, self._readings[seq.id], limit, tail)
        return guess.tokens, guess.confidence

    def _propose(self, seq: SequenceView, budget: Budget) -> Tree:
        guess, source = self.guess(seq, budget.limit), self._draft.source
        if not seq.tree.tokens:
            return cut(*guess, seq, budget, source)
        return chain_per_leaf(seq, budget, source, lambda tail: self.after(seq, tail, max(budget.limit, 1)))

    def _look(self, seq: SequenceView, reading: _Reading, limit: int, tail: Sequence[int] = ()) -> _Guess:
        """What may follow the text and `tail`: from the text itself, or from the memory where that matches longer."""
        tokens, match = reading.index.lookup(limit, tail)
        draft, memory, remembered = self._draft, self._draft.memory, None
        if memory is not None and match < DEPTH:
            remembered = memory.lookup([*reading.text[-DEPTH:], *tail], reading.salt, limit, above=match)
        if remembered is not None:
            tokens, match = remembered.tokens, remembered.match
        calibration = draft.calibration if remembered is None else draft.calibration_of_memory
        tokens = valid_tokens(tokens, self._vocab_size, seq.task.ends)
        rates = calibration.rates(match, len(tokens))
        if remembered is not None:  # the rate counts like two texts beside those that went on with the token, less one
            rates = [(n - 1 + 2 * rate) / (of + 1) for rate, (n, of) in zip(rates, remembered.counts, strict=False)]
        return _Guess(tokens, match, rates, calibration)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            reading = self._readings.pop(seq_id, None)
            if reading is not None and self._draft.memory is not None:
                self._draft.memory.remember(reading.text, reading.salt)

    def _open(self, seq: SequenceView) -> _Reading:
        reading = _Reading(self._draft.index(), seq.tokens, seq.task.salt)
        if self._draft.reads_encoder and seq.encoder_tokens:
            reading.index.extend([*seq.encoder_tokens, SEPARATOR])
        if seq.prediction:
            # Behind the prompt's end, so that the first lookup finds the prediction's beginning.
            prompt = seq.tokens[: seq.prompt_length]
            reading.index.extend([*prompt[-_PROMPT_END:], *seq.prediction, SEPARATOR])
        return reading
