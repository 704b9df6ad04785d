"""Drafts in training: heads over the target's hidden states, and small models of the target's own layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.distill.optimise import save
from specdec.distill.teacher import Example, Teacher, divergence
from specdec.models import LanguageModel
from specdec.models.hf.derived import with_layers
from specdec.models.vocabulary import cut
from specdec.proposers.heads.new_head import layers_to_read, make_eagle, save_eagle

STEPS = 4  # guesses of a chain, in training and evaluation
_DECAY = 0.8  # the weight of a guess relative to the one before it
_SPACING = 3  # tokens from one chain of guesses to the next in training


class Student(ABC):
    """A draft in training; `module` holds its weights. Token j of a text guesses token j + 1.

    `reads` are the target's layers whose hidden states it needs, and `vocabulary` the ids that it guesses (None: all).
    """

    reads: Sequence[int] = ()
    vocabulary: Tensor | None = None

    def __init__(self, target: LanguageModel, module: Any) -> None:
        self.target, self.module = target, module

    @abstractmethod
    def loss(self, example: Example, turn: int) -> Tensor:
        """The mean divergence of its distributions from the target's, in nats, in step `turn` of a training."""

    @abstractmethod
    def hits(self, ids: Tensor) -> Tensor:
        """Whether guesses are the target's likeliest tokens, `[rows, tokens - STEPS, STEPS]`.

        Element `[r, i]` is the chain of guesses after token i + 1.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the draft."""

    @property
    def teacher(self) -> Teacher:
        """The teacher of its labels."""
        return Teacher(self.target, self.reads, self.vocabulary)

    def in_bfloat16(self) -> AbstractContextManager[Any]:
        """Autocast for targets in 16 bits."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32)


class EagleStudent(Student):
    """An EAGLE-3 head, trained over several steps in which it reads its own output (arXiv 2503.01840, section 3).

    The first step learns at every token, the others at every third, which is cheaper and hardly worse.
    """

    def __init__(self, target: LanguageModel, vocabulary: Tensor | None, layers: int = 1) -> None:
        self.stage = make_eagle(target, vocabulary, layers)
        super().__init__(target, self.stage)
        self.reads, self.vocabulary = layers_to_read(target), vocabulary

    def loss(self, example: Example, turn: int) -> Tensor:
        count = example.ids.shape[1] - 1
        starts = torch.arange(turn % _SPACING, count - STEPS + 1, _SPACING, device=example.ids.device)
        total = torch.zeros((), device=example.ids.device)
        with self.in_bfloat16():
            for step, guesses in enumerate(self._unrolled(example.ids, example.states[:, :-1], starts)):
                at = 1 + (starts + step if step else torch.arange(count, device=starts.device))
                losses = divergence(example.choices[:, at], example.chances[:, at], guesses) * example.weight[:, at]
                total = total + losses.mean() * _DECAY**step
        return total / sum(_DECAY**step for step in range(STEPS))

    @torch.no_grad()
    def hits(self, ids: Tensor) -> Tensor:
        states, logits = self.teacher.forward(ids)
        wanted = logits[:, 1:].argmax(-1)
        starts = torch.arange(ids.shape[1] - STEPS, device=ids.device)
        with self.in_bfloat16():
            steps = self._unrolled(ids, states[:, :-1], starts)
            own = [(guesses if step else guesses[:, starts]).argmax(-1) for step, guesses in enumerate(steps)]
        if self.vocabulary is not None:
            own = [self.vocabulary[one] for one in own]
        return torch.stack([one == wanted[:, starts + step] for step, one in enumerate(own)], dim=2)

    def save(self, folder: Path) -> None:
        save_eagle(self.stage, self.target, folder, guesses=STEPS)

    def _unrolled(self, ids: Tensor, states: Tensor, starts: Tensor) -> Iterator[Tensor]:
        """Logits of the first step at tokens 1, 2, …, `[rows, tokens - 1, vocabulary]`, then of the other steps.

        Step s has logits `[rows, starts, vocabulary]` at the tokens s after `starts`, and reads the features that the
        step before it wrote.
        """
        stage, (rows, count) = self.stage, states.shape[:2]
        embeds = stage.embedding(ids[:, 1:]).detach().to(stage.fc.weight.dtype)
        features = stage.features(states.flatten(0, 1).to(stage.fc.weight.dtype)).view(rows, count, -1)
        every, cache = torch.arange(count, device=ids.device), DynamicCache()
        for step in range(STEPS):
            at = starts + step if step else every
            # A chain sees the first step's keys up to its start, and its own keys of further steps.
            text, own = every <= (at - step)[:, None], torch.eye(len(at), dtype=torch.bool, device=ids.device)
            mask = torch.cat([text, *[own] * step], dim=1)[None, None]
            masks = dict.fromkeys((kind.name for kind in stage.kinds), mask)
            written = stage.write(embeds[:, at], features, masks, (1 + at).expand(rows, -1), cache)
            yield stage.guess(written)
            features = written if step else written[:, starts]


class LayersStudent(Student):
    """A model of some of the target's layers, with the target's embeddings and output layer, which stay fixed.

    It learns with the output layer's rows of its vocabulary; its checkpoint has all rows, and names the vocabulary.
    """

    def __init__(
        self, target: LanguageModel, chosen: list[int], tokenizer: Any, vocabulary: Tensor | None = None
    ) -> None:
        model = with_layers(target.model, target.num_layers, chosen).float()
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.requires_grad_(False)
        self._head = model.get_output_embeddings()
        if vocabulary is not None:
            model.config.draft_vocabulary = vocabulary.tolist()
            model.set_output_embeddings(cut(self._head, vocabulary))
        super().__init__(target, model)
        self._tokenizer, self.vocabulary = tokenizer, vocabulary

    def loss(self, example: Example, turn: int) -> Tensor:
        with self.in_bfloat16():
            guesses = self.module(example.ids, use_cache=False).logits
        losses = divergence(example.choices, example.chances, guesses) * example.weight
        return losses.sum() / example.weight.sum()

    @torch.no_grad()
    def hits(self, ids: Tensor) -> Tensor:
        _, wanted = self.teacher.forward(ids)
        with self.in_bfloat16():
            own = self.module(ids, use_cache=False).logits.argmax(-1)
        if self.vocabulary is not None:
            own = self.vocabulary[own]
        return (wanted.argmax(-1) == own)[:, 1:].unfold(1, STEPS, 1)

    def save(self, folder: Path) -> None:
        small = self.module.get_output_embeddings()
        self.module.set_output_embeddings(self._head)
        save(self.module, folder, self.target.dtype)
        self.module.set_output_embeddings(small)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


def spread_layers(count: int, total: int) -> list[int]:
    """`count` evenly spaced layers of `total`, the first and the last included; one is the first."""
    return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
