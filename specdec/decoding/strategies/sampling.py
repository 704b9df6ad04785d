"""Sampling: coupled, the same text with any draft, or by rejection, the same distribution, by token or by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.core.drafts import Sampler, SequenceView
from specdec.core.tree import Step, Tree
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.samplers import CoupledSampler, DrawnSampler, num_generated
from specdec.decoding.strategies.base import TextStrategy
from specdec.errors import OptionError
from specdec.options.generate import Options


class Coupled(TextStrategy):
    """Samples `argmax(log p + G)` with Gumbel noise G addressed by (seed, position, token id) (arXiv 2408.07978).

    p is the processed target distribution, the position counts generated tokens, and the draft guesses with the same
    G, so that it tends to agree: P(match) >= (1 - TV(p, q)) / (1 + TV(p, q)).
    """

    name = "coupled"

    @classmethod
    def serves(cls, options: Options) -> bool:
        """Sampling by the class's name; coupled sampling is the default."""
        return options.samples and (options.sampling or "coupled") == cls.name

    @property
    def sampler(self) -> Sampler | None:
        return CoupledSampler(self.processors.drafting, seed=self.seed)

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, scores: Tensor) -> int:
        return noise.draw(scores, noise.key(self.seed, noise.COUPLED, num_generated(seq) + len(new)))


class Match(Coupled):
    """Samples as `Coupled` does, the same text for the same seed; the draft guesses its likeliest token."""

    name = "match"

    sampler = TextStrategy.sampler


def draft_distribution(tree: Tree, node: int) -> Tensor | None:
    """The q `[vocab]` that `node` was drawn from; None for a guess."""
    if tree.q is None or not tree.q[node].numel():
        return None
    return tree.q[node]


def drawn_children(tree: Tree, node: int) -> list[tuple[int, Tensor]]:
    """The children of `node` up to the first guess, in order, each with the q that it was drawn from."""
    children = []
    for child in range(node + 1, len(tree)):
        if tree.parents[child] == node:
            if (q := draft_distribution(tree, child)) is None:
                break
            children.append((child, q))
    return children


class Rejection(Coupled):
    """The token rule (arXiv 2211.17192, 2302.01318), with several children per node (arXiv 2305.09781, 2402.12374).

    `tree.q[c]` must be the distribution that child c was drawn from given its earlier siblings, and every drawn child
    must be in the tree. Guesses (`q=None`) are one-hot: a draw from p that equals the guess accepts it, which has the
    same distribution as accepting with probability p[x] and else drawing from p without x. Random numbers depend on the
    seed, the number of tokens generated before the round, and the position in the round.
    """

    name = "rejection"

    @property
    def sampler(self) -> Sampler | None:
        return DrawnSampler(self.processors.drafting, seed=self.seed)

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, scores: Tensor) -> int:
        """The first accepted child's token, or a draw from the residual of p after all children."""
        tree, place, log_p = out.work.tree, (num_generated(seq), len(new)), scores
        for order, (child, q) in enumerate(drawn_children(tree, node)):  # log_p: the residual
            token = tree.tokens[child]
            p = torch.softmax(log_p, dim=-1)
            r = noise.uniform(noise.key(self.seed, noise.ACCEPT, *place, order))
            if r * float(q[token]) < float(p[token]):  # strict: p = 0 never passes; multiplied: q = 0 divides nothing
                return token
            log_p = without_child(1.0, p, q)[1].log()
        return noise.draw(log_p, noise.key(self.seed, noise.DRAW, *place))


@dataclass
class _Stop:
    """A node of the current path: its weight, its remaining `children`, and p `[vocab]` of the tokens after it.

    `log_p`: p as log-probabilities, up to a constant.
    """

    node: int
    weight: float
    children: Iterator[tuple[int, Tensor]]
    log_p: Tensor
    p: Tensor


def child_weight(weight: float, p: Tensor, q: Tensor, token: int) -> float:
    """The weight of the child `token`, drawn from `q`, of a node with this `weight` and `p`; both `[vocab]`."""
    p_token, q_token = weight * float(p[token]), float(q[token])
    return min(p_token / q_token, 1.0) if q_token > 0 else float(p_token > 0)


def without_child(weight: float, p: Tensor, q: Tensor) -> tuple[float, Tensor]:
    """A node's weight and p after the removal of a child that was drawn from `q`; both `[vocab]`.

    p is the positive part of weight * p - q, normalised, or as it was where rounding leaves nothing.
    """
    excess = (weight * p - q).clamp_(min=0.0)
    mass = float(excess.sum())
    remaining = mass + 1.0 - weight
    return mass / remaining if remaining > 0 else 1.0, excess / mass if mass > 0 else p


@dataclass(frozen=True, eq=False, repr=False)
class Block(Rejection):
    """Block verification of drawn chains, traversal verification of drawn trees; the token rule for guesses.

    It decides about all tokens of a round together, and never accepts fewer than the token rule. Source: on a chain,
    arXiv 2403.10444 (Algorithm 2); on a tree, traversal verification (arXiv 2505.12398). From the deepest first child
    upwards, each node either ends the accepted path or is removed from the tree; the target's mass beyond its
    distribution then goes to its later siblings and its parent.

    The first step of a round processes nodes that may not be emitted; OptionError if a processor is not pure.
    """

    name: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        if not self.processors.pure:
            raise OptionError(
                f'`sampling="block"` calls processors for text that may not be emitted, which {self.processors!r} may '
                'not allow: use `sampling="rejection"`'
            )

    def emit(self, seq: SequenceView, new: list[int], out: Logits, node: int) -> Step:
        if "verdict" not in out.cache:  # how many tokens the round had emitted, and all that it emits after them
            after = range(node + 1, len(out.work.tree))
            if not after or any(draft_distribution(out.work.tree, later) is None for later in after):
                return super().emit(seq, new, out, node)
            out.cache["verdict"] = len(new), self._judge(seq, new, out, node)
        base, tokens = out.cache["verdict"]
        scores = self.scores(seq, new, out, node)
        if len(new) - base < len(tokens):
            return self.step(tokens[len(new) - base], out, node, scores)
        # The last token was drawn from the residual and equals the draft's: its logits exist, but the nodes below were
        # judged already and may not be used again.
        key = noise.key(self.seed, noise.DRAW, num_generated(seq), len(new))
        return self.step(noise.draw(scores, key), out, node, scores)

    def _judge(self, seq: SequenceView, new: list[int], out: Logits, root: int) -> list[int]:
        """The tokens after `root`, before which this round has emitted `new`.

        The path goes down to first children, and back up where it does not end.
        """
        tree, start = out.work.tree, num_generated(seq)

        def visit(node: int, weight: float, path: list[int]) -> _Stop:
            log_p = self.scores(seq, new + path, out, node)
            return _Stop(node, weight, iter(drawn_children(tree, node)), log_p, torch.softmax(log_p, dim=-1))

        stops, path = [visit(root, 1.0, [])], list[int]()
        while True:
            last, place = stops[-1], len(new) + len(path)
            draw = next(last.children, None)
            if draw is not None:
                child, q = draw
                path.append(tree.tokens[child])
                stops.append(visit(child, child_weight(last.weight, last.p, q, path[-1]), path))
            elif not path or noise.uniform(noise.key(self.seed, noise.ACCEPT, start, place, last.node)) < last.weight:
                return [*path, noise.draw(last.log_p, noise.key(self.seed, noise.DRAW, start, place))]
            else:
                path.pop()
                stops.pop()
                # The path ends neither at this node nor below it: it leaves the tree.
                parent, q_ = stops[-1], draft_distribution(tree, last.node)
                assert q_ is not None
                parent.weight, parent.p = without_child(parent.weight, parent.p, q_)
                parent.log_p = parent.p.log()
