"""A target's hidden states and distributions, as labels of texts; computed once and cached on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.models import LanguageModel

_LIKELIEST = 32  # tokens that are learned of a distribution
CACHE_GIB = 4.0  # space on disk


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
        distributions = [self._distribution(row) for row in logits]
        choices, chances, weight = (torch.stack(part) for part in zip(*distributions, strict=True))
        return Example(ids, states.bfloat16(), choices, chances, weight)

    def _distribution(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choices, chances and weight of logits `[tokens, vocab]`."""
        whole = logits.float()
        drafted = whole if self.vocabulary is None else whole[:, self.vocabulary]
        top, choices = drafted.topk(min(_LIKELIEST, drafted.shape[-1]))
        return choices, top.softmax(-1), (drafted.logsumexp(-1) - whole.logsumexp(-1)).exp()


class ExampleCache:
    """The examples of numbered windows, each made once and stored in a file of `folder`, of `limit` bytes in all.

    Windows are labelled one by one, so that an example never depends on a batch. What does not fit is made each time.
    """

    def __init__(self, label: Callable[[Tensor], Example], folder: Path, limit: int) -> None:
        self._label, self._folder, self._left = label, folder, limit
        self.close()  # what an earlier training left may be of other windows

    def example(self, number: int, ids: Tensor) -> Example:
        """The example of window `number` with `ids` `[1, tokens]`."""
        file = self._folder / f"{number}.safetensors"
        if file.exists():
            return Example(ids, **load_file(file, device=str(ids.device)))
        example = self._label(ids)
        record = {name: value for name, value in vars(example).items() if name != "ids"}
        if sum(value.nbytes for value in record.values()) <= self._left:
            self._folder.mkdir(exist_ok=True)
            save_file(record, file)
            self._left -= file.stat().st_size
        return example

    def close(self) -> None:
        """Removes what it stored."""
        rmtree(self._folder, ignore_errors=True)


def divergence(choices: Tensor, chances: Tensor, guesses: Tensor) -> Tensor:
    """KL divergence `[...]`, in nats, from the logits `guesses` `[..., vocab]` to distributions over `choices`."""
    logs = guesses.float().log_softmax(-1).gather(-1, choices)
    return -(chances * logs + torch.special.entr(chances)).sum(-1)
