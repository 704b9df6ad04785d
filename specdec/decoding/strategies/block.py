"""Block verification: decides about all tokens of a round together, and never accepts fewer than the token rule.

Source: on a chain, arXiv 2403.10444 (Algorithm 2); on a tree, traversal verification (arXiv 2505.12398). From the
deepest first child upwards, each node either ends the accepted path or is removed from the tree; the target's mass
beyond its distribution then goes to its later siblings and its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.core.drafts import SequenceView
from specdec.core.tree import Step, Tree
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.samplers import generated
from specdec.decoding.strategies.sampling import Rejection, draft_distribution, drawn_children
from specdec.errors import OptionError


@dataclass
class _Verdict:
    """What a round emits, decided at its first step: `tokens`, after `base` earlier ones.

    `copies` `[nodes, vocab]`: the processed logits in the CPU's memory, if they had to be copied.
    """

    base: int
    tokens: list[int] = field(default_factory=list)
    copies: Tensor | None = None


@dataclass
class _Stop:
    """A node of the current path: its weight, its remaining `children`, and p `[vocab]` of the tokens after it.

    `left`: p as log-probabilities, up to a constant.
    """

    node: int
    weight: float
    children: Iterator[tuple[int, Tensor]]
    left: Tensor
    p: Tensor


def child_weight(weight: float, p: Tensor, q: Tensor, token: int) -> float:
    """The weight of the child `token`, which was drawn from `q`, given its parent's weight and p."""
    ours, theirs = weight * float(p[token]), float(q[token])
    return min(ours / theirs, 1.0) if theirs > 0 else float(ours > 0)


def without_child(weight: float, p: Tensor, q: Tensor) -> tuple[float, Tensor]:
    """A node's weight and p after the removal of a child that was drawn from `q`."""
    excess = (weight * p - q).clamp_(min=0.0)
    mass = float(excess.sum())
    rest = mass + 1.0 - weight
    return mass / rest if rest > 0 else 1.0, excess / mass if mass > 0 else p


@dataclass(frozen=True, eq=False, repr=False)
class Block(Rejection):
    """Block verification of drawn chains, traversal verification of drawn trees; the token rule for guesses.

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
        verdict: _Verdict | None = out.cache.get("verdict")
        if verdict is None:
            after = range(node + 1, len(out.tree))
            if not after or any(draft_distribution(out.tree, one) is None for one in after):
                return super().emit(seq, new, out, node)
            out.cache["verdict"] = verdict = self._judge(seq, new, out, node)
        at = len(new) - verdict.base
        processed = self.processed(seq, new, out, node)
        if at < len(verdict.tokens):
            return self.step(verdict.tokens[at], out, node, processed)
        # The last token was drawn from the residual and equals the draft's: its logits exist, but the nodes below were
        # judged already and may not be used again.
        key = noise.key(self.seed, noise.DRAW, generated(seq), len(new))
        near = processed if verdict.copies is None else verdict.copies[node - out.first]
        return self.step(noise.draw(near, key), out, node, processed)

    def _judge(self, seq: SequenceView, new: list[int], out: Logits, root: int) -> _Verdict:
        """The tokens after `root`, before which this round has emitted `new`.

        The path goes down to first children, and back up where it does not end. Each step depends on values of the one
        before, so logits on an accelerator are copied first, in one read.
        """
        tree, start, verdict = out.tree, generated(seq), _Verdict(len(new))
        if self.reads_once(out):
            kinds = [self.all_processed(seq, out), *([out.logits.float()] if self.ranked else [])]
            tree, verdict.copies, *own = _copied(tree, out.first, kinds)
            out.cache.update(zip(["own"], own, strict=False))

        def stop(node: int, weight: float, path: list[int]) -> _Stop:
            near = verdict.copies
            left = self.processed(seq, new + path, out, node) if near is None else near[node - out.first]
            return _Stop(node, weight, iter(drawn_children(tree, node)), left, torch.softmax(left, dim=-1))

        way, path = [stop(root, 1.0, [])], list[int]()
        while True:
            here, place = way[-1], len(new) + len(path)
            found = next(here.children, None)
            if found is not None:
                child, q = found
                path.append(tree.tokens[child])
                way.append(stop(child, child_weight(here.weight, here.p, q.to(here.p.device), path[-1]), path))
            elif not path or noise.uniform(noise.key(self.seed, noise.ACCEPT, start, place, here.node)) < here.weight:
                final = noise.draw(here.left, noise.key(self.seed, noise.DRAW, start, place))
                verdict.tokens = [*path, final]
                return verdict
            else:
                path.pop()
                way.pop()
                # The path ends neither at this node nor below it: it leaves the tree.
                parent, q_ = way[-1], draft_distribution(tree, here.node)
                assert q_ is not None
                parent.weight, parent.p = without_child(parent.weight, parent.p, q_.to(parent.p.device))
                parent.left = parent.p.log()


def _copied(tree: Tree, first: int, kinds: Sequence[Tensor]) -> tuple[Any, ...]:
    """The tree with its distributions, and `kinds` of logits `[nodes, vocab]`, copied to the CPU in one transfer."""
    drawn = [(node, q) for node in range(first, len(tree)) if (q := draft_distribution(tree, node)) is not None]
    near = torch.cat([*kinds, *(q.to(kinds[0])[None] for _, q in drawn)]).cpu()
    parts = torch.split(near, len(kinds[0]))
    own = dict(zip((node for node, _ in drawn), torch.cat(parts[len(kinds) :]), strict=True))
    none = parts[0].new_empty(0)
    return replace(tree, q=[own.get(node, none) for node in range(len(tree))]), *parts[: len(kinds)]
