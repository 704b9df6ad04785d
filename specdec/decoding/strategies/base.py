"""What the one-sequence strategies share: from genuine target logits to processed scores, and the step that
keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specdec.core.drafts import BranchRule, DraftRule
from specdec.core.rounds import SequenceView
from specdec.core.tree import Scores, Step, TopTokens
from specdec.decoding import device_reads, noise
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedyRule, process, process_all
from specdec.decoding.stopping import Stopping
from specdec.options.generate import Options

SMALL = 1 << 16
"""Logits of a round that are looked at all at once, as that costs less than one call for each."""


@dataclass(frozen=True, kw_only=True)
class RowSetup:
    """What the strategy of one sequence is made from.

    `options` are settled: lengths and ids are known. `prompt` are the sequence's ids, the first `padding` of them
    padding that is not in the sequence's text. `width` is the target's vocabulary, `seed` the sequence's own.
    `guidance_scale` is None where no unconditional sequence runs beside this one.
    """

    options: Options
    processors: Processors
    stop: Stopping
    width: int
    seed: int = 0
    prompt: Sequence[int] = ()
    padding: int = 0
    pad_id: int = 0
    guidance_scale: float | None = None

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that may follow the prompt."""
        return (self.stop.max_length or 0) - (len(self.prompt) - self.padding)

    @property
    def end_id(self) -> int:
        """The token that is written where a text ends."""
        return (self.options.eos_ids or [0])[0]

    @property
    def common(self) -> dict[str, Any]:
        """What every strategy takes as it is, besides processors."""
        return {
            "width": self.width,
            "guidance_scale": self.guidance_scale,
            "keep_scores": bool(self.options.output_scores),
            "keep_logits": bool(self.options.output_logits),
        }


@dataclass(frozen=True, eq=False, repr=False)
class StrategyBase:
    """What all strategies are made of.

    `width` is the target's vocabulary, to which draft logits are cropped or padded. `guidance_scale` combines the
    target's logits with those of the unconditional sequence before all processors; `keep_scores` and `keep_logits` put
    copies of the processed and of the target's own logits into every step.
    """

    processors: Processors
    _: KW_ONLY
    width: int | None = None
    guidance_scale: float | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    name: ClassVar[str]
    needs_hidden: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.processors!r})"

    @property
    def rule(self) -> DraftRule | None:
        """How a draft guesses so that it tends to agree: unless a subclass knows better, its likeliest token."""
        return GreedyRule(self.processors.drafting, self.width)

    def guided(self, logits: Tensor, unconditional: Tensor | None) -> Tensor:
        """`logits` `[..., vocab]`, away from the unconditional ones where there is guidance (arXiv 2306.17806)."""
        if unconditional is None or self.guidance_scale is None:
            return logits
        known = torch.log_softmax(unconditional.float(), dim=-1)
        return self.guidance_scale * (torch.log_softmax(logits.float(), dim=-1) - known) + known


@dataclass(frozen=True, eq=False, repr=False)
class TextStrategy(StrategyBase):
    """Base of the strategies that follow one text.

    `seed` is the sequence's own. `ranked` puts the log-probability of its token under the target, before all
    processors, into every step, and `top` those of so many likeliest tokens too. A subclass says its `name` and which
    options it serves.
    """

    seed: int = 0
    _: KW_ONLY
    ranked: bool = False
    top: int | None = None
    is_search: ClassVar[Literal[False]] = False

    @classmethod
    def of(cls, setup: RowSetup) -> TextStrategy:
        """The strategy of one sequence."""
        top = setup.options.top_logprobs
        ranked = setup.options.num_samples is not None or top is not None
        return cls(setup.processors, setup.seed, ranked=ranked, top=top, **setup.common)

    @property
    def keeps(self) -> bool:
        """Whether a step holds more than its token."""
        return self.keep_scores or self.keep_logits or self.ranked

    @property
    def branching(self) -> BranchRule:
        """The rule guesses trees too."""
        rule: Any = self.rule
        return rule

    def choose(self, seq: SequenceView, new: list[int], scores: Scores, node: int, processed: Tensor) -> int:
        """The token after `node`, from the processed logits `[vocab]` there; for logits that are local."""
        raise NotImplementedError

    def choose_all(self, seq: SequenceView, scores: Scores, processed: Tensor) -> Tensor:
        """The tokens `[nodes]` after all nodes that have `processed` logits `[nodes, vocab]`; nothing is read.

        A token below 0 stands for an error that is raised if the walk comes there (`noise.checked`).
        """
        raise NotImplementedError

    def advance(self, seq: SequenceView, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        processed = self.processed(seq, new, scores, node)
        if self.reads_once(scores):
            token = noise.checked(self._decided(seq, scores)[0][node - scores.first])
        else:
            token = self.choose(seq, new, scores, node, processed)
        return self.step(token, scores, node, processed)

    def reads_once(self, scores: Scores) -> bool:
        """Whether all nodes of the round are decided together, as each look at a result would wait for the device.

        Processors that may not be asked about text that never comes true are asked as the walk goes.
        """
        return not device_reads.is_local(scores.logits) and self.processors.pure

    def processed(self, seq: SequenceView, new: Sequence[int], scores: Scores, node: int) -> Tensor:
        """The target's logits `[vocab]` after `node`, guided and processed, float32; read only."""
        at = node - scores.first
        guides = scores.unconditional is not None and self.guidance_scale is not None
        if not (len(self.processors) or guides):
            return scores.logits[at].float()
        # One call for all nodes may cost less than one for each that the walk comes to.
        is_small = not self.processors.reads_ids and scores.logits.numel() <= SMALL
        if is_small or self.reads_once(scores):
            return self.all_processed(seq, scores)[at]
        unconditional = None if scores.unconditional is None else scores.unconditional[at]
        return process(self.processors, seq, new, self.guided(scores.logits[at], unconditional))

    def all_processed(self, seq: SequenceView, scores: Scores) -> Tensor:
        """The same of all nodes that have logits, `[nodes, vocab]`, worked out once in a round."""
        if "processed" not in scores.cache:
            guided = self.guided(scores.logits, scores.unconditional)
            scores.cache["processed"] = process_all(self.processors, seq, paths(scores), guided)
        found: Tensor = scores.cache["processed"]
        return found

    def _decided(self, seq: SequenceView, scores: Scores) -> tuple[list[int], list[float] | None]:
        """The tokens after all nodes, and their log-probabilities if they are `ranked`, read once in a round."""
        if "decided" not in scores.cache:
            tokens = self.choose_all(seq, scores, self.all_processed(seq, scores))
            if not self.ranked:
                scores.cache["decided"] = tokens.tolist(), None
            else:
                own, at = scores.logits.float(), tokens.clamp(min=0).to(scores.logits.device)[:, None]
                read, log_probs = device_reads.read(tokens.to(own.device), own.gather(-1, at)[:, 0] - own.logsumexp(-1))
                scores.cache["decided"] = device_reads.as_ints(read), log_probs
        found: tuple[list[int], list[float] | None] = scores.cache["decided"]
        return found

    def step(self, token: int, scores: Scores, node: int, processed: Tensor) -> Step:
        """The step that emits `token`, with copies of what was asked to be kept."""
        if not self.keeps:
            return Step(token, node)
        logits = scores.logits[node - scores.first].float()
        own = logits.clone() if self.keep_logits else None
        log_prob = self._log_prob(token, scores, node, logits) if self.ranked else None
        top = None if self.top is None else top_tokens(logits, self.top)
        return Step(token, node, own, processed.clone() if self.keep_scores else None, log_prob, top)

    def _log_prob(self, token: int, scores: Scores, node: int, logits: Tensor) -> float:
        tokens, log_probs = scores.cache.get("decided", (None, None))
        if log_probs is not None and tokens[node - scores.first] == token:
            known: float = log_probs[node - scores.first]
            return known
        if "own" in scores.cache:  # a copy near at hand
            logits = scores.cache["own"][node - scores.first]
        return float(logits[token] - logits.logsumexp(-1))


def top_tokens(logits: Tensor, count: int) -> TopTokens:
    """The `count` likeliest tokens of `logits` `[vocab]`."""
    values, tokens = logits.topk(min(count, len(logits)))
    return TopTokens(tokens.tolist(), (values - logits.logsumexp(-1)).tolist())


def paths(scores: Scores) -> list[list[int]]:
    """For every node that has logits, the tokens after the sequence's text that lead to it, its own included."""
    tree, found = scores.tree, {scores.first: list[int]()}
    for node in range(scores.first + 1, len(tree)):
        found[node] = [*found[tree.parents[node]], tree.tokens[node]]
    return list(found.values())
