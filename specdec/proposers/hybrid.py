"""A text draft and a model draft together: each round and sequence takes the one that promises more tokens per
second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specdec.core.draft_schedules.estimates import Acceptance
from specdec.core.drafts import BatchDrafter, Commit, DraftSession, Plan, SavedState
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.errors import OptionError
from specdec.proposers.copying import TextDrafter, TextSession, cut

_MEMORY = 0.9


@dataclass
class Odds:
    """What is known of the model draft: how often it is right, seconds of a pass, nodes it tends to draft.

    `gap` are the seconds between two proposals, which is the target's pass and everything around it.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    pass_seconds: float | None = None
    gap: float | None = None
    nodes: float = 4.0

    def text_rate(self, confidence: Sequence[float]) -> float:
        """Tokens per second, if these copied nodes are verified."""
        return _expected(confidence) / (self.gap or 1.0)

    def model_rate(self, limit: int) -> float:
        """Tokens per second, if the model drafts as much as it tends to and may."""
        count = max(1, min(limit, round(self.nodes)))
        gap = self.gap or 1.0
        # Before anything was measured a draft pass is taken for a fifth of the target's.
        seconds = 0.2 * gap if self.pass_seconds is None else self.pass_seconds
        return _expected([self.acceptance.mean] * count) / (gap + count * seconds)

    def outcome(self, guess: Tree, emitted: Sequence[int]) -> None:
        """Learns from a model draft at what share of depths it guesses right."""
        right, missed = guess.follow(emitted)
        tested = [(1.0, True)] * right + [(1.0, False)] * missed
        self.acceptance = self.acceptance.after(tested, len(tested))

    def drafted(self, seconds: float, nodes: int) -> None:
        """Learns from one proposal of the model what a pass costs; it ran one per node of the longest chain."""
        self.pass_seconds = _fading(self.pass_seconds, seconds / max(nodes, 1))
        self.nodes = _fading(self.nodes, max(nodes, 1))


class HybridDrafter(BatchDrafter):
    """Per sequence and round the text draft or the model draft, by expected accepted tokens per second.

    The text draft guesses in every round, used or not, and is scored against what came; the model drafts only where it
    is chosen, and reads what it missed then. The choice is made before the model draws, so q stays the distribution of
    what was drawn.
    """

    def __init__(self, text: TextDrafter, model: BatchDrafter) -> None:
        if not isinstance(text, TextDrafter):
            raise OptionError.of("text", "a text draft such as NgramDrafter() or SuffixDrafter()", text)
        self.text, self.model = text, model
        self.models, self.guesses_trees = model.models, model.guesses_trees
        self.hidden_layers = model.hidden_layers
        self._odds = Odds()
        self._other: HybridDrafter | None = None

    def __repr__(self) -> str:
        return f"HybridDrafter({self.text!r}, {self.model!r})"

    def for_sampling(self, sampling: str | None) -> BatchDrafter:
        """The same pair with the model draft that serves this kind of sampling."""
        model = self.model.for_sampling(sampling)
        if model is self.model:
            return self
        if self._other is None or self._other.model is not model:
            self._other = HybridDrafter(self.text, model)
        return self._other

    def start(self, vocab_size: int) -> HybridSession:
        """A session without sequences; what was learned about the model draft is kept across sessions."""
        return HybridSession(self.text.start(vocab_size), self.model.start(vocab_size), self.text.source, self._odds)


class HybridSession(DraftSession):
    """Both drafts at work."""

    def __init__(self, text: TextSession, model: DraftSession, source: str, odds: Odds) -> None:
        self._text, self._model, self._source, self._odds = text, model, source, odds
        self._ended: float | None = None
        self._read: set[int] = set()
        self._pending: dict[int, tuple[int, Tree]] = {}

    @property
    def guesses_branches(self) -> bool:  # type: ignore[override]
        return self._model.guesses_branches

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per sequence, from the draft that promises more; for the branches of a search, from the model."""
        if self._ended is not None:
            self._odds.gap = _fading(self._odds.gap, perf_counter() - self._ended)
        self._ended = None
        for seq in seqs:
            self._learn(seq)
        trees = [
            cut(*self._text.guess(seq, plan.limit), seq, plan, self._source)
            for seq, plan in zip(seqs, plans, strict=True)
        ]
        chosen = [i for i, tree in enumerate(trees) if self._prefers_model(seqs[i], plans[i], tree)]
        if chosen:
            drafted = self._drafted([seqs[i] for i in chosen], [plans[i] for i in chosen])
            for i, tree in zip(chosen, drafted, strict=True):
                trees[i] = tree
        self._ended = perf_counter()
        return trees

    @property
    def cache(self) -> Any:
        return self._model.cache

    def join(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        return self._model.join(seq, source, length)

    def keep(self, seq: SequenceView, length: int) -> SavedState | None:
        return self._model.keep(seq, length)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Passed on: the model's cache holds the sequences' branches whoever made the proposal."""
        self._model.commit(commits)

    def rewind(self, seq: SequenceView, length: int) -> None:
        self._text.rewind(seq, length)
        self._model.rewind(seq, length)

    def release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._pending.pop(key, None)
            self._read.discard(key)
        self._text.release(keys)
        self._model.release(keys)

    def _prefers_model(self, seq: SequenceView, plan: Plan, tree: Tree) -> bool:
        limit = min(plan.limit, seq.remaining - 1)
        if limit <= 0:
            return False
        # A search goes on only where all its branches were guessed, which copying hardly ever does.
        if seq.tree.tokens or not tree.tokens:
            return True
        return self._odds.model_rate(limit) > self._odds.text_rate(tree.confidence or [])

    def _drafted(self, seqs: list[SequenceView], plans: list[Plan]) -> list[Tree]:
        began = perf_counter()
        trees = self._model.propose(seqs, plans)
        keys = {seq.id for seq in seqs}
        # A round in which the model reads a whole prompt says nothing about a pass.
        if keys <= self._read and any(trees):
            self._odds.drafted(perf_counter() - began, max(tree.depth for tree in trees))
        self._read |= keys
        for seq, tree in zip(seqs, trees, strict=True):
            self._pending[seq.id] = (len(seq.tokens), tree)
        return trees

    def _learn(self, seq: SequenceView) -> None:
        """Compares the model's last draft for `seq` with the text that came."""
        length, guess = self._pending.pop(seq.id, (0, EMPTY))
        if guess.tokens:
            self._odds.outcome(guess, seq.tokens[length:])


def _expected(confidence: Sequence[float]) -> float:
    """Tokens that a pass is expected to bring, the target's own included."""
    total = chance = 1.0
    for c in confidence:
        chance *= c
        total += chance
    return total


def _fading(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1.0 - _MEMORY) * new
