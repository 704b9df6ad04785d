"""Sampling whose output is a function of the seed alone: the same text with any draft, or none."""

from __future__ import annotations

from torch import Tensor

from specdec.core.drafts import Sampler, SequenceView
from specdec.core.work import Logits
from specdec.decoding import noise
from specdec.decoding.samplers import CoupledSampler, generated
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
