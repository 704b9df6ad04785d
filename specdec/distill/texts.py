"""The texts that a draft is distilled on: given ones, and the target's own continuations of prompts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.distill.teacher import Example, Teacher
from specdec.errors import OptionError

WINDOW = 512  # tokens of a training window
_LEAST = 64  # tokens of text, and of a window
HELD_OUT = 20  # one prompt of so many, and one token
_ROWS = 64  # prompts that the target continues together
_LEARNED = 1  # windows of a step: more steps teach more, of the same tokens, than they cost
_SAMPLED = 4  # one batch of so many is sampled, the others are greedy
_NEW = 192  # tokens of a continuation
_LONGEST = 512  # tokens of a prompt
EVALUATIONS = 8  # held-out texts
_EVALUATION_PROMPT, _EVALUATION_NEW = 128, 64  # tokens


def read_texts(files: Sequence[str | PathLike[str]]) -> list[str]:
    """The texts of files; raises OptionError for what cannot be read."""
    texts = []
    for file in files:
        try:
            texts.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError.of("text", "readable files in UTF-8", str(file), str(error)) from None
    return texts


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The ids of prompts, through the chat template of a tokenizer that has one."""
    if getattr(tokenizer, "chat_template", None):
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
        found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    else:
        found = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [ids[-_LONGEST:] for ids in found if ids]


@dataclass(frozen=True)
class Evaluation:
    """A held-out text `ids` that the target continued greedily from token number `first` on.

    Of a target with an encoder, that heard `features` `[1, mels, frames]`.
    """

    ids: list[int]
    first: int
    features: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """What makes the target write this, as arguments of `generate`."""
        prompt = [self.ids[: self.first]]
        if self.features is None:
            return {"prompt": prompt}
        return {"input_features": self.features, "decoder_input_ids": prompt}


@dataclass(frozen=True)
class Texts:
    """Streams of ids to learn from, and evaluations."""

    streams: list[np.ndarray]
    evaluations: list[Evaluation]
    rows: int = _LEARNED

    @property
    def window(self) -> int:
        """How many tokens a training window has, beside the one after it."""
        return int(min(WINDOW, *(len(stream) - 1 for stream in self.streams)))

    def counts(self) -> Counter[int]:
        """How often each token comes."""
        return Counter(np.concatenate(self.streams).tolist())

    @cached_property
    def windows(self) -> list[np.ndarray]:
        """The windows of each stream, `[windows, window + 1]`."""
        size = self.window
        return [np.stack([one[s : s + size + 1] for s in range(0, len(one) - size, size)]) for one in self.streams]

    def batch(self, step: int, seed: int) -> tuple[list[int], Tensor]:
        """The numbers and ids `[rows, window + 1]` of a step's windows, which are of one stream after the other.

        Every stream is read in another order each time; a step's windows are always the same.
        """
        turn, at = divmod(step, len(self.streams))
        windows = self.windows[at]
        first = sum(map(len, self.windows[:at]))
        chosen = [in_order(len(windows), turn * self.rows + row, seed + at) for row in range(self.rows)]
        return [first + one for one in chosen], torch.from_numpy(windows[chosen])

    @property
    def size(self) -> int:
        """How many windows there are."""
        return sum(map(len, self.windows))

    def label(self, teacher: Teacher, number: int, ids: Tensor) -> Example:
        """The example about the window `ids` `[1, window + 1]` of this number."""
        return teacher.label(ids)

    def encoder_states(self, numbers: Sequence[int]) -> None:
        """Nothing was heard."""

    def close(self) -> None:
        """Keeps nothing that is not wanted any more."""


def in_order(size: int, count: int, seed: int) -> int:
    """Which of `size` windows is read after `count` others: all of them, then all in another order, and so on."""
    again, place = divmod(count, size)
    return int(np.random.default_rng((seed, again)).permutation(size)[place])


@dataclass(frozen=True)
class Writer:
    """Lets the target continue prompts, and notes the continuations in a file, where they are found again."""

    generator: SpecGenerator
    file: Path
    seed: int

    def write(self, prompts: Sequence[list[int]], go_on: Callable[[int, int, float], bool]) -> tuple[np.ndarray, float]:
        """Prompts with their continuations as one stream, and how many seconds they took; some are sampled.

        `go_on` is asked before every batch, with how many prompts of how many are done, and the seconds that it took.
        """
        lines = self._lines()
        while (done := sum(len(line["texts"]) for line in lines)) < len(prompts) and go_on(
            done, len(prompts), lines[-1]["seconds"] if lines else 0.0
        ):
            began = time.perf_counter()
            batch = list(prompts[done : done + _ROWS])
            number = len(lines)
            sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": self.seed + number}
            how = sampled if number % _SAMPLED == _SAMPLED - 1 else {"do_sample": False}
            out = self.generator.generate(batch, max_new_tokens=_NEW, **how)
            texts = [[*ids, *new] for ids, new in zip(batch, out.new_tokens(), strict=True)]
            before = lines[-1]["seconds"] if lines else 0.0
            lines.append({"seconds": before + time.perf_counter() - began, "texts": texts})
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
        stream = np.array([token for line in lines for text in line["texts"] for token in text], dtype=np.int64)
        return stream, lines[-1]["seconds"] if lines else 0.0

    def _lines(self) -> list[dict[str, Any]]:
        """The batches that were written before; one that was cut off is written again."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in whole_lines(self.file)]

    def evaluations(self, prompts: Sequence[list[int]]) -> list[Evaluation]:
        """Held-out prompts with the target's greedy continuations."""
        prompts = [ids[-_EVALUATION_PROMPT:] for ids in prompts[:EVALUATIONS]]
        out = self.generator.generate(prompts, max_new_tokens=_EVALUATION_NEW, do_sample=False)
        pairs = zip(prompts, out.new_tokens(), strict=True)
        return [Evaluation([*ids, *new], len(ids)) for ids, new in pairs if len(new) > 1]


def whole_lines(file: Path) -> list[str]:
    """The lines of a file; one that a kill cut off is taken out of it."""
    with file.open("r+b") as opened:
        found = opened.read()
        end = found.rfind(b"\n") + 1
        if end < len(found):
            opened.truncate(end)
    return found[:end].decode().splitlines()


def divide(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[list[int]]]:
    """What is trained on of the texts, as one stream, and beginnings of what is held out at the end of each.

    Raises OptionError where there is too little.
    """
    kept, held = [], []
    for text in ids:
        cut = len(text) - max(len(text) // HELD_OUT, min(_LEAST, len(text) // 4))
        kept.append(np.array(text[:cut], dtype=np.int64))
        held += [
            list(text[s : s + _LEAST]) for s in range(cut, len(text), max((len(text) - cut) // EVALUATIONS, _LEAST))
        ]
    stream = np.concatenate(kept)
    if len(stream) < _LEAST:
        raise OptionError.of("text", "files of some hundred tokens at least, better a million", f"{len(stream)} tokens")
    return stream, [one for one in held if one]


def divide_prompts(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts that are trained on, and those that are held out; raises OptionError where there are too few."""
    if len(prompts) < 2:
        raise OptionError.of("prompts", "two at least, as one in twenty is held out", len(prompts))
    return [ids for number, ids in enumerate(prompts) if number % HELD_OUT], list(prompts[::HELD_OUT])
