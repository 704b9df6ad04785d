"""Contrastive search: the likeliest few tokens, less their similarity to the text (arXiv 2202.06417).

Semantics of transformers 4.49. The candidates of the next token are leaves of one search: the choice between them
needs the target's last hidden state at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from specdec.core.drafts import SequenceView
from specdec.core.strategies import Advance, View
from specdec.core.tree import Step
from specdec.decoding.samplers import process
from specdec.decoding.strategies.base import StrategyBase, StrategySetup
from specdec.decoding.strategies.beam_scoring import Beam
from specdec.options.generate import Options


@dataclass(frozen=True)
class Contrast:
    """The state of a search: the text so far, and the candidates for the next token.

    `context` `[length, width]`: the directions of all hidden states. `probs` `[candidates]` float32: the candidates'
    probabilities. `step`: logits and scores of the next token's step. `scores`: all steps' scores, if kept.
    """

    tokens: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    context: Tensor | None = None
    probs: Tensor | None = None
    step: Step | None = None
    scores: tuple[Tensor, ...] = ()
    finish: str | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def leaf_scores(self) -> list[float]:
        return [0.0] * max(len(self.candidates), 1)

    @property
    def finished(self) -> tuple[Beam, ...]:
        """The text, as the only hypothesis."""
        return (Beam(self.tokens, reason=self.finish or ""),)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Contrastive(StrategyBase):
    """Picks the best of `top_k` by (1 - `penalty_alpha`) * probability - `penalty_alpha` * largest cosine.

    `keep_traces`: the call returns hidden states or attentions.
    """

    top_k: int
    penalty_alpha: float
    keep_traces: bool = False
    num_beams: ClassVar[int] = 1
    name: ClassVar[str] = "contrastive"
    is_search: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = True
    sampler: ClassVar[None] = None

    @classmethod
    def serves(cls, options: Options) -> bool:
        return bool(options.penalty_alpha)

    @classmethod
    def of(cls, setup: StrategySetup) -> Contrastive:
        o = setup.options
        traces = bool(o.output_hidden_states or o.output_attentions)
        return cls(top_k=o.top_k or 2, penalty_alpha=o.penalty_alpha or 0.0, keep_traces=traces, **setup.common)

    def begin(self) -> Contrast:
        return Contrast()

    def advance(self, seq: SequenceView, state: Contrast, views: Sequence[View], steps: Sequence[Step]) -> Advance:
        """Emits a computed candidate, and chooses the candidates of the next token; the first step only chooses."""
        if state.context is None:
            after = self._ask(seq, Contrast(context=_directions(views[0])), views[0])
            return Advance(after, [0] * len(after.candidates), list(after.candidates), None, shown=self._shown(0))
        ahead = torch.cat([_directions(view) for view in views])
        step, scores = state.step, state.scores
        assert step is not None
        assert state.probs is not None
        likeness = (ahead @ state.context.T).max(dim=-1).values.cpu()
        # The best candidate, of equals the likeliest.
        pick = int(((1 - self.penalty_alpha) * state.probs - self.penalty_alpha * likeness).argmax())
        tokens = (*state.tokens, state.candidates[pick])
        step = Step(tokens[-1], step.logits, step.scores)
        if step.scores is not None:
            scores = (*scores, step.scores[None])
        finish = self.stop(seq, _new(seq, tokens), scores or None)
        context = torch.cat([state.context, ahead[pick : pick + 1]])
        after = Contrast(tokens, context=context, scores=scores, finish=finish)
        if finish is not None:
            return Advance(after, [], [], step, finish, ())
        after = self._ask(seq, after, views[pick])
        return Advance(after, [pick] * len(after.candidates), list(after.candidates), step, shown=self._shown(pick))

    def _ask(self, seq: SequenceView, state: Contrast, view: View) -> Contrast:
        """The state with the candidates for its next token, from the target's view at the end of its text."""
        logits = self.guide(view.logits, view.unconditional)
        scores = process(self.processors, seq, _new(seq, state.tokens), logits)
        probs, ids = torch.softmax(scores, dim=-1).topk(min(self.top_k, scores.shape[-1]))
        step = Step(
            -1,
            view.logits.to(torch.float32, copy=True) if self.keep_logits else None,
            scores.clone() if self.keep_scores else None,
        )
        return Contrast(state.tokens, tuple(ids.tolist()), state.context, probs, step, state.scores)

    def _shown(self, leaf: int) -> tuple[int, ...]:
        return (leaf,) if self.keep_traces else ()


def _directions(view: View) -> Tensor:
    """The last hidden states `[nodes, width]` of a view, float32, normalised to length 1."""
    assert view.trace.hidden_states is not None
    return normalize(view.trace.hidden_states[-1].float(), dim=-1)


def _new(seq: SequenceView, tokens: Sequence[int]) -> list[int]:
    """The generated `tokens` that are not yet in the sequence's text."""
    return list(tokens[len(seq.tokens) - seq.prompt_length :])
