"""The recordings that a draft of a speech model is distilled on, with what the target writes about them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.errors import OptionError, UnsupportedError
from specdec.models.whisper import Whisper
from specdec.pipelines.audio import Samples, read_audio
from specdec.pipelines.features import window_features
from specdec.train.teacher import Lesson, Teacher
from specdec.train.texts import EXAMS, HELD_OUT, Exam, in_order

_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg")
_ROWS = 8  # windows that the target writes down together
_SHORTEST = 0.2  # seconds of a window


def find_sounds(sources: Sequence[str | PathLike[str]]) -> list[Path]:
    """The sound files that are named, that lie in a folder that is named, or that a text file has one of a line.

    Raises OptionError for what is not there.
    """
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.suffix.lower() in _SUFFIXES)
        elif source.suffix == ".txt" and source.is_file():
            lines = source.read_text(encoding="utf-8").splitlines()
            inside = [source.parent / line.strip() for line in lines if line.strip()]
        else:
            inside = [source]
        if missing := [path for path in inside if not path.is_file()] or ([] if inside else [source]):
            known = f"sound files, folders of {', '.join(_SUFFIXES)}, or a .txt that names one a line"
            raise OptionError.of("audio", known, str(missing[0]))
        found += inside
    return found


@dataclass(frozen=True)
class Piece:
    """At most one window of a sound file, and the target's transcript `ids` with its prompt of `first` tokens."""

    file: str
    begin: int
    ids: list[int]
    first: int


@dataclass(frozen=True)
class Sounds:
    """Windows of sound to learn from, with the target's transcripts, and those that are held out."""

    stenographer: Stenographer
    learned: list[Piece]
    held_out: list[Piece]

    @property
    def window(self) -> int:
        """How many tokens the longest transcript has, its prompt included, but for the last one."""
        return max(len(piece.ids) for piece in self.learned) - 1

    @property
    def size(self) -> int:
        """How many windows there are."""
        return len(self.learned)

    @cached_property
    def exams(self) -> list[Exam]:
        """Held-out windows."""
        return [Exam(piece.ids, piece.first, self.stenographer.features(piece)) for piece in self.held_out]

    def counts(self) -> Counter[int]:
        """How often each token comes."""
        return Counter(token for piece in self.learned for token in piece.ids)

    def batch(self, step: int, rows: int, seed: int) -> tuple[list[int], Tensor]:
        """The numbers and ids `[rows, window + 1]` of a step's windows, filled up behind their ends."""
        numbers = [in_order(self.size, step * rows + row, seed) for row in range(rows)]
        ids = torch.full((rows, self.window + 1), self.stenographer.whisper.end)
        for row, number in enumerate(numbers):
            own = torch.tensor(self.learned[number].ids)
            ids[row, : len(own)] = own
        return numbers, ids

    def teach(self, teacher: Teacher, number: int, ids: Tensor) -> Lesson:
        """The lesson about the window of this number; nothing is learned about its prompt, nor behind its end."""
        piece = self.learned[number]
        features = self.stenographer.features(piece)
        lesson = teacher.teach(ids, teacher.target.encode({"input_features": features}).hidden)
        at = torch.arange(ids.shape[1], device=ids.device)
        return replace(lesson, weight=lesson.weight * ((at >= piece.first - 1) & (at < len(piece.ids) - 1)))


@dataclass(frozen=True)
class Stenographer:
    """Lets the target write down sounds, and notes the transcripts in a file, where they are found again."""

    generator: SpecGenerator
    extractor: Any
    file: Path

    @cached_property
    def whisper(self) -> Whisper:
        """The target; raises UnsupportedError for a model of another kind."""
        if self.generator.target.config.model_type != "whisper":
            raise UnsupportedError(
                f"`audio` is for Whisper models, and the target is a {type(self.generator.target.model).__name__}"
            )
        return Whisper(self.generator.target, self.generator.tokenizer)

    def write(self, files: Sequence[Path], go_on: Callable[[int, int], bool]) -> Sounds:
        """Transcripts of all windows of these files, as far as `go_on` lets it, asked before every few of them.

        One window in twenty is held out. Raises OptionError where there are less than two.
        """
        windows = [(str(file), begin) for file in files for begin in self._begins(file)]
        pieces = self._noted()
        while len(pieces) < len(windows) and (go_on(len(pieces), len(windows)) or len(pieces) < 2):
            new = self._transcribed(windows[len(pieces) : len(pieces) + _ROWS])
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(vars(piece)) + "\n" for piece in new)
            pieces += new
        if len(pieces) < 2:
            raise OptionError.of("audio", "two windows of sound at least, as one in twenty is held out", len(pieces))
        learned = [piece for number, piece in enumerate(pieces) if number % HELD_OUT]
        return Sounds(self, learned, pieces[::HELD_OUT][:EXAMS])

    def features(self, piece: Piece) -> Tensor:
        """Features `[1, mels, frames]` of a window."""
        return self._features(piece.file, piece.begin)[None]

    def _features(self, file: str, begin: int) -> Tensor:
        return window_features(self._samples(file)[begin : begin + self.extractor.n_samples], self.extractor)

    def _begins(self, file: Path) -> range:
        """Where the windows of a file begin, in samples; a very short rest is left out."""
        rest = round(_SHORTEST * self.extractor.sampling_rate)
        return range(0, max(len(self._samples(str(file))) - rest, 0), self.extractor.n_samples)

    def _samples(self, file: str) -> Samples:
        return _read(file, self.extractor.sampling_rate)

    def _transcribed(self, windows: Sequence[tuple[str, int]]) -> list[Piece]:
        features = torch.stack([self._features(*window) for window in windows])
        encoding = self.generator.target.encode({"input_features": features})
        prompts = self.whisper.prompts(encoding, language=None, task=None, timestamps=[False] * len(windows))
        room = int(self.whisper.model.config.max_target_positions) - len(prompts[0])
        out = self.generator.generate(
            input_features=features,
            encoder_outputs=encoding,
            decoder_input_ids=prompts,
            max_new_tokens=room,
            do_sample=False,
        )
        found = zip(windows, prompts, out.new_tokens(), strict=True)
        return [Piece(*window, [*prompt, *new], len(prompt)) for window, prompt, new in found]

    def _noted(self) -> list[Piece]:
        """The windows that were written down before; a line that was cut off is left out."""
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8").split("\n")[:-1]
        self.file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return [Piece(**json.loads(line)) for line in lines]


@lru_cache(maxsize=1)  # one file after the other, window after window
def _read(file: str, rate: int) -> Samples:
    return read_audio(file, rate).samples
