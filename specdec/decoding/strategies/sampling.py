"""Sampling one token at a time: coupled, the same text with any draft, or by rejection, the same distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.drafts import Sampler, SequenceView
from specdec.core.tree import Tree
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.samplers import CoupledSampler, DrawnSampler, generated
from specdec.decoding.strategies.base import TextStrategy, paths
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
        return CoupledSampler(self.processors.drafting, self.width, self.seed)

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, processed: Tensor) -> int:
        return noise.draw(processed, noise.key(self.seed, noise.COUPLED, generated(seq) + len(new)))

    def choose_all(self, seq: SequenceView, out: Logits, processed: Tensor) -> Tensor:
        start = generated(seq)
        keys = [noise.key(self.seed, noise.COUPLED, start + len(path)) for path in paths(out)]
        return noise.draws(processed, keys)


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
    found = []
    for child in range(node + 1, len(tree)):
        if tree.parents[child] == node:
            if (q := draft_distribution(tree, child)) is None:
                break
            found.append((child, q))
    return found


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The positive part of p - q, normalised, `[..., vocab]`; p where rounding leaves nothing."""
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


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
        return DrawnSampler(self.processors.drafting, self.width, self.seed)

    def choose(self, seq: SequenceView, new: list[int], out: Logits, node: int, processed: Tensor) -> int:
        """The first accepted child's token, or a draw from the residual of p after all children."""
        tree, place, left = out.tree, (generated(seq), len(new)), processed
        for order, (child, q) in enumerate(drawn_children(tree, node)):  # left: the residual's log-probabilities
            token = tree.tokens[child]
            p, q = torch.softmax(left, dim=-1), q.to(left.device)
            r = noise.uniform(noise.key(self.seed, noise.ACCEPT, *place, order))
            if r * float(q[token]) < float(p[token]):  # strict: p = 0 never passes; multiplied: q = 0 divides nothing
                return token
            left = residual(p, q).log()
        return noise.draw(left, noise.key(self.seed, noise.DRAW, *place))

    def choose_all(self, seq: SequenceView, out: Logits, processed: Tensor) -> Tensor:
        """The same for all nodes at once: the first children of all nodes, then the second ones, and so on."""
        tree, start, depths = out.tree, generated(seq), [len(path) for path in paths(out)]
        children = [drawn_children(tree, out.first + at) for at in range(len(processed))]
        left, chosen = processed.clone(), torch.full((len(processed),), -1, device=processed.device)
        for order in range(max(map(len, children))):
            nodes = [at for at, own in enumerate(children) if len(own) > order]
            q = torch.stack([children[at][order][1] for at in nodes])
            tokens = torch.tensor([tree.tokens[children[at][order][0]] for at in nodes], device=left.device)
            keys = [noise.key(self.seed, noise.ACCEPT, start, depths[at], order) for at in nodes]
            r = torch.tensor([noise.uniform(key) for key in keys], dtype=torch.float64, device=left.device)
            rows = torch.tensor(nodes, device=left.device)
            p, q = torch.softmax(left[rows], dim=-1), q.to(left.device)
            passes = r * q.gather(-1, tokens[:, None])[:, 0] < p.gather(-1, tokens[:, None])[:, 0]
            known = chosen[rows]
            chosen[rows] = torch.where((known < 0) & passes, tokens, known)
            left[rows] = residual(p, q).log()
        drawn = noise.draws(left, [noise.key(self.seed, noise.DRAW, start, depth) for depth in depths])
        return torch.where(chosen < 0, drawn.to(chosen.device), chosen)
