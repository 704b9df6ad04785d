"""When a sequence ends; checked after every emitted token, also within a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specdec.core.drafts import SequenceView

_REASONS = (
    (EosTokenCriteria, "eos"),
    (MaxLengthCriteria, "length"),
    (StopStringCriteria, "stop"),
    (MaxTimeCriteria, "time"),
)


def _reason(criterion: object) -> str:
    """The finish reason that a criterion gives: its attribute `reason`, or that of its kind."""
    known = next((reason for kind, reason in _REASONS if isinstance(criterion, kind)), "criteria")
    return str(getattr(criterion, "reason", known))


def _holds(answer: Any) -> bool:
    return bool(answer.any()) if isinstance(answer, Tensor) else bool(answer)


@dataclass(frozen=True)
class Stopping:
    """Ends a sequence at one of `eos_ids`, at `max_length` tokens (with the prompt, without padding), or by a
    criterion.

    `criteria`: transformers' stopping criteria; each gets `ids` `[texts, length]` once per emitted token, in order.
    One may have a `reason`.
    """

    eos_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    criteria: Sequence[Any] | None = None

    def __call__(self, seq: SequenceView, new: list[int], scores: tuple[Tensor, ...] | None = None) -> str | None:
        """Why the sequence ends after the last token of `new`: "eos", "length", "stop", "time", "criteria", a
        criterion's own reason, or None.
        """
        length = len(seq.tokens) + len(new)
        if self.criteria:
            return self.each(new[-1:], length, seq.prefix(new), scores)[0]
        is_full = self.max_length is not None and length >= self.max_length
        return "eos" if new[-1] in self.eos_ids else "length" if is_full else None

    @property
    def reads_ids(self) -> bool:
        """Whether it needs the ids of the whole text."""
        return bool(self.criteria)

    def each(self, tokens: Sequence[int], length: int, ids: Tensor | None, scores: Any = None) -> list[str | None]:
        """Why each of several texts of `length` ends after its last token, or None.

        `ids` `[texts, length]` may be None unless `reads_ids`. Every criterion is called, once for all texts, since it
        may count its calls; the first that holds gives the reason. An end token precedes the criteria, these precede
        the length.
        """
        reasons: list[str | None] = [None] * len(tokens)
        for criterion in self.criteria or ():
            answer = criterion(ids, scores)
            each = answer.tolist() if isinstance(answer, Tensor) and answer.numel() == len(tokens) else None
            ends = each if each is not None else [_holds(answer)] * len(tokens)
            reasons = [_reason(criterion) if r is None and end else r for r, end in zip(reasons, ends, strict=True)]
        full = "length" if self.max_length is not None and length >= self.max_length else None
        return [
            "eos" if token in self.eos_ids else reason or full for token, reason in zip(tokens, reasons, strict=True)
        ]
