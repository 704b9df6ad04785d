"""A draft in training: an EAGLE-3 head over the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from recipes.distill.new_head import layers_to_read, make_eagle
from recipes.distill.teacher import Example, Teacher, divergence
from specdec.models import LanguageModel

STEPS = 4  # guesses of a chain, in training and evaluation
_DECAY = 0.8  # the weight of a guess relative to the one before it
_SPACING = 3  # tokens from one chain of guesses to the next in training


class Student:
    """An EAGLE-3 head, trained over several steps in which it reads what it wrote (arXiv 2503.01840, section 3).

    `stage` holds its weights, `teacher` makes its labels. Token j of a text guesses token j + 1. The first step learns
    at every token, the others at every third, which is cheaper and hardly worse.
    """

    def __init__(self, target: LanguageModel, vocabulary: Tensor | None, layers: int = 1) -> None:
        self.target, self.vocabulary = target, vocabulary
        self.stage = make_eagle(target, vocabulary, layers)
        self.teacher = Teacher(target, layers_to_read(target), vocabulary)

    def loss(self, example: Example, turn: int) -> Tensor:
        """The mean divergence of its distributions from the target's, in nats, in step `turn` of a training."""
        count = example.ids.shape[1] - 1
        starts = torch.arange(turn % _SPACING, count - STEPS + 1, _SPACING, device=example.ids.device)
        total = torch.zeros((), device=example.ids.device)
        with self._in_bfloat16():
            for step, guesses in enumerate(self._unrolled(example.ids, example.states[:, :-1], starts)):
                at = 1 + (starts + step if step else torch.arange(count, device=starts.device))
                losses = divergence(example.choices[:, at], example.chances[:, at], guesses) * example.weight[:, at]
                total = total + losses.mean() * _DECAY**step
        return total / sum(_DECAY**step for step in range(STEPS))

    @torch.no_grad()
    def hits(self, ids: Tensor) -> Tensor:
        """Whether guesses are the target's likeliest tokens, `[rows, tokens - STEPS, STEPS]`.

        Element `[r, i]` is the chain of guesses after token i + 1.
        """
        states, logits = self.teacher.forward(ids)
        wanted = logits[:, 1:].argmax(-1)
        starts = torch.arange(ids.shape[1] - STEPS, device=ids.device)
        with self._in_bfloat16():
            steps = self._unrolled(ids, states[:, :-1], starts)
            chains = [(guesses if step else guesses[:, starts]).argmax(-1) for step, guesses in enumerate(steps)]
        if self.vocabulary is not None:
            chains = [self.vocabulary[tokens] for tokens in chains]
        return torch.stack([tokens == wanted[:, starts + step] for step, tokens in enumerate(chains)], dim=2)

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
            # A chain sees the first step's keys up to its start, and the keys that it wrote in further steps.
            text, own_keys = every <= (at - step)[:, None], torch.eye(len(at), dtype=torch.bool, device=ids.device)
            mask = torch.cat([text, *[own_keys] * step], dim=1)[None, None]
            masks = dict.fromkeys((kind.name for kind in stage.kinds), mask)
            written = stage.write(embeds[:, at], features, masks, (1 + at).expand(rows, -1), cache)
            yield stage.guess(written)
            features = written if step else written[:, starts]

    def _in_bfloat16(self) -> AbstractContextManager[Any]:
        """Autocast for targets in 16 bits."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32)
