"""The cost rule: a node is drafted while its expected tokens are worth its seconds.

Let R be the tokens per second of decoding so far. A node whose path is accepted with probability P brings P tokens and
costs c seconds more; it raises R exactly when P >= R * c (Dinkelbach's condition for the best ratio). P is estimated
from earlier guesses by their confidence (`Acceptance`), c from the seconds of passes (`LinearFit`).

Predictions may be wrong, so drafting is also judged by its results: the seconds of rounds with a draft are compared
with those that the same tokens take without one; drafting that wasted too many is suspended for a while.

The rule runs in every round, and its own time counts beside passes of a few milliseconds: while drafting waits, most
rounds of about the usual length skip it (`rest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from specdec.core.draft_schedules.estimates import Acceptance, LinearFit
from specdec.core.draft_schedules.fixed import MOST_NODES, ScheduleSetup, check_nodes

if TYPE_CHECKING:
    from typing_extensions import Self

    from specdec.core.drafts import SequenceView, Until
    from specdec.core.outcome import Round, SequenceRound

WIDEST = 32
"""The most nodes that one draft pass continues, where the options name no number."""
_MOST_WASTE = 3  # plain rounds' seconds that drafting may waste before it is suspended
_MOST_CREDIT = 12  # plain rounds' seconds of gains that offset later waste: texts have easy parts and hard ones
_DRAFT_PASSES = 15  # trees are used where a target pass costs as much as this many draft passes
_CARRIED = 0.1  # weight of the last request's gain in the next one
_GROWTH = 4  # a tree has at most this many times the nodes of the widest recent pass
_PATIENCE = (16, 256)  # rounds without a draft before the next try: at first, and at most
_LOOK = 0.005  # the share of the time without a draft that tries may take, reading the text included
_LONGEST = 1024  # the most rounds until the next try, whatever the last one cost: that may have been a stall
_REST = 7  # rounds that skip the rule, while drafting waits
_NOTICEABLE = 0.02  # the share of a pass above which a draft's time counts even if it proposed nothing
_SUSPENSION = (32, 512)  # rounds without a draft after drafting was slower: half of the first, and at most


class _Prior(NamedTuple):
    """Assumptions about a target before its passes were measured.

    `draft_cost` and `verify_cost`: tokens that decoding makes during a draft pass, and during the extra time of one
    more verified node. `steepness`, `trust`: see `LinearFit`. `free_nodes`: trees are taken where a pass costs as much
    as this many nodes, since side branches bring fewer tokens than their confidence promises.
    """

    draft_cost: float
    verify_cost: float
    steepness: float
    trust: float
    free_nodes: int


_IN_MEMORY = _Prior(0.3, 0.1, 0.02, 1.0, 100)
# A pass over offloaded weights hardly takes longer for more nodes, and its seconds vary too much to conclude otherwise
# from a few passes.
_OFFLOADED = _Prior(0.05, 0.01, 0.003, 64.0, 30)


@dataclass(frozen=True)
class CostPlan:
    """One sequence's plan: `limit` tokens on a path, `branches` that one draft pass continues.

    `pass_cost` of a draft pass over no nodes, for all of its sequences, and `node_cost` of one more node in the passes
    of draft and target: in tokens that decoding makes in the same seconds.
    """

    limit: int
    acceptance: Acceptance
    pass_cost: float
    node_cost: float
    branches: int | None = None
    needs_confidence: ClassVar[bool] = True
    _chances: dict[tuple[float, ...], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def up_to(self, length: int) -> CostPlan:
        """The plan for a chain of at most `length` tokens; a tree's stays as it is."""
        shorter = length < self.limit and self.branches in (None, 1)
        return replace(self, limit=length) if shorter else self

    def gain(self, paths: Sequence[Sequence[float]], width: int = 1) -> float:
        """The tokens, of unknown confidence, that the next draft pass brings beyond those that its nodes cost."""
        if max(map(len, paths)) >= self.limit:
            return 0.0
        mean = self.acceptance.later if any(paths) else self.acceptance.mean
        return sum(map(self._chance, paths)) * mean - width * self.node_cost

    @property
    def until(self) -> Until:
        """The same for a chain, in numbers."""
        from specdec.core.drafts import Until

        own = self.acceptance
        return Until(own.edges, *own.chances, self.node_cost / own.later, self.pass_cost / own.later)

    def keep(self, confidence: Sequence[float]) -> bool:
        """Whether a drafted token is worth verifying, or its chance worth knowing; its draft pass is done."""
        is_trial = len(confidence) == 1 and self.branches in (None, 1) and self.acceptance.is_unknown(confidence[0])
        return is_trial or self._chance(confidence) >= self.node_cost

    def _chance(self, path: Sequence[float]) -> float:
        """The chance that a whole path is accepted."""
        if not path:
            return 1.0
        whole = tuple(path)
        if whole not in self._chances:
            before = self._chances.get(whole[:-1]) or math.prod(map(self.acceptance.of, whole[:-1]))
            self._chances[whole] = before * self.acceptance.of(whole[-1])
        return self._chances[whole]


@dataclass(frozen=True)
class Cost:
    """Drafts while it raises tokens per second (see the module); where nothing pays, it tries ever more rarely.

    `k` bounds the tokens of a path, `branches` the nodes that one draft pass continues. Without `branches`, texts get
    trees with up to `widest` branches where target passes are dear beside nodes and draft passes, and chains elsewhere.
    `offloaded`: a target pass reads weights that are not in memory.

    The other fields are what was learned; `after` adds to it, and `fresh` takes it along to the next request. Several
    requests may share passes: seconds and nodes are those of all their sequences, acceptance is that of the own
    sequences.
    """

    k: int = 32
    branches: int | None = None
    widest: int | None = None
    offloaded: bool = False
    # Of the draft: how often it is right, the seconds of its passes over the nodes that all sequences have on a level,
    # by source, and the rounds that they are known from.
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafts: Mapping[str, LinearFit] = field(default_factory=dict)
    measured_rounds: int = 0
    # Seconds of a target pass over its nodes, of a whole round without a draft over its sequences, and those of a round
    # that are neither the draft's nor the target's.
    passes: LinearFit = field(default_factory=LinearFit)
    plain: LinearFit = field(default_factory=LinearFit)
    other_seconds: float = 0.0
    # Nodes of one sequence: without a draft (its live branches), in the widest pass of late, and per level of its
    # draft.
    roots: float = 1.0
    recent_nodes: float = 1.0
    level_nodes: float = 1.0
    # Sequences of other requests in the last round, and how many of them shared the last draft passes.
    other_seqs: int = 0
    drafting_seqs: int = 0
    # Fading sums over rounds: the tokens, and those that the same seconds bring without a draft.
    tokens: float = 0.0
    plain_tokens: float = 0.0
    # Rounds without a draft: so far, after how many of them drafting is looked at again, and how many of the next need
    # no look at the rule. Seconds in which the draft read texts since it last guessed.
    idle: int = 0
    patience: int = _PATIENCE[0]
    reading_seconds: float = 0.0
    rest: int = 0
    # Drafting judged by what it brought: rounds with a draft since the last verdict, the seconds that they took beyond
    # those of their tokens without a draft (less than 0 after gains), whether drafting is suspended, for how many
    # rounds, and what a round without a draft cost at that time.
    probe_rounds: int = 0
    wasted_seconds: float = 0.0
    suspended: bool = False
    suspension: int = _SUSPENSION[0]
    baseline: LinearFit = field(default_factory=LinearFit)

    takes_threshold: ClassVar[bool] = False
    grows_trees: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_nodes(self.k, self.max_branches)

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Self:
        """A schedule that begins with what the last request of the same family learned."""
        k = setup.tokens_or(cls.k)
        widest = max(min(WIDEST, MOST_NODES // k), 1) if setup.trees else None
        learned = cls()._changed(**vars(setup.learned)) if isinstance(setup.learned, Cost) else cls()
        return learned.fresh(k, setup.branches, widest, offloaded=setup.offloaded)

    @property
    def max_tokens(self) -> int:
        return self.k

    @property
    def max_branches(self) -> int:
        return self.branches or self.widest or 1

    def fresh(self, k: int, branches: int | None = None, widest: int | None = None, *, offloaded: bool = False) -> Self:
        """All that was learned, for a request with these bounds; little of the last rate, since texts differ.

        Rounds without a draft add up over requests, so that short requests try again too.
        """
        found = replace(
            self,
            k=k,
            branches=branches,
            widest=widest,
            offloaded=offloaded,
            other_seqs=0,
            drafting_seqs=0,
            idle=max(self.idle, self.patience // 2),
            rest=0,
            tokens=_CARRIED * self.tokens,
            plain_tokens=_CARRIED * self.plain_tokens,
        )
        prior = found._prior
        return replace(found, passes=self.passes._replace(steepness=prior.steepness, trust=prior.trust))

    # deciding

    def plan(self, seqs: Sequence[SequenceView]) -> list[CostPlan]:
        """One plan per sequence, with limit 0 while plain decoding is predicted to be faster."""
        return [self._plan_of(len(seqs))] * len(seqs)

    def _plan_of(self, seqs: int) -> CostPlan:
        if not self.is_measured:
            draft_cost, node_cost = self._prior.draft_cost, self._prior.verify_cost
            if self.acceptance.mean < draft_cost + node_cost:  # so far, as while prompts are read
                return self._plan(1, 0.0, 0.0)  # to measure costs: the draft may be free
            return self._plan(self.k, (seqs + self.other_seqs) * draft_cost, node_cost)
        if self.rest or self._wants_plain_rounds or self.suspended:
            return self._plan(0, 0.0, 0.0)
        if not self._pays(seqs):
            return self._plan(int(self.idle >= self.patience), 0.0, 0.0)
        gain = max(self.tokens / self.plain_tokens if self.plain_tokens else 1.0, 1.0)
        rate, drafting = gain * self._plain_rate(seqs + self.other_seqs), seqs + self._drafting_seqs
        # Only the slowest source asks before each pass; text drafts have no passes.
        dearest = max(self.drafts.values(), key=lambda line: line.at(drafting))
        node = self.passes.slope + dearest.slope
        return self._plan(self.k, rate * dearest.at(0), rate * node)

    def _plan(self, limit: int, pass_cost: float, node_cost: float) -> CostPlan:
        # A try of a single token needs no tree.
        if self.branches or not self.widest or limit <= 1 or not self._nodes_are_cheap:
            branches = self.branches or (1 if self.widest else None)
            return CostPlan(limit, self.acceptance, pass_cost, node_cost, branches)
        # The cost of a wide pass is unknown until one was measured, so trees grow step by step.
        nodes = int(_GROWTH * self.recent_nodes)
        branches = min(self.widest, max(2, nodes // limit))
        return CostPlan(min(limit, max(nodes // branches, 4)), self.acceptance, pass_cost, node_cost, branches)

    @property
    def _nodes_are_cheap(self) -> bool:
        """Whether trees may pay: their nodes, and draft passes over several of them, are cheap beside a target pass."""
        if not self.is_measured:
            return False
        draft_pass = min(line.at(1) for line in self.drafts.values())
        dear = max(self._prior.free_nodes * self.passes.slope, _DRAFT_PASSES * draft_pass)
        return self.passes.at(self.roots) >= dear

    @property
    def _prior(self) -> _Prior:
        return _OFFLOADED if self.offloaded else _IN_MEMORY

    @property
    def is_measured(self) -> bool:
        """Whether the seconds of passes of target and draft are known: one round may have been a stall."""
        return self.measured_rounds > 1

    @property
    def _drafting_seqs(self) -> int:
        """Other requests' sequences that may be expected to share the next draft passes."""
        return min(self.drafting_seqs, self.other_seqs)

    @property
    def _wants_plain_rounds(self) -> bool:
        """Whether to measure a round without a draft: at once where the draft is poor, else now and then."""
        looks = self.plain.weight
        due = self.probe_rounds >= 8 * (looks + 1) or (self.acceptance.mean < 0.6 and not looks)
        return looks < 2.5 and due and self.passes.weight > 1.5

    def _pays(self, seqs: int) -> bool:
        """Whether some number of tokens per sequence is predicted to beat plain decoding."""
        everyone, drafting = seqs + self.other_seqs, seqs + self._drafting_seqs
        plain, mean = self._plain_rate(everyone), self.acceptance.mean
        seconds = self.passes.at(everyone * self.roots) + self.other_seconds
        # One more token for every sequence that drafts, from the cheapest source.
        nodes = drafting * self.level_nodes
        more = nodes * self.passes.slope + min(line.at(nodes) for line in self.drafts.values())
        expected, chance = float(everyone), 1.0
        for k in range(1, self.k + 1):
            chance *= mean
            expected += drafting * chance
            if expected > plain * (seconds + k * more):
                return True
            if drafting * chance < plain * more:
                return False  # later tokens bring even less
        return False

    def _plain_rate(self, seqs: int) -> float:
        """Tokens per second without a draft: measured, or before the first such round, predicted."""
        predicted = self.passes.at(seqs * self.roots) + self.other_seconds
        return seqs / (self.plain.at(seqs) if self.plain.weight else predicted)

    # learning

    def after(self, round: Round) -> Self:
        """With this round's outcomes, seconds and rate; of a round that reads a prompt, only the draft's outcomes."""
        everyone = _everyone(round)
        if self.rest and self._is_usual(round, everyone):
            return self._changed(idle=self.idle + 1, rest=self.rest - 1)
        tried, acceptance = _was_tried(round), self.acceptance
        for seq in round.seqs:
            # A slow draft with nothing to propose counts as one that was wrong.
            acceptance = acceptance.after(seq.tested, seq.levels or float(tried and not seq.depth))
        reads = any(seq.prefill for seq in everyone)
        learned = self._changed(
            acceptance=acceptance,
            reading_seconds=self.reading_seconds + round.draft_seconds * _is_noticed(round),
            **({} if reads else self._costs(round, everyone, tried)),
        )
        if tried:
            learned = learned._changed(idle=0, patience=learned._patience_after(round), reading_seconds=0.0)
        if reads:
            return learned
        learned = learned._judged(round, everyone, tried)
        plain_tokens = round.seconds * learned._plain_rate(len(everyone))
        learned = learned._changed(
            tokens=0.9 * learned.tokens + _tokens(everyone), plain_tokens=0.9 * learned.plain_tokens + plain_tokens
        )
        return learned._changed(rest=0 if tried else learned._rest_after(round))

    def _changed(self, **values: Any) -> Self:
        """With these values; ten times as fast as `replace`."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **values)
        return changed

    def _is_usual(self, round: Round, everyone: Sequence[SequenceRound]) -> bool:
        """Whether the round shows nothing new: the same sequences, no draft, about the mean seconds."""
        usual = self.plain.seconds / self.plain.weight
        return (
            usual / 2 < round.seconds < 2 * usual
            and len(round.others) == self.other_seqs
            and not any(seq.prefill or seq.depth for seq in everyone)
        )

    def _rest_after(self, round: Round) -> int:
        """How many rounds may skip the rule: fewer than are left until the next try, 0 where drafting pays."""
        if not self.is_measured or not self.plain.weight or self._wants_plain_rounds:
            return 0
        if self.suspended:
            left = self.suspension - 1 - self.idle
        else:
            left = 0 if self._pays(len(round.seqs)) else self.patience - self.idle
        return max(min(_REST, left), 0)

    def _costs(self, round: Round, everyone: Sequence[SequenceRound], tried: bool) -> dict[str, Any]:
        """The fields that the seconds of the round change."""
        count, nodes = len(everyone), sum(seq.drafted for seq in everyone)
        # Kernels run asynchronously: a pass ends with the first read of its results, which is in selection.
        pass_seconds = round.verify_seconds + round.select_seconds
        other_seconds = round.seconds - round.draft_seconds - pass_seconds
        found = {
            "passes": self.passes.add(round.nodes, pass_seconds),
            "other_seconds": _fading(self.other_seconds, other_seconds),
            "roots": _fading(self.roots, (round.nodes - nodes) / count),
            "recent_nodes": max(round.nodes / count, 0.95 * self.recent_nodes),
            "other_seqs": len(round.others),
            "idle": self.idle + 1,
        }
        if not any(seq.depth for seq in everyone):
            found["plain"] = self.plain.add(count, round.seconds - round.draft_seconds)
        if tried:
            found |= {
                "drafts": (drafts := self._with_draft(round)),
                "measured_rounds": self.measured_rounds + (drafts is not self.drafts),
                # of other requests, with a proposal of the same sources
                "drafting_seqs": sum(seq.depth > 0 and seq.source in _sources(round) for seq in round.others),
                "probe_rounds": self.probe_rounds + 1,
            }
        if own_levels := sum(seq.depth for seq in round.seqs):
            own_nodes = sum(seq.drafted for seq in round.seqs)
            found["level_nodes"] = _fading(self.level_nodes, own_nodes / own_levels)
        return found

    def _judged(self, round: Round, everyone: Sequence[SequenceRound], tried: bool) -> Self:
        """With the verdict on drafting, by its measured and not its predicted gain (CUSUM, Page 1954)."""
        count = len(everyone)
        if self.suspended:
            dearer = self.plain.at(count) > 1.3 * self.baseline.at(count)
            goes_on = self.idle < self.suspension and not dearer
            return self if goes_on else self._changed(suspended=False)
        if not (self.plain.weight and tried):
            return self
        plain_round = self.plain.at(count)
        brought = plain_round * _tokens(everyone) / count
        waste = round.seconds - brought if any(seq.depth for seq in everyone) else round.draft_seconds
        # A stall counts as one round at most.
        wasted = max(self.wasted_seconds + min(waste, plain_round), -_MOST_CREDIT * plain_round)
        first, longest = _SUSPENSION
        if wasted <= _MOST_WASTE * plain_round:
            suspension = first if self.probe_rounds >= 64 else self.suspension
            return self._changed(wasted_seconds=wasted, suspension=suspension)
        return self._changed(
            suspended=True,
            suspension=min(2 * self.suspension, longest),
            baseline=self.plain,
            probe_rounds=0,
            wasted_seconds=0.0,
        )

    def _with_draft(self, round: Round) -> Mapping[str, LinearFit]:
        """Seconds of draft passes by source; of several sources, only that of the longest draft counts.

        A draft that proposed nothing counts as one pass.
        """
        sources, everyone = _sources(round), _everyone(round)
        longest = max(everyone, key=lambda seq: (seq.depth, seq.source in sources))
        source, levels = longest.source, max(longest.depth, 1)
        if source not in sources:
            return self.drafts
        nodes = sum(max(seq.drafted, 1) for seq in everyone if seq.source == source)
        fit = self.drafts.get(source, LinearFit()).add(nodes / levels, round.draft_seconds / levels)
        return {**self.drafts, source: fit}

    def _patience_after(self, round: Round) -> int:
        """A try without an accepted token doubles the wait for the next one; an accepted token resets it.

        A slow try waits longer, so that tries, with the reading before them, take at most the share `_LOOK` of time,
        or twice that after an accepted token.
        """
        shortest, longest = _PATIENCE
        right = any(seq.accepted for seq in round.seqs)
        if not self.is_measured or self._pays(len(round.seqs)):
            return shortest if right else self.patience
        count = len(_everyone(round))
        nodes = sum(seq.drafted for seq in round.seqs)
        rounds = (self.reading_seconds + nodes * self.passes.slope) * self._plain_rate(count) / count
        share = 2 * _LOOK if right else _LOOK
        return max(shortest if right else min(2 * self.patience, longest), min(int(rounds / share), _LONGEST))


def _everyone(round: Round) -> list[SequenceRound]:
    """All sequences that shared the passes of a round."""
    return [*round.seqs, *round.others]


def _sources(round: Round) -> set[str]:
    """The sources of the own sequences' proposals; if all are empty, the sources that were asked."""
    return {seq.source for seq in round.seqs if seq.depth} or {seq.source for seq in round.seqs if seq.source}


def _is_noticed(round: Round) -> bool:
    """Whether drafting took a noticeable share of the round."""
    return round.draft_seconds > _NOTICEABLE * (round.verify_seconds + round.select_seconds)


def _was_tried(round: Round) -> bool:
    """Whether own sequences had a proposal, or a draft took noticeable time without one."""
    return any(seq.depth for seq in round.seqs) or (_is_noticed(round) and any(seq.source for seq in round.seqs))


def _tokens(seqs: Sequence[SequenceRound]) -> int:
    return sum(len(seq.steps) for seq in seqs)


def _fading(old: float, new: float) -> float:
    """A fading mean, which stalls change little (see `LinearFit.add`)."""
    new = max(new, 0.0)  # differences of clocks may round below it
    return new if not old or new < old / 3 else 0.8 * old + 0.2 * min(new, 3 * old)
