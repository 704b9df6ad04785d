"""What the one-row strategies share: from genuine target logits to processed scores, and the step that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.types import Row, Scores, Step


class Processing(Protocol):
    """Logits processors of one row: `(ids [1, length] or None, logits [1, vocab]) -> [1, vocab]` in float32.

    `drafting` are those that may see draft logits; `ids` may be None unless `reads_ids`; `pure` promises that they can
    be asked about the same prefix twice. `groups` are told to those that know of groups of beams.
    """

    @property
    def drafting(self) -> Processing: ...

    @property
    def reads_ids(self) -> bool: ...

    @property
    def pure(self) -> bool: ...

    def __len__(self) -> int: ...

    def __call__(self, ids: Tensor | None, logits: Tensor, **groups: Any) -> Tensor: ...


def process(processors: Processing, row: Row, extra: Sequence[int], logits: Tensor) -> Tensor:
    """Processed `logits` `[vocab]` after the row's text and `extra`, float32; the input is not written to."""
    if not len(processors):
        return logits.float()
    ids = row.prefix(extra) if processors.reads_ids else None
    return processors(ids, logits.unsqueeze(0)).squeeze(0)


def guide(logits: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance on log-probabilities (arXiv 2306.17806), `[..., vocab]` float32."""
    known = torch.log_softmax(unconditional.float(), dim=-1)
    return scale * (torch.log_softmax(logits.float(), dim=-1) - known) + known


@dataclass(eq=False, repr=False)
class Strategy:
    """Base of the one-row strategies; `width` is the target's vocabulary, to which draft logits are cropped or padded.

    `guidance_scale` combines with `scores.unconditional` before all processors; `keep_scores` and `keep_logits` put
    copies of the processed and of the target's own logits into every step, `ranked` the log-probability of its token
    under the target, before all processors. `needs_hidden` asks for hidden states.
    """

    processors: Processing
    _: KW_ONLY
    width: int | None = None
    guidance_scale: float | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    ranked: bool = False
    needs_hidden = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.processors!r})"

    def processed(self, row: Row, new: Sequence[int], scores: Scores, node: int) -> Tensor:
        """The target's logits `[vocab]` after `node`, guided and processed, float32; read only."""
        at = node - scores.first
        logits = scores.logits[at]
        if scores.unconditional is not None and self.guidance_scale is not None:
            logits = guide(logits, scores.unconditional[at], self.guidance_scale)
        return process(self.processors, row, new, logits)

    def step(self, token: int, scores: Scores, node: int, processed: Tensor) -> Step:
        """The step that emits `token`, with copies of what was asked to be kept."""
        if not (self.keep_scores or self.keep_logits or self.ranked):
            return Step(token, node)
        logits = scores.logits[node - scores.first].float()
        log_prob = float(logits[token] - logits.logsumexp(-1)) if self.ranked else None
        own = logits.clone() if self.keep_logits else None
        return Step(token, node, own, processed.clone() if self.keep_scores else None, log_prob)
