"""The texts that a draft is distilled on: given texts, and the target's continuations of prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.distill.student import STEPS
from specdec import SpecGenerator
from specdec.errors import OptionError, SpecdecError
from specdec.generator.inputs.pictures import chat_ids, has_template
from specdec.options.line_files import whole_lines

_WINDOW = 512  # tokens, at most
_LEAST = 64  # tokens of text, and of a held-out prompt
_HELD_OUT = 20  # one prompt or token in 20 is held out
_ROWS = 64  # prompts per batch
_SAMPLED = 4  # every fourth batch is sampled, the others are greedy
_NEW = 192  # tokens of a continuation
_LONGEST = 512  # tokens of a prompt
_EVALUATIONS = 8  # held-out texts
_EVALUATION_PROMPT, _EVALUATION_NEW = 128, 64  # tokens
MayContinue = Callable[[int, int, float], bool]
"""Whether to go on, after `done` of `total` parts and so many seconds."""


def read_texts(files: Sequence[str | PathLike[str]]) -> list[str]:
    """The texts of files; raises OptionError for unreadable ones."""
    texts = []
    for file in files:
        try:
            texts.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError.of("text", "readable files in UTF-8", str(file), str(error)) from None
    return texts


def encode_prompts(tokenizer: Any, prompts: Sequence[str], processor: Any = None) -> list[list[int]]:
    """The ids of prompts, through the model's chat template if it has one."""
    if has_template(tokenizer, processor):
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        encoded = [chat_ids(turn, tokenizer, processor, add_generation_prompt=True) for turn in turns]
    else:
        encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [ids[-_LONGEST:] for ids in encoded if ids]


@dataclass(frozen=True)
class Evaluation:
    """A held-out text `ids`, which the target wrote greedily from token number `first` on."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class Texts:
    """Streams of ids to learn from, and held-out texts."""

    streams: list[np.ndarray]
    evaluations: list[Evaluation]

    @property
    def window(self) -> int:
        """Tokens of a training window, without the one after it."""
        return int(min(_WINDOW, *(len(stream) - 1 for stream in self.streams)))

    @cached_property
    def windows(self) -> list[np.ndarray]:
        """The windows of each stream, `[windows, window + 1]`."""
        size = self.window
        return [
            np.stack([stream[s : s + size + 1] for s in range(0, len(stream) - size, size)]) for stream in self.streams
        ]

    def chosen(self, step: int, seed: int) -> tuple[int, Tensor]:
        """The number and ids `[1, window + 1]` of a step's window, which depend on `step` and `seed` alone.

        Steps take turns between the streams; each is read whole, in another order each time. A step has one window,
        since many small steps learn more from the same tokens than few large ones.
        """
        turn, at = divmod(step, len(self.streams))
        windows = self.windows[at]
        epoch, index = divmod(turn, len(windows))
        number = int(np.random.default_rng((seed + at, epoch)).permutation(len(windows))[index])
        return sum(map(len, self.windows[:at])) + number, torch.from_numpy(windows[number : number + 1])


def continued(
    generator: SpecGenerator, prompts: Sequence[list[int]], file: Path, seed: int, may_continue: MayContinue
) -> tuple[np.ndarray, float]:
    """Prompts with the target's continuations, some of them sampled, as one stream, and the seconds that they took.

    Stores the continuations in `file`, from which it resumes. Before every batch but the first,
    `may_continue(done, total, seconds)` decides whether to go on.
    """
    with file.open("ab") as opened:
        try:
            lines = [json.loads(line) for line in whole_lines(opened)]
        except ValueError as error:
            raise SpecdecError(f"{file} is damaged ({error}): delete it to make its texts again") from None
    seconds = lines[-1]["seconds"] if lines else 0.0
    while (done := sum(len(line["texts"]) for line in lines)) < len(prompts):
        if not may_continue(done, len(prompts), seconds) and done:
            break
        start = time.perf_counter()
        batch = list(prompts[done : done + _ROWS])
        number = len(lines)
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": seed + number}
        how = sampled if number % _SAMPLED == _SAMPLED - 1 else {"do_sample": False}
        out = generator.generate(batch, max_new_tokens=_NEW, **how)
        texts = [[*ids, *new] for ids, new in zip(batch, out.new_tokens(), strict=True)]
        seconds += time.perf_counter() - start
        lines.append({"seconds": seconds, "texts": texts})
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(lines[-1]) + "\n")
    stream = np.array([token for line in lines for text in line["texts"] for token in text], dtype=np.int64)
    return stream, seconds


def evaluations(generator: SpecGenerator, prompts: Sequence[list[int]]) -> list[Evaluation]:
    """Held-out prompts with the target's greedy continuations, where these have room for a whole chain of guesses."""
    prompts = [ids[-_EVALUATION_PROMPT:] for ids in prompts[:_EVALUATIONS]]
    out = generator.generate(prompts, max_new_tokens=_EVALUATION_NEW, do_sample=False)
    pairs = zip(prompts, out.new_tokens(), strict=True)
    return [Evaluation([*ids, *new], len(ids)) for ids, new in pairs if len(new) > STEPS - min(len(ids), 2)]


def divide(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[list[int]]]:
    """Splits texts into one stream to train on and prompts from their held-out ends; raises OptionError for too few."""
    parts, prompts = [], []
    for text in ids:
        cut = len(text) - max(len(text) // _HELD_OUT, min(_LEAST, len(text) // 4))
        parts.append(np.array(text[:cut], dtype=np.int64))
        prompts += [
            list(text[s : s + _LEAST]) for s in range(cut, len(text), max((len(text) - cut) // _EVALUATIONS, _LEAST))
        ]
    stream = np.concatenate(parts)
    if len(stream) < _LEAST:
        raise OptionError.of("text", "files of some hundred tokens at least, better a million", f"{len(stream)} tokens")
    return stream, [prompt for prompt in prompts if prompt]


def divide_prompts(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Splits prompts into those to train on and held-out ones; raises OptionError for fewer than two."""
    if len(prompts) < 2:
        raise OptionError.of("prompts", "two at least, as one in twenty is held out", len(prompts))
    return [ids for number, ids in enumerate(prompts) if number % _HELD_OUT], list(prompts[::_HELD_OUT])
