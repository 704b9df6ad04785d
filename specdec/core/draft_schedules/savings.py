"""What a call's rounds with a draft saved beside rounds without one, by what its schedule measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from specdec.core.draft_schedules.cost import Cost
from specdec.core.draft_schedules.fixed import Schedule

if TYPE_CHECKING:
    from specdec.core.outcome import Round


class Savings:
    """The seconds of a call's rounds with a draft, and the plain rounds that would bring as many tokens."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._plain_rounds = Counter[int]()  # by the sequences that share them
        self._passes = Counter[int]()  # of rounds with a draft, by their nodes
        self._pass_seconds = 0.0

    def add(self, round: Round) -> None:
        """Notes a round."""
        if any(seq.prefill for seq in round.seqs) or not any(seq.depth for seq in round.seqs):
            self._seconds += round.draft_seconds
            return
        self._seconds += round.seconds
        self._passes[round.nodes] += 1
        self._pass_seconds += round.verify_seconds + round.select_seconds
        longest = max(len(seq.steps) for seq in round.seqs)
        self._plain_rounds[len(round.seqs) + len(round.others)] += longest

    def by(self, schedule: Schedule) -> float:
        """The seconds saved, below 0 where drafting took more; 0 where `schedule` measured no plain rounds."""
        if not isinstance(schedule, Cost) or not schedule.seconds.plain.weight:
            return 0.0
        seconds = schedule.seconds
        plain = sum(seconds.plain_round(seqs) * rounds for seqs, rounds in self._plain_rounds.items())
        usual = sum(seconds.passes.at(nodes) * count for nodes, count in self._passes.items())
        # Beside other programs, plain rounds would have taken longer, too.
        return plain * (self._pass_seconds / usual if usual else 1.0) - self._seconds
