"""A call's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_TEXTS = {  # by `exactness`
    "strict": "plain decoding's, bit for bit",
    "exact": "plain decoding's",
    "rounding": "plain decoding's, up to near-ties",
    "row-dependent": "none, as layers see all tokens of a pass",
}

_LOSS = 0.05  # share of a call's time that a draft may lose without a word
_ROUNDS = 20  # rounds with a draft whose passes, beside other programs, take about as long as they say


@dataclass(frozen=True)
class Stats:
    """A call's statistics; counts are sums over rounds and sequences.

    *Mean acceptance length* is 1 + accepted / draft rounds; a draft round is one sequence's part of a target pass over
    guesses. *Target passes per token* counts every pass. A search's tokens are its steps; `lengths` are
    the new tokens of every returned text, and `finish_reasons` say why it ended. `num_draft_tokens` are nodes without
    siblings, which cost no draft pass. `accepted_by_source`: accepted tokens by what guessed them ("suffix", "model",
    "model+suffix": a chain of the model that copies continued). `per_row` has one entry per sequence (a search is one,
    a ranked sample too), whose passes are those after which it had new tokens. `cached_prompt_tokens` were read in an
    earlier call or for another sequence. Seconds are sums over rounds, which sequences of other calls may have shared;
    `first_token_seconds` end with the first new token, and `loading_seconds`, 0 for a caller's own models, were before
    the call. `saved_seconds`: what rounds with a draft saved beside rounds without one, below 0 where the draft took
    more; 0 where no schedule measured both. `exactness` compares the text with the same call's text without a draft:
    "strict" and "exact": equal; "rounding": equal but for near-ties in half precision; "row-dependent": it may differ,
    since layers of the target look at all tokens of a pass.
    """

    num_new_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_target_passes: int = 0
    num_draft_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    per_round_drafted: Sequence[int] = ()
    per_round_accepted: Sequence[int] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    select_seconds: float = 0.0
    saved_seconds: float = 0.0
    first_token_seconds: float = 0.0
    loading_seconds: float = 0.0
    finish_reasons: Sequence[str] = ()
    lengths: Sequence[int] = ()
    per_row: Sequence[Stats] = field(default=(), repr=False)
    settings: dict[str, str] = field(default_factory=dict)
    exactness: str = "exact"

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens per draft round."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_draft_rounds if self.num_draft_rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """`[n]`: how many draft rounds accepted exactly n draft tokens."""
        counts = Counter(self.per_round_accepted)
        return [counts[n] for n in range(max(counts, default=-1) + 1)]

    @property
    def target_passes_per_token(self) -> float:
        """Target forward passes, prefill included, per new token of all sequences; each reads the weights once."""
        return self.num_target_passes / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def other_seconds(self) -> float:
        """Wall time outside drafting, verification and selection."""
        return self.seconds - self.draft_seconds - self.verify_seconds - self.select_seconds

    @property
    def draft_advice(self) -> str:
        """That the draft took longer than it saved, and what to do; empty where it did not, or nobody named it.

        It is empty too where the passes of a few rounds lost the time, and not the draft's guessing, and where the call
        was interrupted.
        """
        lost = -self.saved_seconds
        is_sure = self.num_draft_rounds >= _ROUNDS or self.draft_seconds >= lost / 2
        is_sure &= "interrupted" not in self.finish_reasons
        if self.settings.get("draft_kind") == "form" or lost <= _LOSS * self.seconds or not is_sure:
            return ""
        return f"the draft took {lost:.2f} s more than it saved: `draft='none'` leaves it out"

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences per second of wall time."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    @property
    def table(self) -> list[tuple[str, str, str]]:
        """Rows of a name, a figure and more words about it."""
        sources = "".join(f", {name} {count}" for name, count in self.accepted_by_source.items())
        histogram = ", ".join(
            f"{accepted}: {count}" for accepted, count in enumerate(self.acceptance_histogram) if count
        )
        speculative = (
            (
                "accepted",
                str(self.num_accepted_draft_tokens),
                f"{self.draft_acceptance_rate:.0%} of {self.num_draft_tokens} drafted{sources}",
            ),
            (
                "mean acceptance length",
                f"{self.mean_acceptance_length:.2f}",
                f"{self.num_draft_rounds} rounds with guesses",
            ),
            ("acceptance histogram", "", histogram),
            ("saved time", f"{self.saved_seconds:.3f} s" if self.saved_seconds else "not measured", self.draft_advice),
        )
        first = [("first token", f"{self.first_token_seconds:.2f} s", f"models loaded in {self.loading_seconds:.1f} s")]
        parts = {name: getattr(self, f"{name}_seconds") for name in ("draft", "verify", "select", "other")}
        return [
            ("new tokens", str(self.num_new_tokens), ""),
            ("ended by", "", ", ".join(self.finish_reasons)),
            *(first if self.first_token_seconds else ()),
            ("tokens per second", f"{self.tokens_per_second:.1f}", f"in {self.seconds:.2f} s"),
            ("target passes", str(self.num_target_passes), f"{self.target_passes_per_token:.2f} per token"),
            *(speculative if self.num_draft_rounds else ()),
            *((f"{name} time", f"{part:.3f} s", f"{part / (self.seconds or 1):.0%}") for name, part in parts.items()),
            ("guaranteed text", "", _TEXTS[self.exactness]),
            ("settings", "", ", ".join(f"{name} {value}" for name, value in self.settings.items())),
        ]

    def __str__(self) -> str:
        """The table, in columns."""
        names, figures = (max(len(row[at]) for row in self.table) for at in (0, 1))
        return "\n".join(
            f"{name:<{names}}  {figure:>{figures}}  {words}".rstrip() for name, figure, words in self.table
        )


def total(parts: Sequence[Stats]) -> Stats:
    """The statistics of several calls of one generator: sums of counts and seconds, rows one after the other, and
    the first token of the first call."""
    joined: dict[str, Any] = {}
    for stat in fields(Stats) if parts else ():
        values = [getattr(part, stat.name) for part in parts]
        if stat.name in ("first_token_seconds", "loading_seconds"):
            joined[stat.name] = values[0]
        elif stat.name == "accepted_by_source":
            joined[stat.name] = dict(sum(map(Counter, values), Counter()))
        elif isinstance(stat.default, tuple):
            joined[stat.name] = tuple(item for value in values for item in value)
        elif isinstance(stat.default, int | float):
            joined[stat.name] = sum(values)
        else:
            joined[stat.name] = values[-1]
    return Stats(**joined)
