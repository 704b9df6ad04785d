"""What strategies share: from the target's logits to processed scores, and the step that keeps them.

Greedy decoding, the plainest strategy, is at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec import kernels
from specdec.core.drafts import Sampler, SequenceView
from specdec.core.strategies import Advance, View
from specdec.core.tree import Step, TopTokens
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedySampler, first_best, process
from specdec.decoding.stopping import Stopping
from specdec.options.generate import Options


@dataclass(frozen=True, kw_only=True)
class StrategySetup:
    """What one sequence's strategy is made from.

    `options`: with all defaults filled in. `prompt`: the sequence's ids, of which the first `padding` are padding that
    its text lacks. `seed`: the sequence's seed.
    """

    options: Options
    processors: Processors
    stop: Stopping
    seed: int = 0
    prompt: Sequence[int] = ()
    padding: int = 0
    pad_id: int = 0

    @property
    def end_id(self) -> int:
        return (self.options.eos_ids or [0])[0]

    @property
    def common(self) -> dict[str, Any]:
        return {
            "processors": self.processors,
            "stop": self.stop,
            "guidance_scale": self.options.guidance_scale,
            "keep_scores": bool(self.options.output_scores),
            "keep_logits": bool(self.options.output_logits),
        }


@dataclass(frozen=True, eq=False, repr=False)
class StrategyBase:
    """Base of all strategies.

    `stop` ends a text. `guidance_scale`: combines the logits with the unconditional sequence's logits, before
    processors. `keep_scores`, `keep_logits`: put copies of the processed logits and of the target's logits into every
    step.
    """

    processors: Processors
    _: KW_ONLY
    stop: Stopping = field(default_factory=Stopping)
    guidance_scale: float | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    name: ClassVar[str]
    needs_hidden: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.processors!r})"

    @property
    def sampler(self) -> Sampler | None:
        """How a draft guesses so that it tends to agree: by default, its likeliest token."""
        return GreedySampler(self.processors.drafting)

    def guide(self, logits: Tensor, unconditional: Tensor | None) -> Tensor:
        """Guidance (arXiv 2306.17806): moves `logits` away from `unconditional`, both `[..., vocab]`."""
        if unconditional is None or self.guidance_scale is None:
            return logits
        base = torch.log_softmax(unconditional.float(), dim=-1)
        return self.guidance_scale * (torch.log_softmax(logits.float(), dim=-1) - base) + base


@dataclass(frozen=True, eq=False, repr=False)
class TextStrategy(StrategyBase):
    """Base of the strategies of one text.

    `seed`: the sequence's seed. `ranked`: puts the token's log-probability under the target, before processors, into
    every step; `top`: also the log-probabilities of this many likeliest tokens. A subclass has a `name` and
    `serves(options)`. The state is the scores of all steps, with `keep_scores`.
    """

    seed: int = 0
    _: KW_ONLY
    ranked: bool = False
    top: int | None = None
    is_search: ClassVar[bool] = False
    num_beams: ClassVar[int] = 1

    @classmethod
    def of(cls, setup: StrategySetup) -> TextStrategy:
        top = setup.options.top_logprobs
        ranked = setup.options.num_samples is not None or top is not None
        return cls(seed=setup.seed, ranked=ranked, top=top, **setup.common)

    @property
    def keeps(self) -> bool:
        """Whether a step holds more than its token."""
        return self.keep_scores or self.keep_logits or self.ranked

    def begin(self) -> None:
        """No scores yet."""

    def advance(
        self, seq: SequenceView, state: tuple[Tensor, ...] | None, views: Sequence[View], steps: Sequence[Step]
    ) -> Advance:
        [view], new = views, [step.token for step in steps]
        step = self.emit(seq, new, view.out, view.out.work.first + view.at)
        if step.scores is not None:
            state = (*(state or ()), step.scores[None])
        return Advance(state, [0], [step.token], step, self.stop(seq, [*new, step.token], state))

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, scores: Tensor) -> int:
        """The token after `node`, from its `scores` `[vocab]`: logits after guidance and processors."""
        raise NotImplementedError

    def emit(self, seq: SequenceView, new: list[int], out: Logits, node: int) -> Step:
        """The step with the token after `node`, an index in `out.work.tree`; `new`: this round's earlier tokens."""
        scores = self.scores(seq, new, out, node)
        return self.step(self.choose(seq, new, out, node, scores), out, node, scores)

    def scores(self, seq: SequenceView, new: Sequence[int], out: Logits, node: int) -> Tensor:
        """The target's logits `[vocab]` at `node`, guided and processed, float32; read only."""
        at = node - out.work.first
        if not (len(self.processors) or out.unconditional is not None):
            return out.logits[at].float()
        unconditional = None if out.unconditional is None else out.unconditional[at]
        return process(self.processors, seq, new, self.guide(out.logits[at], unconditional))

    def step(self, token: int, out: Logits, node: int, scores: Tensor) -> Step:
        """The step that emits `token`, with copies of the tensors that it keeps."""
        if not self.keeps:
            return Step(token)
        logits, top = out.logits[node - out.work.first].float(), None
        log_prob = float(logits[token] - logits.logsumexp(-1)) if self.ranked else None
        if self.top is not None:
            values, likeliest = logits.topk(min(self.top, len(logits)))
            top = TopTokens(likeliest.tolist(), (values - logits.logsumexp(-1)).tolist())
        copy = logits.clone() if self.keep_logits else None
        return Step(token, copy, scores.clone() if self.keep_scores else None, log_prob, top)


class Greedy(TextStrategy):
    """Takes the argmax of the processed target logits, the first of equals."""

    name = "greedy"

    @classmethod
    def serves(cls, options: Options) -> bool:
        return not (options.samples or options.num_beams > 1 or options.penalty_alpha)

    def emit(self, seq: SequenceView, new: list[int], out: Logits, node: int) -> Step:
        if self.keeps or out.unconditional is not None:
            return super().emit(seq, new, out, node)
        logits = out.logits[node - out.work.first]
        if not self.processors.items:
            return Step(first_best(logits))
        filters = self.processors.in_numbers([*seq.tokens, *new]) if kernels.available() else None
        if filters is None:
            return super().emit(seq, new, out, node)
        return Step(noise.check_token(kernels.best_token(logits, filters)))

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, scores: Tensor) -> int:
        token = first_best(scores)
        return noise.check_token(noise.EMPTY if scores[token] == -torch.inf else token)
