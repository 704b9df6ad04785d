"""When a sequence ends; checked after every emitted token, also within a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from specdec.core.drafts import SequenceView

_REASONS = (
    (EosTokenCriteria, "eos"),
    (MaxLengthCriteria, "length"),
    (StopStringCriteria, "stop"),
    (MaxTimeCriteria, "time"),
)
_MOST_BYTES = 4  # bytes of a character, each of which may be a token
_SILENT = 8  # tokens without text that may stand within a stop string


@dataclass(frozen=True)
class Stopping:
    """Ends a sequence at one of `eos_ids`, at `max_length` tokens (with the prompt, without padding), or by a
    criterion.

    `criteria`: transformers' stopping criteria; each gets `ids` `[texts, length]` once per emitted token, in order. A
    criterion's attribute `reason` is the finish reason. Without it, `_REASONS` has the reasons of transformers'
    criteria, and other criteria have "criteria". `forced_ids`: end tokens that the length limit forces as the last
    token; the reason is then "length".
    """

    eos_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    criteria: Sequence[Any] | None = None
    forced_ids: frozenset[int] = frozenset()

    def __call__(self, seq: SequenceView, new: list[int], scores: tuple[Tensor, ...] | None = None) -> str | None:
        """Why the sequence ends after the last token of `new`: a reason as in `_REASONS` or a criterion's, or None."""
        ids = seq.prefix(new) if self.reads_ids else None
        return self.each(new[-1:], len(seq.tokens) + len(new), ids, scores)[0]

    @property
    def reads_ids(self) -> bool:
        """Whether a criterion reads the ids of the whole text."""
        return bool(self.criteria)

    def each(self, tokens: Sequence[int], length: int, ids: Tensor | None, scores: Any = None) -> list[str | None]:
        """Why each of several texts of `length` ends after its last token, or None.

        `ids` `[texts, length]` may be None unless `reads_ids`. Every criterion is called, once for all texts, since it
        may count its calls; the first criterion that holds gives the reason. An end token goes before criteria, and
        criteria before the length.
        """
        reasons: list[str | None] = [None] * len(tokens)
        for criterion in self.criteria or ():
            answer = criterion(ids, scores)
            if isinstance(answer, Tensor) and answer.numel() == len(tokens):
                ends = answer.tolist()
            else:
                ends = [bool(answer.any() if isinstance(answer, Tensor) else answer)] * len(tokens)
            default = next((reason for kind, reason in _REASONS if isinstance(criterion, kind)), "criteria")
            text = str(getattr(criterion, "reason", default))
            reasons = [text if earlier is None and end else earlier for earlier, end in zip(reasons, ends, strict=True)]
        is_full = self.max_length is not None and length >= self.max_length
        eos_ids, otherwise = (self.eos_ids - self.forced_ids, "length") if is_full else (self.eos_ids, None)
        return ["eos" if token in eos_ids else why or otherwise for token, why in zip(tokens, reasons, strict=True)]


class StopTexts:
    """A stopping criterion: one of `stops` is in the text after the prompt; `prompt(ids)` is the prompt's length.

    It decodes only the end of the text. transformers' own criterion reads the whole vocabulary for every call, and a
    stop string may begin in the prompt there.
    """

    reason = "stop"

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], prompt: Callable[[Tensor], int]
    ) -> None:
        self._decode, self._stops, self._prompt = decode, stops, prompt
        self._tail = _MOST_BYTES * max(map(len, stops), default=0) + _SILENT

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Whether each of the texts `ids` `[n, length]` ends here, `[n]`."""
        return torch.tensor([self._ends(text) for text in ids])

    def _ends(self, ids: Tensor) -> bool:
        tail = self._decode(ids[max(len(ids) - self._tail, self._prompt(ids)) :].tolist())
        return any(stop in tail for stop in self._stops)
