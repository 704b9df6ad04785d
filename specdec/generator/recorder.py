"""Counts of a request, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.core.rounds import Round, SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.stats import Stats


class Recorder:
    """Collects the rounds of one request; sequences are named by their ids."""

    def __init__(self) -> None:
        self._rounds: dict[int, list[SequenceRound]] = {}
        self._seconds = [0.0, 0.0, 0.0]  # of drafting, verification, selection

    def add(self, round: Round) -> None:
        """Adds one round."""
        for phase, seconds in enumerate((round.draft_seconds, round.verify_seconds, round.select_seconds)):
            self._seconds[phase] += seconds
        for seq in round.seqs:
            self._rounds.setdefault(seq.id, []).append(seq)

    def tokens(self, ids: Sequence[int]) -> list[list[int]]:
        """The new tokens of each sequence."""
        return [[step.token for round in self._rounds.get(id_, ()) for step in round.steps] for id_ in ids]

    def drafted(self, ids: Sequence[int]) -> list[list[bool]]:
        """Which of its new tokens the draft guessed, for each sequence."""
        return [
            [step < round.accepted for round in self._rounds.get(id_, ()) for step in range(len(round.steps))]
            for id_ in ids
        ]

    def finish_reasons(self, ids: Sequence[int]) -> list[str]:
        """Why each sequence ended; "cancelled" where it was cut off."""
        return [_finish_reason(self._rounds.get(id_, ())) for id_ in ids]

    def stats(self, seqs: Sequence[RunningSequence], **known: Any) -> Stats:
        """Statistics of the request and of each sequence; `known` are fields counted elsewhere."""
        per_row = tuple(_stats(self._rounds.get(seq.id, []), seq.cached_prompt_tokens) for seq in seqs)
        draft, verify, select = self._seconds
        drafted = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        summed = ("num_new_tokens", "cached_prompt_tokens", *drafted)
        joined = ("per_step_drafted", "per_step_accepted")
        counts: dict[str, Any] = {name: sum(getattr(row, name) for row in per_row) for name in summed}
        counts |= {name: tuple(item for row in per_row for item in getattr(row, name)) for name in joined}
        counts |= {"draft_seconds": draft, "verify_seconds": verify, "select_seconds": select}
        return Stats(per_row=per_row, **counts, **known)


def _stats(rounds: Sequence[SequenceRound], cached: int) -> Stats:
    """The statistics of one sequence."""
    drafted = [round.drafted for round in rounds if round.drafted]
    accepted = [round.accepted for round in rounds if round.drafted]
    return Stats(
        num_new_tokens=sum(len(round.steps) for round in rounds),
        cached_prompt_tokens=cached,
        num_target_passes=len(rounds),
        num_spec_steps=len(drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        per_step_drafted=tuple(drafted),
        per_step_accepted=tuple(accepted),
        finish_reasons=(_finish_reason(rounds),),
    )


def _finish_reason(rounds: Sequence[SequenceRound]) -> str:
    return next((round.finish for round in rounds if round.finish), "cancelled")
