"""A target's hidden states and distributions, as labels of texts; computed once and cached on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models import LanguageModel

_LIKELIEST = 32  # tokens that are learned of a distribution
CACHE_GIB = 4.0  # of disk
_KEPT = "kept"  # the field of a record that is true once it was written
_CHUNK = 256  # distributions at once, whose logits fit into a CPU's cache


@dataclass(frozen=True)
class Example:
    """Texts `ids` `[rows, tokens]` with their labels.

    `states` `[rows, tokens, layers, width]`: hidden states. `choices` `[rows, tokens, likeliest]`: the likeliest next
    tokens, by number in the draft's vocabulary, with `chances` that sum to 1. `weight` `[rows, tokens]`: the
    probability of the draft's whole vocabulary.
    """

    ids: Tensor
    states: Tensor
    choices: Tensor
    chances: Tensor
    weight: Tensor


class Teacher:
    """Labels texts with the target's hidden states of layers `reads` and its chances of `vocabulary` (None: all)."""

    def __init__(self, target: LanguageModel, reads: Sequence[int], vocabulary: Tensor | None) -> None:
        self.target, self.reads, self.vocabulary = target, tuple(reads), vocabulary

    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states `[rows, tokens, layers, width]` and logits `[rows, tokens, vocab]`."""
        out = self.target.model(ids, use_cache=False, output_hidden_states=True)
        return torch.stack([out.hidden_states[layer] for layer in self.reads], dim=2), out.logits

    def label(self, ids: Tensor) -> Example:
        """The example of these texts, with states in bfloat16, as they are cached."""
        states, logits = self.forward(ids)
        found = [self._distribution(row) for row in logits]
        choices, chances, weight = (torch.stack(one) for one in zip(*found, strict=True))
        return Example(ids, states.bfloat16(), choices, chances, weight)

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choices, chances and weight of logits `[tokens, vocab]`."""
        whole = logits.float()
        known = whole if self.vocabulary is None else whole[:, self.vocabulary]
        top, choices = known.topk(min(_LIKELIEST, known.shape[-1]))
        return choices, top.softmax(-1), (known.logsumexp(-1) - whole.logsumexp(-1)).exp()


class ExampleCache:
    """The examples of `count` numbered windows, each made once and stored in a file of at most `limit` bytes.

    Windows are labelled one by one, so that an example never depends on a batch. What does not fit is made each time.
    """

    def __init__(self, label: Callable[[Tensor], Example], file: Path, count: int, limit: int) -> None:
        file.unlink(missing_ok=True)  # its windows may be others
        self._label, self._file, self._count, self._limit = label, file, count, limit
        self._records: Any = None

    def example(self, number: int, ids: Tensor) -> Example:
        """The example of window `number` with `ids` `[1, tokens]`."""
        if self._records is None or number >= len(self._records) or not self._records[number][_KEPT]:
            example = self._label(ids)
            self._keep(number, {name: value for name, value in vars(example).items() if name != "ids"})
            return example
        names = [name for name in self._records.dtype.names if name != _KEPT]
        kept = self._records[number : number + 1]
        return Example(ids, **{name: _tensor(kept[name]).to(ids.device) for name in names})

    def close(self) -> None:
        """Removes the file, and stores nothing from now on."""
        self._records, self._count = None, 0
        self._file.unlink(missing_ok=True)

    def _keep(self, number: int, record: dict[str, Tensor]) -> None:
        """Stores a record of tensors of one row each, if there is room."""
        if self._records is None:
            fields = [(name, _array(value).dtype, value.shape[1:]) for name, value in record.items()]
            kind = np.dtype([*fields, (_KEPT, np.bool_)])
            if not (room := min(self._count, self._limit // kind.itemsize)):
                return
            self._records = np.lib.format.open_memmap(self._file, "w+", kind, (room,))
        if number < len(self._records):
            for name, value in record.items():
                self._records[number][name] = _array(value)[0]
            self._records[number][_KEPT] = True


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor as a NumPy array; bfloat16, which NumPy lacks, as int16."""
    tensor = tensor.cpu()
    return np.asarray(tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor)


def _tensor(array: np.ndarray) -> Tensor:
    """The tensor of an array made by `_array`."""
    found = torch.from_numpy(np.array(array))
    return found.view(torch.bfloat16) if found.dtype == torch.int16 else found


def divergence(choices: Tensor, chances: Tensor, guesses: Tensor) -> Tensor:
    """KL divergence `[...]`, in nats, from the logits `guesses` `[..., vocab]` to distributions over `choices`."""
    entropy = torch.special.entr(chances).sum(-1)
    crossed: Tensor = _CrossEntropy.apply(guesses, choices, chances)  # type: ignore[no-untyped-call]
    return crossed - entropy


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits and distributions over a few tokens; computes the gradient in the same pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: Tensor, chances: Tensor) -> Tensor:
        entropy = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
        slope = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = (*(tensor.flatten(0, -2) for tensor in (logits, choices, chances, slope)), entropy.view(-1))
        for one, chosen, wanted, down, out in zip(*(torch.split(tensor, _CHUNK) for tensor in flat), strict=True):
            logs = F.log_softmax(one.float(), dim=-1)
            out.copy_(-(logs.gather(-1, chosen) * wanted).sum(-1))
            down.copy_(logs.exp_().scatter_add_(-1, chosen, -wanted))
        ctx.save_for_backward(slope)
        return entropy

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * above.unsqueeze(-1).to(slope.dtype), None, None
