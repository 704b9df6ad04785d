"""What rounds take: the seconds of draft passes, target passes and whole rounds, measured in earlier rounds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.core.draft_schedules.estimates import LinearFit

if TYPE_CHECKING:
    from specdec.core.outcome import Round, SequenceRound

_ENOUGH = 2.5  # the weight of measured plain rounds that suffices: three of them
_MANY = 2  # times the mean number of sequences in measured plain rounds: more of them are too many to extrapolate to
_NOTICEABLE = 0.02  # the share of a pass above which a draft's time counts even if it proposed nothing


class Seconds(NamedTuple):
    """The seconds of rounds. Several requests may share passes: they count all sequences of a pass.

    `passes` of the target, over nodes; `plain`: whole rounds without a draft, over sequences; `drafts`: draft passes by
    source, over the nodes that all sequences have on a level, and the tokens of their texts that it reads along;
    `other`: a round's seconds that are none of these.

    The rest describes the last rounds. Nodes of one sequence: `roots` without a draft (its live branches),
    `level_nodes` per level of its draft, `widest_nodes` in the widest pass of late. `other_seqs` of other requests, of
    which `drafting_seqs` shared the last draft passes.
    """

    passes: LinearFit = LinearFit()
    plain: LinearFit = LinearFit()
    drafts: Mapping[str, LinearFit] = MappingProxyType({})
    other: float = 0.0
    roots: float = 1.0
    level_nodes: float = 1.0
    widest_nodes: float = 1.0
    other_seqs: int = 0
    drafting_seqs: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether a draft's passes were measured."""
        return any(line.is_measured for line in self.drafts.values())

    def wants_plain_round(self, acceptance: float) -> bool:
        """Whether the next round should have no draft, to measure one: at once where the draft is poor, else later."""
        looks = self.plain.weight
        return looks < _ENOUGH and self.passes.weight > (1.5 if acceptance < 0.6 and not looks else 6 * (looks + 1))

    def plain_round(self, seqs: int) -> float:
        """Seconds of a round without a draft: measured, or predicted by its pass.

        A second sequence may cost far more than a tenth, so of many more sequences than were measured, measured rounds
        tell too many seconds.
        """
        plain = self.plain
        if plain.weight and seqs * plain.weight <= _MANY * plain.nodes:
            return plain.at(seqs)
        predicted = self.passes.at(seqs * self.roots) + self.other
        return min(plain.at(seqs), predicted) if plain.weight else predicted

    def shared(self, seqs: int) -> tuple[int, int]:
        """How many sequences run in the next round, and how many draft, if so many of this schedule do."""
        return seqs + self.other_seqs, seqs + min(self.drafting_seqs, self.other_seqs)

    def pays(self, seqs: int, longest: int, acceptance: float) -> bool:
        """Whether a number of tokens per sequence, at most `longest`, is predicted to beat plain decoding."""
        everyone, drafting = self.shared(seqs)
        seconds = self.plain_round(everyone)
        plain = everyone / seconds
        # One more token for every sequence that drafts, from the cheapest source.
        nodes = drafting * self.level_nodes
        more = nodes * self.passes.slope + min(line.at(nodes) for line in self.drafts.values())
        expected, chance = float(everyone), 1.0
        for k in range(1, longest + 1):
            chance *= acceptance
            expected += drafting * chance
            if expected > plain * (seconds + k * more):
                return True
            if drafting * chance < plain * more:
                return False  # later tokens bring even less
        return False

    def adds_nothing(self, round: Round) -> bool:
        """Whether the round measures nothing new: the same sequences, no draft, about the mean seconds."""
        usual = self.plain.seconds / self.plain.weight if self.plain.weight else 0.0
        return (
            usual / 2 < round.seconds < 2 * usual
            and len(round.others) == self.other_seqs
            and not any(seq.prefill or seq.depth for seq in everyone_in(round))
        )

    def after(self, round: Round) -> Seconds:
        """With this round, in which no prompt was read."""
        everyone = everyone_in(round)
        count, drafted = len(everyone), sum(seq.drafted + seq.siblings for seq in everyone)
        # Choosing tokens takes longer for more nodes, too.
        pass_seconds = round.verify_seconds + round.select_seconds
        changes: dict[str, Any] = {
            "passes": self.passes.add(round.nodes, pass_seconds),
            "other": _fading(self.other, round.seconds - round.draft_seconds - pass_seconds),
            "roots": _fading(self.roots, (round.nodes - drafted) / count),
            "widest_nodes": max(round.nodes / count, 0.95 * self.widest_nodes),
            "other_seqs": len(round.others),
        }
        if not any(seq.depth for seq in everyone):
            changes["plain"] = self.plain.add(count, round.seconds - round.draft_seconds)
        elif self.plain.weight < _ENOUGH and not any(seq.depth for seq in round.seqs):
            # Other requests may draft in every round: without their nodes, it would have been a plain one.
            saved = pass_seconds - changes["passes"].at(round.nodes - drafted)
            changes["plain"] = self.plain.add(count, round.seconds - round.draft_seconds - saved)
        sources, drafts = _sources(round), self.drafts
        if len(drafts) > 1:
            drafts = {name: line if name in sources else line.idle() for name, line in drafts.items()}
        changes["drafts"] = drafts
        if was_tried(round):
            changes["drafts"] = self._replace(drafts=drafts)._drafts_with(round)
            # Sequences of other requests count where the same source proposed for them.
            changes["drafting_seqs"] = sum(seq.depth > 0 and seq.source in sources for seq in round.others)
        if levels := sum(seq.depth for seq in round.seqs):
            nodes = sum(seq.drafted for seq in round.seqs)
            changes["level_nodes"] = _fading(self.level_nodes, nodes / levels)
        return self._replace(**changes)

    def after_reading(self, round: Round) -> Seconds:
        """With this round, in which a text was read: a draft pass took at most the seconds of drafting."""
        return self._replace(drafts=self._drafts_with(round, read=True)) if was_tried(round) else self

    def _drafts_with(self, round: Round, *, read: bool = False) -> Mapping[str, LinearFit]:
        """`drafts` with this round's draft passes; of several sources, only the longest draft's counts.

        A draft that proposed nothing counts as one pass. If a text was `read`, only what makes passes cheaper counts.
        """
        sources, everyone = _sources(round), everyone_in(round)
        longest = max(everyone, key=lambda seq: (seq.depth, seq.source in sources))
        source, levels = longest.source, max(longest.depth, 1)
        if source not in sources:
            return self.drafts
        nodes = sum(max(seq.drafted, 1) + seq.read for seq in everyone if seq.source == source) / levels
        fit, seconds = self.drafts.get(source, LinearFit()), round.draft_seconds / levels
        if read and (not fit.weight or seconds >= fit.at(nodes)):
            return self.drafts
        return {**self.drafts, source: fit.add(nodes, seconds)}


def everyone_in(round: Round) -> list[SequenceRound]:
    """All sequences that shared the passes of a round."""
    return [*round.seqs, *round.others]


def is_noticed(round: Round) -> bool:
    """Whether drafting took a noticeable share of the round."""
    return round.draft_seconds > _NOTICEABLE * (round.verify_seconds + round.select_seconds)


def was_tried(round: Round) -> bool:
    """Whether own sequences had a proposal, or a draft took noticeable time without one."""
    return any(seq.depth for seq in round.seqs) or (is_noticed(round) and any(seq.source for seq in round.seqs))


def _sources(round: Round) -> set[str]:
    """The sources of the own sequences' proposals; if all are empty, the sources that were asked."""
    return {seq.source for seq in round.seqs if seq.depth} or {seq.source for seq in round.seqs if seq.source}


def _fading(old: float, new: float) -> float:
    """A fading mean, which stalls change little (see `LinearFit.add`)."""
    new = max(new, 0.0)  # differences of clocks may round below it
    return new if not old or new < old / 3 else 0.8 * old + 0.2 * min(new, 3 * old)
