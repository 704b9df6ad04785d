"""What is distilled: heads that read the target's hidden states, and small siblings of its own layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from specdec.errors import UnsupportedError
from specdec.models import LanguageModel
from specdec.models.early_exit import with_layers
from specdec.models.heads.making import layers_to_read, make_eagle, save_eagle
from specdec.train.course import save

STEPS = 4  # of the head over its own output, in training and in exams
_FADES = 0.8  # how much less each further step counts


class Pupil(ABC):
    """A draft in training; `module` holds its weights. Token j of a text guesses token j + 1."""

    def __init__(self, target: LanguageModel, module: Any) -> None:
        self.target, self.module = target, module

    @abstractmethod
    def loss(self, ids: Tensor) -> Tensor:
        """The mean divergence of its distributions from the target's, over texts `[rows, tokens]`, in nats."""

    @abstractmethod
    def hits(self, ids: Tensor) -> Tensor:
        """Whether a guess is the target's likeliest token: `[rows, STEPS, tokens - 1]`, of tokens from number 1 on.

        The guesses of step s were made without the target having read the last s tokens.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the draft."""

    def in_bfloat16(self) -> AbstractContextManager[Any]:
        """Matrix products, where the target is in 16 bits."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32)


class EaglePupil(Pupil):
    """An EAGLE-3 head; it learns over several steps in which it reads its own output (arXiv 2503.01840, section 3)."""

    def __init__(self, target: LanguageModel, vocabulary: Tensor | None, layers: int = 1) -> None:
        self.stage = make_eagle(target, vocabulary, layers)
        super().__init__(target, self.stage)
        self._reads = layers_to_read(target)

    def loss(self, ids: Tensor) -> Tensor:
        with self.in_bfloat16():
            states, logits = self._listen(ids)
            wanted, weight = self._wanted(logits)
            total = torch.zeros((), device=ids.device)
            for step, guesses in enumerate(self._unrolled(ids, states)):
                told = divergence(wanted[:, step:], guesses[:, step:]) * weight[:, step:]
                total = total + told.mean() * _FADES**step
        return total / sum(_FADES**step for step in range(STEPS))

    @torch.no_grad()
    def hits(self, ids: Tensor) -> Tensor:
        with self.in_bfloat16():
            states, logits = self._listen(ids)
            guesses = [one.argmax(-1) for one in self._unrolled(ids, states)]
        vocabulary = self.stage.vocabulary
        own = [one if vocabulary is None else vocabulary[one] for one in guesses]
        return torch.stack([one == logits.argmax(-1) for one in own], dim=1)

    def save(self, folder: Path) -> None:
        save_eagle(self.stage, self.target, folder, guesses=STEPS)

    @torch.no_grad()
    def _listen(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states `[rows, tokens - 1, layers, width]` before, and the logits at, all tokens but the first."""
        out = self.target.model(ids, use_cache=False, output_hidden_states=True)
        states = torch.stack([out.hidden_states[layer] for layer in self._reads], dim=2)
        return states[:, :-1].float(), out.logits[:, 1:]

    def _wanted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution over the draft vocabulary, as logarithms, and how likely it is to be in there."""
        whole, vocabulary = logits.float(), self.stage.vocabulary
        if vocabulary is None:
            return whole.log_softmax(-1), whole.new_ones(whole.shape[:-1])
        known = whole[..., vocabulary]
        return known.log_softmax(-1), (known.logsumexp(-1) - whole.logsumexp(-1)).exp()

    def _unrolled(self, ids: Tensor, states: Tensor) -> Iterator[Tensor]:
        """Logits of every step `[rows, tokens - 1, vocabulary]`; those of the first s tokens of step s mean nothing."""
        stage, (rows, count) = self.stage, states.shape[:2]
        embeds = stage.embedding(ids[:, 1:]).detach().to(stage.fc.weight.dtype)
        features = stage.features(states.flatten(0, 1)).view(rows, count, -1)
        positions = torch.arange(1, count + 1, device=ids.device).expand(rows, -1)
        cache = DynamicCache()
        for step in range(STEPS):
            masks = dict.fromkeys((kind.name for kind in stage.kinds), unrolled_mask(count, step, ids.device))
            written = stage.write(embeds, features, masks, positions, cache)
            yield stage.guess(written)
            features = F.pad(written[:, :-1], (0, 0, 1, 0))


def unrolled_mask(count: int, step: int, device: torch.device) -> Tensor:
    """What the tokens of a step see, `[1, 1, count, (step + 1) * count]`: the keys of every step up to this one.

    A token sees of its last `step` predecessors and itself what later steps wrote, and the target's features of all
    before them.
    """
    at, key = torch.arange(count, device=device)[:, None], torch.arange(count, device=device)
    text = key <= at - step
    return torch.cat([text, *(key == at - step + later for later in range(1, step + 1))], dim=1)[None, None]


class LayersPupil(Pupil):
    """A model of some of the target's layers, whose embeddings and head stay the target's."""

    def __init__(self, target: LanguageModel, chosen: list[int], tokenizer: Any) -> None:
        if target.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(target.model).__name__} has an encoder; drafts are distilled for decoder-only targets"
            )
        model = with_layers(target.model, target.num_layers, chosen).float()
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.requires_grad_(False)
        super().__init__(target, model)
        self._tokenizer = tokenizer

    def loss(self, ids: Tensor) -> Tensor:
        with self.in_bfloat16():
            wanted, guesses = self._both(ids)
            return divergence(wanted.float().log_softmax(-1), guesses).mean()

    @torch.no_grad()
    def hits(self, ids: Tensor) -> Tensor:
        with self.in_bfloat16():
            wanted, guesses = self._both(ids)
        found = wanted.argmax(-1) == guesses.argmax(-1)
        return found[:, None, 1:].expand(-1, STEPS, -1)

    def save(self, folder: Path) -> None:
        save(self.module, folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)

    def _both(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted: Tensor = self.target.model(ids, use_cache=False).logits
        return wanted, self.module(ids, use_cache=False).logits


def divergence(wanted: Tensor, guesses: Tensor) -> Tensor:
    """KL divergence `[...]` in nats of distributions with these logits `[..., vocab]` from log-probabilities."""
    return F.kl_div(guesses.float().log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1)


def spread_layers(count: int, total: int) -> list[int]:
    """The first, the last and evenly spaced ones between them; the first alone, where it is one."""
    return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]


def chains(hits: Tensor) -> Tensor:
    """How many guesses in a row are right that begin at a token, `[rows, tokens - STEPS]`, from `Pupil.hits`."""
    count = hits.shape[2] - STEPS + 1
    steps = torch.stack([hits[:, step, step : step + count] for step in range(STEPS)], dim=1)
    return steps.long().cumprod(1).sum(1)
