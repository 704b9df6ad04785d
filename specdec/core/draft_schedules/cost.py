"""The cost rule: a node is drafted while its expected tokens are worth its seconds.

Let R be the tokens per second of decoding so far. A node whose path is accepted with probability P brings P tokens and
costs c seconds more; it raises R exactly when P >= R * c (Dinkelbach's condition for the best ratio). P is estimated
from earlier guesses by their confidence (`Acceptance`), c from the seconds of passes (`Seconds`). Where nothing pays,
and where drafting lost though it was to pay, it waits (`Pause`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from specdec.core.budget import SIBLINGS, Budget
from specdec.core.draft_schedules.estimates import Acceptance, LinearFit
from specdec.core.draft_schedules.fixed import MOST_NODES, ScheduleSetup, check_nodes
from specdec.core.draft_schedules.pause import Pause
from specdec.core.draft_schedules.seconds import Seconds, everyone_in, is_noticed, was_tried

if TYPE_CHECKING:
    from typing_extensions import Self

    from specdec.core.drafts import SequenceView
    from specdec.core.outcome import Round, SequenceRound

WIDEST = 32
"""The most nodes that one draft pass continues, where the options name no number."""
_DRAFT_PASSES = 15  # trees are used where a target pass costs as much as this many draft passes
_CARRIED = 0.1  # weight of the last request's gain in the next one
_NOTHING = Budget(0)
_GROWTH = 4  # a tree has at most this many times the nodes of the widest recent pass


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


_IN_MEMORY = _Prior(0.3, 0.1, 0.02, 8.0, 100)
# A pass over offloaded weights hardly takes longer for more nodes, and its seconds vary too much to conclude otherwise
# from a few passes.
_OFFLOADED = _Prior(0.05, 0.01, 0.003, 64.0, 30)


@dataclass(frozen=True)
class Cost:
    """Drafts while it raises tokens per second (see the module); where nothing pays, it tries ever more rarely.

    `k` bounds the tokens of a path, `branches` the nodes that one draft pass continues. Without `branches`, texts get
    trees with up to `widest` branches where target passes are dear beside nodes and draft passes, and chains elsewhere.
    `offloaded`: a target pass reads weights that are not in memory.

    The other fields are what was learned; `after` adds to it, and `of` takes it along to the next request. `tokens`:
    what all sequences gained of late; `plain_tokens`: what plain rounds gain in the same seconds.
    """

    k: int = 32
    branches: int | None = None
    widest: int | None = None
    offloaded: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: Seconds = field(default_factory=Seconds)
    pause: Pause = field(default_factory=Pause)
    tokens: float = 0.0
    plain_tokens: float = 0.0

    takes_threshold: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_nodes(self.k, self.max_branches)

    @classmethod
    def of(cls, setup: ScheduleSetup) -> Self:
        """It begins with what the last request of its family learned, and little of that one's rate: texts differ."""
        k, last = setup.tokens_or(cls.k), setup.learned if isinstance(setup.learned, Cost) else cls()
        passes, prior = last.seconds.passes, _OFFLOADED if setup.offloaded else _IN_MEMORY
        if not passes.weight:
            passes = LinearFit(steepness=prior.steepness, trust=prior.trust)
        return cls(
            k=k,
            branches=setup.branches,
            widest=max(min(WIDEST, MOST_NODES // k), 1) if setup.trees else None,
            offloaded=setup.offloaded,
            acceptance=last.acceptance,
            seconds=last.seconds._replace(passes=passes, other_seqs=0, drafting_seqs=0),
            pause=last.pause.fresh(),
            tokens=_CARRIED * last.tokens,
            plain_tokens=_CARRIED * last.plain_tokens,
        )

    @property
    def max_tokens(self) -> int:
        return self.k

    @property
    def max_branches(self) -> int:
        return self.branches or self.widest or 1

    # deciding

    def budgets(self, seqs: Sequence[SequenceView]) -> list[Budget]:
        """One budget per sequence: with limit 0 while drafting waits, and 1 where it is tried again."""
        return [self._budget_of(len(seqs))] * len(seqs)

    def _budget_of(self, seqs: int) -> Budget:
        seconds, pause = self.seconds, self.pause
        everyone, drafting = seconds.shared(seqs)
        if not self.is_measured:
            draft_cost, node_cost = self._prior.draft_cost, self._prior.verify_cost
            if self.acceptance.mean < draft_cost + node_cost:  # so far, as while prompts are read
                return self._budget(1, 0.0, 0.0)  # to measure costs: the draft may be free
            return self._budget(self.k, everyone * draft_cost, node_cost)
        if pause.skips_rule or pause.is_suspension or seconds.wants_plain_round(self.acceptance.mean):
            return _NOTHING
        if not self._pays(seqs):
            return self._budget(1, 0.0, 0.0) if pause.is_over else _NOTHING
        gain = max(self.tokens / self.plain_tokens if self.plain_tokens else 1.0, 1.0)
        rate = gain * everyone / seconds.plain_round(everyone)
        # Only the slowest source asks before each pass; text drafts have no passes.
        lines = [line for line in seconds.drafts.values() if line.is_measured]
        dearest = max(lines, key=lambda line: line.at(drafting))
        return self._budget(self.k, rate * dearest.at(0), rate * (seconds.passes.slope + dearest.slope), gain)

    def _budget(self, limit: int, pass_cost: float, node_cost: float, pace: float = 1.0) -> Budget:
        # A try of a single token needs no tree.
        if self.branches or not self.widest or limit <= 1 or not self._nodes_are_cheap:
            branches = self.branches or (1 if self.widest else None)
            siblings = (self.widest or 0) > SIBLINGS and not self.branches and node_cost > 0
            return self.acceptance.budget(limit, pass_cost, node_cost, branches, pace=pace, siblings=siblings)
        # The cost of a wide pass is unknown until one was measured, so trees grow step by step.
        nodes = int(_GROWTH * self.seconds.widest_nodes)
        branches = min(self.widest, max(2, nodes // limit))
        limit = min(limit, max(nodes // branches, 4))
        return self.acceptance.budget(limit, pass_cost, node_cost, branches, pace=pace)

    @property
    def _nodes_are_cheap(self) -> bool:
        """Whether trees may pay: their nodes, and draft passes over several of them, are cheap beside a target pass."""
        if not self.is_measured:
            return False
        seconds = self.seconds
        draft_pass = min(line.at(1) for line in seconds.drafts.values())
        dear = max(self._prior.free_nodes * seconds.passes.slope, _DRAFT_PASSES * draft_pass)
        return seconds.passes.at(seconds.roots) >= dear

    @property
    def _prior(self) -> _Prior:
        return _OFFLOADED if self.offloaded else _IN_MEMORY

    @property
    def is_measured(self) -> bool:
        """Whether the seconds of passes of target and draft are known."""
        return self.seconds.is_measured

    def _pays(self, seqs: int) -> bool:
        """Whether drafting is predicted to be faster than plain decoding."""
        return self.seconds.pays(seqs, self.k, self.acceptance.mean)

    # learning

    def after(self, round: Round) -> Self:
        """With this round's outcomes, seconds and rate; of one that reads a text, only the draft's outcomes."""
        pause = self.pause
        if pause.skips_rule and self.seconds.adds_nothing(round):
            return self._with(pause=pause.after_plain(round.seconds))
        everyone, acceptance = everyone_in(round), self.acceptance
        is_try, takes_time = was_tried(round), is_noticed(round)
        for seq in round.seqs:
            # A slow draft with nothing to propose counts as one that was wrong.
            missed = takes_time and bool(seq.source) and not seq.depth
            acceptance = acceptance.after(seq.tested, seq.levels or float(missed))
        if takes_time:
            pause = pause._replace(reading=pause.reading + round.draft_seconds)
        if any(seq.prefill for seq in everyone):
            pause, seconds = pause._replace(rounds=0), self.seconds.after_reading(round)
            if not (is_try or any(seq.prefill for seq in round.seqs)):
                pause = pause.after_plain(round.seconds)
            learned = self._with(acceptance=acceptance, seconds=seconds, pause=pause)
            return learned._after_try(round) if is_try else learned
        if len(round.others) != self.seconds.other_seqs:
            pause = pause._replace(rounds=0)
        learned = self._with(acceptance=acceptance, seconds=self.seconds.after(round), pause=pause)
        if is_try:
            learned = learned._after_try(round)._with_verdict(round)
        else:
            learned = learned._with(pause=pause.after_plain(round.seconds))
        count, tokens = len(everyone), _tokens(everyone)
        plain_tokens = round.seconds * count / learned.seconds.plain_round(count)
        return learned._with(tokens=0.9 * self.tokens + tokens, plain_tokens=0.9 * self.plain_tokens + plain_tokens)

    def _with(self, **values: Any) -> Self:
        """With these values; ten times as fast as `replace`."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **values)
        return changed

    def _after_try(self, round: Round) -> Self:
        """With the pause that follows a round with a draft."""
        right = any(seq.accepted for seq in round.seqs)
        if not self.is_measured or self._pays(len(round.seqs)):
            return self._with(pause=self.pause.stop(right=right))
        price = sum(seq.drafted for seq in round.seqs) * self.seconds.passes.slope
        plain_round = self.seconds.plain_round(len(everyone_in(round)))
        return self._with(pause=self.pause.start(right=right, price=price, plain_round=plain_round))

    def _with_verdict(self, round: Round) -> Self:
        """With the verdict on drafting, by its measured and not its predicted gain."""
        if not self.seconds.plain.weight:
            return self
        everyone = everyone_in(round)
        plain_round = self.seconds.plain_round(len(everyone))
        brought = plain_round * _tokens(everyone) / len(everyone)
        loss = round.seconds - brought if any(seq.depth for seq in everyone) else round.draft_seconds
        return self._with(pause=self.pause.judged(loss / plain_round, plain_round))


def _tokens(seqs: Sequence[SequenceRound]) -> int:
    return sum(len(seq.steps) for seq in seqs)
