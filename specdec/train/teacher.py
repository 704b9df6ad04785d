"""What a target says about texts: its hidden states and distributions, heard once and kept in a bounded file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models import LanguageModel

LIKELIEST = 32  # tokens of a distribution that are learned
SPOOL_BYTES = 4 << 30
_CHUNK = 256  # distributions that are compared at once: their logits stay in the cache of a CPU


@dataclass(frozen=True)
class Lesson:
    """Texts `ids` `[rows, tokens]`, and what their target says about them.

    `states` `[rows, tokens, layers, width]` are hidden states. The likeliest next tokens of those that the draft may
    guess are `choices` `[rows, tokens, likeliest]`, by their numbers in the draft's vocabulary, with `chances` that sum
    to 1; `weight` `[rows, tokens]` is how likely any that the draft may guess is.
    """

    ids: Tensor
    states: Tensor
    choices: Tensor
    chances: Tensor
    weight: Tensor


class Teacher:
    """A target, asked for the hidden states of the layers `reads` and the chances of `vocabulary` (None: all)."""

    def __init__(self, target: LanguageModel, reads: Sequence[int], vocabulary: Tensor | None) -> None:
        self.target, self.reads, self.vocabulary = target, tuple(reads), vocabulary

    @property
    def likeliest(self) -> int:
        """How many tokens of each distribution a lesson has."""
        return min(LIKELIEST, self.target.vocab_size if self.vocabulary is None else len(self.vocabulary))

    @torch.no_grad()
    def listen(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states `[rows, tokens, layers, width]` and logits `[rows, tokens, vocab]` at every token."""
        out = self.target.model(ids, use_cache=False, output_hidden_states=bool(self.reads))
        if not self.reads:
            return out.logits.new_empty(*ids.shape, 0, 0), out.logits
        return torch.stack([out.hidden_states[layer] for layer in self.reads], dim=2), out.logits

    def teach(self, ids: Tensor) -> Lesson:
        """The lesson about these texts; hidden states come in bfloat16, as a spool keeps them."""
        states, logits = self.listen(ids)
        found = [self._distribution(row) for row in logits]
        choices, chances, weight = (torch.stack(one) for one in zip(*found, strict=True))
        return Lesson(ids, states.bfloat16(), choices, chances, weight)

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choices, chances and weight of logits `[tokens, vocab]`."""
        whole = logits.float()
        known = whole if self.vocabulary is None else whole[:, self.vocabulary]
        top, choices = known.topk(self.likeliest)
        return choices, top.softmax(-1), (known.logsumexp(-1) - whole.logsumexp(-1)).exp()


class Spool:
    """Lessons of a teacher about numbered windows of `tokens`, each made once and kept in a file of bounded size."""

    def __init__(self, teacher: Teacher, file: Path, windows: int, tokens: int, limit: int = SPOOL_BYTES) -> None:
        self.teacher = teacher
        width = teacher.target.config.hidden_size if teacher.reads else 0
        record = np.dtype(
            [
                ("states", np.int16, (tokens, len(teacher.reads), width)),
                ("choices", np.int32, (tokens, teacher.likeliest)),
                ("chances", np.float32, (tokens, teacher.likeliest)),
                ("weight", np.float32, (tokens,)),
            ]
        )
        self._room, self._heard = min(windows, limit // record.itemsize), set[int]()
        self._records: Any = np.memmap(file, record, "w+", shape=(self._room,)) if self._room else None

    def lesson(self, numbers: Sequence[int], ids: Tensor) -> Lesson:
        """The lesson about the windows `ids` `[rows, tokens]` of these numbers."""
        missing = [row for row, number in enumerate(numbers) if number not in self._heard]
        if any(numbers[row] >= self._room for row in missing):
            return self.teacher.teach(ids)
        if missing:
            self._keep([numbers[row] for row in missing], self.teacher.teach(ids[missing]))
        kept = self._records[list(numbers)]

        def read(name: str) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(kept[name])).to(ids.device)

        states = read("states").view(torch.bfloat16)
        return Lesson(ids, states, read("choices").long(), read("chances"), read("weight"))

    def _keep(self, numbers: Sequence[int], lesson: Lesson) -> None:
        for row, number in enumerate(numbers):
            record = self._records[number]
            record["states"] = lesson.states[row].view(torch.int16).cpu().numpy()
            for name in ("choices", "chances", "weight"):
                record[name] = getattr(lesson, name)[row].cpu().numpy()
        self._heard.update(numbers)


def divergence(choices: Tensor, chances: Tensor, guesses: Tensor) -> Tensor:
    """KL divergence `[...]` in nats of distributions over `choices` `[..., likeliest]` from logits `[..., vocab]`."""
    entropy = torch.special.entr(chances).sum(-1)
    crossed: Tensor = _CrossEntropy.apply(guesses, choices, chances)  # type: ignore[no-untyped-call]
    return crossed - entropy


class _CrossEntropy(torch.autograd.Function):
    """Of logits and distributions over a few of their tokens, its gradient made in the same pass over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Tensor, chances: Tensor) -> Tensor:
        told = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        slope = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = (*(tensor.flatten(0, -2) for tensor in (logits, choices, chances, slope)), told.view(-1))
        for one, chosen, wanted, down, out in zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True):
            logs = F.log_softmax(one.float(), dim=-1)
            out.copy_(-(logs.gather(-1, chosen) * wanted).sum(-1))
            down.copy_(logs.exp_().scatter_add_(-1, chosen, -wanted))
        ctx.save_for_backward(slope)
        return told

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * above.unsqueeze(-1).to(slope.dtype), None, None
