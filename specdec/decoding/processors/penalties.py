"""Penalties for tokens that were chosen before: in the text, or in this step by earlier groups of beams."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import OptionError


class OutputPenalty:
    """Lowers the logit of every generated token by `presence`, and by `frequency` for each of its occurrences.

    The prompt's `length` tokens do not count. These are the penalties of OpenAI's interface.
    """

    def __init__(self, length: int, presence: float, frequency: float) -> None:
        self.length, self.presence, self.frequency = length, presence, frequency

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """`logits` `[n, vocab]` after `ids` `[n, length]`."""
        written = ids[:, self.length :].to(logits.device)
        if not written.shape[1]:
            return logits
        counts = torch.zeros_like(logits).scatter_add_(1, written, logits.new_ones(written.shape))
        return logits - self.frequency * counts - self.presence * (counts > 0)


class HammingDiversityLogitsProcessor:
    """A token costs a group of beams `diversity_penalty` for every beam of earlier groups that chose it in this step.

    Source: Diverse Beam Search (arXiv 1610.02424), as in transformers 4.49. Raises OptionError for beams that cannot be
    divided into `num_beam_groups` groups, and for a penalty that is not positive.
    """

    def __init__(self, diversity_penalty: float, num_beams: int, num_beam_groups: int) -> None:
        if not diversity_penalty > 0:
            raise OptionError.of("diversity_penalty", "a number above 0", diversity_penalty)
        if num_beam_groups < 2 or num_beams % num_beam_groups:
            raise OptionError.of("num_beam_groups", f"at least 2, and a divisor of {num_beams} beams", num_beam_groups)
        self.diversity_penalty = float(diversity_penalty)
        self.num_beams = num_beams
        self.size = num_beams // num_beam_groups

    def __call__(
        self, ids: Tensor | None, scores: Tensor, current_tokens: Tensor | None = None, beam_group_idx: int = 0
    ) -> Tensor:
        """`scores` `[rows * size, vocab]` of one group, less the penalties; `ids` are not read.

        Of `current_tokens` `[rows * num_beams]` those of groups before `beam_group_idx` count.
        """
        if not beam_group_idx or current_tokens is None:
            return scores
        earlier = current_tokens.view(-1, self.num_beams)[:, : beam_group_idx * self.size].to(scores.device)
        known = earlier < scores.shape[1]  # some checkpoints pad with an id beyond their vocabulary
        counts = scores.new_zeros(len(earlier), scores.shape[1])
        counts.scatter_add_(1, earlier * known, known.to(scores.dtype))
        return scores - self.diversity_penalty * counts.repeat_interleave(len(scores) // len(earlier), 0)
