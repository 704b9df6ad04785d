"""A text draft and a model draft together: each sequence and round uses the one that promises more tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from time import perf_counter
from typing import TYPE_CHECKING

from specdec.core.budget import Budget
from specdec.core.draft_schedules.estimates import Acceptance, LinearFit, adapt_budget
from specdec.core.drafts import Commit, Draft, Proposer, SequenceView, path_limit
from specdec.core.tree import EMPTY, Tree, common_length
from specdec.errors import OptionError
from specdec.proposers.chains import cut, worthwhile
from specdec.proposers.copying import TextDraft, TextProposer
from specdec.proposers.views import WrappedDraft, WrappedProposer

if TYPE_CHECKING:
    from specdec.models import Session

_MEMORY = 0.9
_RECENT = 0.85  # weight of a round without the model for each token that follows
_LONG = 0.995  # the same, of a copied token
_NEAR = 0.85  # the same, in one text
_WAIT = 4  # tokens of a text in which copies may show themselves
_MATCHES = (4, 8, 16, 32)  # tokens, matched, after which copies may take over from a chain
_FEW = 32  # tokens that a pass reads beside a guess
_LONGEST = 32  # guesses that a chain has at most, as is expected


@dataclass
class Odds:
    """Estimates for the model draft: acceptance, seconds of passes over nodes, and of a token that it reads.

    `gap`: seconds from one proposal to the next, i.e. the target's pass and its overhead. `seconds` and `tokens`: those
    of rounds without the model, of late. `copied` of `new` tokens, of several texts, were copies, used or not.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    passes: LinearFit = field(default_factory=LinearFit)
    reading: float | None = None
    gap: float | None = None
    seconds: float = 0.0
    tokens: float = 0.0
    copied: float = 0.0
    new: float = 1.0

    @property
    def share(self) -> float:
        """What a pass of the model takes, beside the target's pass: a fifth, until it is measured."""
        return self.passes.at(1) / self.gap if self.passes.weight and self.gap else 0.2


class HybridDraft(WrappedDraft):
    """Uses the text draft or the model draft, per sequence and round, by their expected tokens and the model's seconds.

    The text draft guesses in every round, used or not, and learns from the emitted tokens; the model drafts only where
    it is chosen, and then reads what it missed, if the rest of the text is long enough for that. Its chains go on with
    copies of what followed the same tokens before, as soon as these are worth more than its guesses. The choice
    precedes the model's draws, so q stays their distribution. `odds`: what all its proposers learned.
    """

    reads_predictions = True

    def __init__(self, text: TextDraft, model: Draft) -> None:
        if not isinstance(text, TextDraft):
            raise OptionError.of("text", "a text draft such as NgramDraft() or SuffixDraft()", text)
        super().__init__(model)
        self.text, self.odds = text, Odds()

    def __repr__(self) -> str:
        return f"HybridDraft({self.text!r}, {self.inner!r})"

    @property
    def kind(self) -> str:
        return f"{self.text.kind}+{self.inner.kind}"

    def start(self, vocab_size: int) -> HybridProposer:
        """A proposer without sequences; all proposers share the estimates for the model draft."""
        return HybridProposer(self.text.start(vocab_size), self.inner.start(vocab_size), self.text.source, self.odds)


class HybridProposer(WrappedProposer):
    """Runs the text draft for all sequences, the model draft for those that prefer it."""

    def __init__(self, text: TextProposer, model: Proposer, source: str, odds: Odds) -> None:
        super().__init__(model)
        self._text, self._source, self._odds = text, source, odds
        self._ended: float | None = None
        self._last: dict[int, tuple[int, Tree | None, Tree]] = {}  # lengths of texts, the model's trees, the copies
        self._copies: dict[int, Tree] = {}  # this round's, until they are proposed
        self._chosen: dict[int, Budget] = {}  # by the ids of those that prefer the model in this round
        self._copy_shares: dict[int, float] = {}  # of a text's last tokens, how many were copies

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        """Chooses who copies and for whom the model guesses."""
        self._learn(seqs)
        self._copies, self._chosen = {}, {}
        for seq, budget in zip(seqs, budgets, strict=True):
            pass_cost, node_cost = self._costs(seq, budget, len(seqs))
            copying = adapt_budget(budget, None, (pass_cost, node_cost))
            tree = cut(*self._text.guess(seq, budget.limit), seq, copying, self._source)
            self._copies[seq.id] = tree
            if seq.tree.tokens and path_limit(seq, budget):
                # A search only advances if all its branches were guessed, which a text draft hardly ever does.
                self._chosen[seq.id] = budget
            elif self._prefers_model(seq, budget, tree, pass_cost, node_cost):
                guessing = adapt_budget(budget, self._odds.acceptance, (pass_cost * len(seqs), node_cost))
                self._chosen[seq.id] = replace(guessing, match=self._handover(pass_cost))
        chosen = [seq for seq in seqs if seq.id in self._chosen]
        return self._inner.begin_round(chosen, [*self._chosen.values()]) if chosen else ()

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        """One tree per sequence, from the draft that promises more; for searches, from the model."""
        if any(seq.id not in self._copies for seq in seqs):
            self.begin_round(seqs, budgets)
        drafted = self._drafted([seq for seq in seqs if seq.id in self._chosen])
        trees = [
            self._extended(seq, budget, drafted[seq.id]) if seq.id in drafted else self._copies[seq.id]
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        texts = [seq for seq in seqs if not seq.tree.tokens]  # a search's branches are no texts yet
        self._last |= {seq.id: (len(seq.tokens), drafted.get(seq.id), self._copies[seq.id]) for seq in texts}
        self._copies, self._ended = {}, perf_counter()
        return trees

    def after(self, seq: SequenceView, tail: list[int], limit: int) -> tuple[list[int], list[float]]:
        self._last.pop(seq.id, None)  # it proposes nothing in this round
        return self._text.after(seq, tail, limit)

    def read(self, seqs: Sequence[SequenceView], most: int) -> None:
        began, count = perf_counter(), sum(min(most, self._inner.unread(seq)) for seq in seqs)
        super().read(seqs, most)
        self._odds.reading = _fading(self._odds.reading, (perf_counter() - began) / max(count, 1))

    def _learn(self, seqs: Sequence[SequenceView]) -> None:
        """Compares the model's last guesses with the texts, and takes the time since then."""
        odds, gap = self._odds, 0.0
        if self._ended is not None:
            gap = perf_counter() - self._ended
            if odds.gap is not None:
                gap = min(gap, 3 * odds.gap)  # between two calls, time passes in which nothing is decoded
            odds.gap = _fading(odds.gap, gap)
        self._ended = None
        for seq in seqs:
            length, guess, copies = self._last.pop(seq.id, (len(seq.tokens), EMPTY, EMPTY))
            new = seq.tokens[length:]
            hits, count = common_length(copies.tokens, new), len(new)
            odds.copied = _LONG**count * odds.copied + hits
            odds.new = _LONG**count * odds.new + count
            near = _NEAR**count
            self._copy_shares[seq.id] = near * self._copy_shares.get(seq.id, 0.0) + (1 - near) * hits / max(count, 1)
            if guess:
                odds.acceptance = odds.acceptance.after(*guess.tested(guess.follow(new), count))
            elif guess is None and gap:
                odds.seconds = _RECENT**count * odds.seconds + gap
                odds.tokens = _RECENT**count * odds.tokens + count

    def update(self, commits: Sequence[Commit]) -> None:
        """Commits to the model, whose cache holds the sequences' branches whichever draft made the proposal."""
        self._inner.update(commits)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._last.pop(seq_id, None)
            self._copy_shares.pop(seq_id, None)
        if not self._copy_shares:
            self._ended = None  # until the next call, no time is a gap
        self._text.drop(seq_ids)
        super().drop(seq_ids)

    def share(self, target: Session) -> None:
        self._inner.share(target)

    def _costs(self, seq: SequenceView, budget: Budget, count: int) -> tuple[float, float]:
        """What a pass of the model and a node cost one of `count` sequences at this place of its text, in tokens.

        Where no copies are right, decoding is as fast as the model makes it, however fast it is elsewhere.
        """
        share, node = max(self._odds.share, budget.pass_cost / count / budget.pace), budget.node_cost / budget.pace
        alone = _pace(self._odds.acceptance.mean, share + node, budget.limit)
        copied = self._copy_shares.get(seq.id, 0.0)
        pace = 1 / ((1 - copied) / alone + copied / max(budget.pace, alone))
        return pace * share, pace * node

    def _prefers_model(self, seq: SequenceView, budget: Budget, tree: Tree, pass_cost: float, node_cost: float) -> bool:
        """Whether the model promises more tokens than the copies in `tree`, less what decoding makes in its seconds.

        While there are copies, the model does not begin to read.
        """
        limit = path_limit(seq, budget)
        if not limit:
            return False
        unread, chances = self._inner.unread(seq), accumulate([self._odds.acceptance.mean] * limit, mul)
        gain = max(accumulate(chance - pass_cost - node_cost for chance in chances))
        copies = sum(chance - node_cost for chance in accumulate(tree.confidence or [], mul))
        if tree.tokens and (unread > _FEW or gain <= copies):
            return False
        return unread <= _FEW or self._gains_by_reading(seq, unread, budget)

    def _handover(self, pass_cost: float) -> int:
        """After how many matched tokens a copy is worth as much as a guess less its pass; 0: after none."""
        worth = self._odds.acceptance.mean - pass_cost
        return next((match for match in _MATCHES if self._text.rate(match) >= worth), 0)

    def _gains_by_reading(self, seq: SequenceView, unread: int, budget: Budget) -> bool:
        """Whether the model may save more in the rest of the text than it takes to read the `unread` part of it.

        A model of which little is known is hoped to be good: only guesses show whether it is. The first tokens show
        whether copies will do. The model waits for them if reading in vain is likely to cost more than what it would
        save meanwhile.
        """
        odds, gap = self._odds, self._odds.gap or 1.0
        share, most = odds.share + budget.node_cost / budget.pace, min(seq.remaining, _LONGEST)
        best = gap / _pace(odds.acceptance.hoped, share, most)
        without = odds.seconds / odds.tokens if odds.tokens else gap
        reading = unread * (gap / _FEW if odds.reading is None else odds.reading)
        copied, young = odds.copied / odds.new, len(seq.tokens) < seq.prompt_length + _WAIT
        if young and copied * reading > (1 - copied) * _WAIT * (gap - best):
            return False
        return seq.remaining * (without - best) > reading

    def _extended(self, seq: SequenceView, budget: Budget, tree: Tree) -> Tree:
        """The model's chain, and behind it copies of what followed the same tokens before, as far as they pay."""
        stem, sure = tree.stem, (tree.confidence or [])[: tree.stem]
        room = path_limit(seq, budget) - stem
        if room <= 0 or not sure or seq.tree.tokens:
            return tree
        tokens, confidence = self._text.after(seq, tree.tokens[:stem], room)
        guessing = self._chosen[seq.id]
        count = len(worthwhile(confidence, adapt_budget(guessing, None), [*map(guessing.chance, sure)]))
        if not count:
            return tree
        return tree.extended(tokens[:count], confidence[:count], f"{tree.source}+{self._source}")

    def _drafted(self, seqs: Sequence[SequenceView]) -> dict[int, Tree]:
        """The model's trees by sequence id."""
        if not seqs:
            return {}
        read = sum(max(self._inner.unread(seq) - 1, 0) for seq in seqs)
        began = perf_counter()
        trees = self._inner.propose(seqs, [self._chosen[seq.id] for seq in seqs])
        seconds, levels = perf_counter() - began, max(tree.depth for tree in trees)
        if levels:  # there was one pass for each
            nodes = (read + sum(len(tree) - tree.siblings for tree in trees)) / levels
            self._odds.passes = self._odds.passes.add(nodes, seconds / levels)
        return {seq.id: tree for seq, tree in zip(seqs, trees, strict=True)}


def _pace(acceptance: float, share: float, most: int) -> float:
    """How many times as fast as plain decoding a model is with at most so many guesses, which take a `share` each."""
    tokens = accumulate(accumulate([acceptance] * most, mul))
    return max((1.0, *((1 + more) / (1 + count * share) for count, more in enumerate(tokens, 1))))


def _fading(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1.0 - _MEMORY) * new
