"""What drafts without a model share: an index of the text per sequence, learned confidence, and cutting to the plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from specdec.core.drafts import BatchDrafter, DraftSession, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import Tree
from specdec.errors import OptionError
from specdec.proposers.best_branch import branch_tokens

SEPARATOR = -1
"""Stands between texts in one index; no text contains it, and no proposal crosses it."""

_NUM_BINS = 8
_FORGET_AFTER = 256
_JOINT = 16  # tokens of the prompt that stand before a prediction


class Index(Protocol):
    """A text that grows and can tell what followed the last time it ended like this."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends `tokens`."""

    def lookup(self, limit: int, tail: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `limit` tokens that may follow the text and `tail`, and how many tokens before them matched."""


class Calibration:
    """How often a guess after a match of some length came true, learned from what was really emitted.

    Bins double in length; each is shrunk towards the rate of all, which starts at one half. Old counts fade.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * _NUM_BINS
        self._tested = [0.0] * _NUM_BINS

    def rates(self, match: int, count: int) -> list[float]:
        """The probability of each of `count` guesses after a match of `match` tokens, given the guesses before it."""
        pooled = (sum(self._hits) + 1.0) / (sum(self._tested) + 2.0)
        by_bin = [(h + 2.0 * pooled) / (n + 2.0) for h, n in zip(self._hits, self._tested, strict=True)]
        return [by_bin[_bin(match + depth)] for depth in range(count)]

    def learn(self, guess: Sequence[int], match: int, emitted: Sequence[int]) -> None:
        """Compares a guess with the tokens that came; what follows its first miss was not tested."""
        for depth, (guessed, came) in enumerate(zip(guess, emitted, strict=False)):
            self._count(_bin(match + depth), guessed == came)
            if guessed != came:
                return

    def _count(self, where: int, hit: bool) -> None:
        if self._tested[where] >= _FORGET_AFTER:
            self._hits[where] /= 2.0
            self._tested[where] /= 2.0
        self._hits[where] += hit
        self._tested[where] += 1.0


def _bin(match: int) -> int:
    return min(match.bit_length(), _NUM_BINS - 1)


def cut(tokens: list[int], confidence: list[float], seq: SequenceView, plan: Plan, source: str) -> Tree:
    """The chain as far as the plan keeps it; the sequence's last token is left to the target."""
    limit = min(plan.limit, seq.remaining - 1, len(tokens))
    kept: list[float] = []
    while len(kept) < limit:
        kept.append(confidence[len(kept)])
        if not plan.keep(kept):
            kept.pop()
            break
    return Tree.chain(tokens[: len(kept)], kept, source=source)


def merge_chains(chains: Sequence[Tree]) -> Tree:
    """One proposal of a chain per leaf."""
    tokens: list[int] = []
    parents: list[int] = []
    for leaf, chain in enumerate(chains):
        parents += [-1 - leaf if parent < 0 else parent + len(tokens) for parent in chain.parents]
        tokens += chain.tokens
    confidence = [c for chain in chains for c in chain.confidence or ()]
    return Tree(tokens, parents, confidence, None, chains[0].source)


@dataclass(slots=True)
class _Reading:
    """One sequence's index, how much of its text is in it, and the guess that the next tokens will judge."""

    index: Index
    seen: int = 0
    guess: list[int] = field(default_factory=list)
    match: int = 0


class TextDrafter(BatchDrafter):
    """A draft that copies from the text: its guess is deterministic and costs next to nothing.

    `reads_encoder`: it searches an encoder-decoder target's input too. `source` names it in its proposals.
    """

    guesses_trees = False
    instant = True
    reads_encoder: ClassVar[bool] = False
    source: ClassVar[str]

    def __init__(self) -> None:
        self.calibration = Calibration()

    @classmethod
    def of(cls, target: object, argument: str | None, name: str = "draft") -> TextDrafter:
        """The draft as its word alone names it; raises OptionError, which names the caller's argument `name`."""
        if argument is not None:
            raise OptionError.of(name, "a word without an argument", argument)
        return cls()

    @abstractmethod
    def index(self) -> Index:
        """The index of one sequence."""

    def start(self, vocab_size: int) -> TextSession:
        """A session without sequences; what was learned about confidence is kept across sessions."""
        return TextSession(self, vocab_size)


class TextSession(DraftSession):
    """A draft that copies from the text, at work."""

    guesses_branches = True

    def __init__(self, drafter: TextDrafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size, self._calibration = drafter, vocab_size, drafter.calibration
        self._readings: dict[int, _Reading] = {}

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One chain per leaf, copied from after an earlier occurrence of the text's end."""
        return [self._propose(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]

    def guess(self, seq: SequenceView, limit: int) -> tuple[list[int], list[float]]:
        """At most `limit` (but one is always looked up, to keep learning) tokens for `seq`, and their confidence."""
        reading = self._readings.pop(seq.id, None) or self._open(seq)
        self._read(reading, seq.tokens)
        found, reading.match = reading.index.lookup(max(limit, 1))
        reading.guess, confidence = self._believed(seq, found, reading.match)
        # Put back only here: a reading that an exception left half way is read anew.
        self._readings[seq.id] = reading
        return reading.guess, confidence

    def _propose(self, seq: SequenceView, plan: Plan) -> Tree:
        first = cut(*self.guess(seq, plan.limit), seq, plan, self._drafter.source)
        if not seq.tree.tokens:
            return first
        # After the branches of a search, whose shared text is read by now.
        index, chains = self._readings[seq.id].index, []
        for leaf in seq.leaves:
            found, match = index.lookup(max(plan.limit, 1), branch_tokens(seq, leaf))
            chains.append(cut(*self._believed(seq, found, match), seq, plan, self._drafter.source))
        return merge_chains(chains)

    def _believed(self, seq: SequenceView, found: list[int], match: int) -> tuple[list[int], list[float]]:
        """What may be proposed of `found` after a match of so many tokens, and its confidence."""
        guess = known_tokens(found, self._vocab_size, seq.task.ends)
        return guess, self._calibration.rates(match, len(guess))

    def rewind(self, seq: SequenceView, length: int) -> None:
        self._readings.pop(seq.id, None)

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._readings.pop(seq_id, None)

    def _open(self, seq: SequenceView) -> _Reading:
        reading = _Reading(self._drafter.index())
        if self._drafter.reads_encoder and seq.encoder_tokens:
            reading.index.extend([*seq.encoder_tokens, SEPARATOR])
        if seq.prediction:
            # After the end of the prompt, so that the prompt's own end is followed by its beginning.
            prompt = seq.tokens[: seq.prompt_length]
            reading.index.extend([*prompt[-_JOINT:], *seq.prediction, SEPARATOR])
        return reading

    def _read(self, reading: _Reading, text: list[int]) -> None:
        new = text[reading.seen :]
        self._calibration.learn(reading.guess, reading.match, new)
        reading.index.extend(new)
        reading.seen = len(text)


def known_tokens(tokens: list[int], vocab_size: int, ends: Collection[int]) -> list[int]:
    """`tokens` before the first that the target does not have (an encoder may read more), or up to one that ends."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            return tokens[:i]
        if token in ends:
            return tokens[: i + 1]
    return tokens


def until_separator(tokens: list[int]) -> list[int]:
    """`tokens` before the first separator."""
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens
