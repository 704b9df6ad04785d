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
from specdec.distill.teacher import DiskCache, Example, Teacher
from specdec.distill.texts import EVALUATIONS, HELD_OUT, Evaluation, in_order, whole_lines
from specdec.errors import OptionError, UnsupportedError
from specdec.models.encoding import Encoding
from specdec.pipelines.speech.audio import SUFFIXES, Samples, read_audio, sounds_in
from specdec.pipelines.speech.features import window_features
from specdec.pipelines.speech.whisper import Whisper

_WRITTEN = 8  # windows that the target writes down together
_LEARNED = 8  # windows of a step: with fewer of them the optimizer takes longer than all passes
_SHORTEST = 0.2  # seconds of a window


def find_sounds(sources: Sequence[str | PathLike[str]]) -> list[Path]:
    """The sound files that are named, that lie in a folder that is named, or that a text file has one of a line.

    Raises OptionError for what is not there.
    """
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sounds_in(source)
        elif source.suffix == ".txt" and source.is_file():
            lines = source.read_text(encoding="utf-8").splitlines()
            inside = [source.parent / line.strip() for line in lines if line.strip()]
        else:
            inside = [source]
        if missing := [path for path in inside if not path.is_file()] or ([] if inside else [source]):
            known = f"sound files, folders of {', '.join(SUFFIXES)}, or a .txt that names one a line"
            raise OptionError.of("audio", known, str(missing[0]))
        found += inside
    return found


@dataclass(frozen=True)
class LabelledWindow:
    """At most one window of a sound file, and the target's transcript `ids` with its prompt of `first` tokens.

    `number` counts the windows of all files.
    """

    number: int
    file: str
    begin: int
    ids: list[int]
    first: int


@dataclass(frozen=True)
class Recordings:
    """Windows of sound to learn from, with the target's transcripts, and those that are held out."""

    labeller: Labeller
    learned: list[LabelledWindow]
    held_out: list[LabelledWindow]
    rows: int = _LEARNED

    @property
    def window(self) -> int:
        """How many tokens the longest transcript has, its prompt included, but for the last one."""
        return max(len(labelled.ids) for labelled in self.learned) - 1

    @property
    def size(self) -> int:
        """How many windows there are."""
        return len(self.learned)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Held-out windows."""
        return [
            Evaluation(labelled.ids, labelled.first, self.labeller.features(labelled)) for labelled in self.held_out
        ]

    def counts(self) -> Counter[int]:
        """How often each token comes."""
        return Counter(token for labelled in self.learned for token in labelled.ids)

    def batch(self, step: int, seed: int) -> tuple[list[int], Tensor]:
        """The numbers and ids `[rows, window + 1]` of a step's windows, filled up behind their ends."""
        numbers = [in_order(self.size, step * self.rows + row, seed) for row in range(self.rows)]
        ids = torch.full((self.rows, self.window + 1), self.labeller.whisper.end)
        for row, number in enumerate(numbers):
            own = torch.tensor(self.learned[number].ids)
            ids[row, : len(own)] = own
        return numbers, ids

    def label(self, teacher: Teacher, number: int, ids: Tensor) -> Example:
        """The example about the window of this number; nothing is learned about its prompt, nor behind its end."""
        labelled = self.learned[number]
        example = teacher.label(ids[:, : len(labelled.ids) - 1], self.labeller.encoder_states(labelled))
        example.weight[:, : labelled.first - 1] = 0
        return replace(example.padded(ids), encoder_states=None)

    def encoder_states(self, numbers: Sequence[int]) -> Tensor:
        """What the encoder says of the windows of these numbers, `[rows, frames, width]`."""
        return torch.cat([self.labeller.encoder_states(self.learned[number]) for number in numbers])

    def close(self) -> None:
        """Removes what was kept of that."""
        self.labeller.disk.close()


@dataclass(frozen=True)
class Labeller:
    """Lets the target write down sounds, and notes the transcripts in a file, where they are found again.

    What its encoder says is kept on a disk cache beside them, so that a window is encoded once, also where a training
    is broken off and goes on: as many as `cache` bytes hold.
    """

    generator: SpecGenerator
    extractor: Any
    file: Path
    files: Sequence[Path]
    cache: int

    @cached_property
    def whisper(self) -> Whisper:
        """The target; raises UnsupportedError for a model of another kind."""
        if self.generator.target.config.model_type != "whisper":
            raise UnsupportedError(
                f"`audio` is for Whisper models, and the target is a {type(self.generator.target.model).__name__}"
            )
        return Whisper(self.generator.target, self.generator.tokenizer)

    @cached_property
    def windows(self) -> list[tuple[str, int]]:
        """All windows: a file, and the sample with which the window begins."""
        return [(str(file), begin) for file in self.files for begin in self._begins(file)]

    @cached_property
    def disk(self) -> DiskCache:
        """What the encoder says of windows, by their numbers."""
        return DiskCache(self.file.with_name("encoder_states.bin"), len(self.windows), self.cache)

    def write(self, go_on: Callable[[int, int], bool]) -> Recordings:
        """Transcripts of all windows, as far as `go_on` lets it, asked before every few of them.

        Every other few are written with timestamps, where the target knows them. Windows about which it does not come
        to an end are left out; one in twenty of the others is held out. Raises OptionError for less than two of them.
        """
        done, total = self._noted(), len(self.windows)
        while len(done) < total and (go_on(len(done), total) or len(done) < 2):
            new = self._transcribed(len(done))
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(vars(labelled)) + "\n" for labelled in new)
            done += new
        whole = [labelled for labelled in done if labelled.ids[-1] == self.whisper.end]
        if len(whole) < 2:
            wanted = "two windows of sound that the target writes down to an end, as one in twenty is held out"
            raise OptionError.of("audio", wanted, f"{len(whole)} of {len(done)} windows")
        learned = [labelled for number, labelled in enumerate(whole) if number % HELD_OUT]
        return Recordings(self, learned, whole[::HELD_OUT][:EVALUATIONS])

    def features(self, labelled: LabelledWindow) -> Tensor:
        """Features `[1, mels, frames]` of a window."""
        return self._features(labelled.file, labelled.begin)[None]

    def encoder_states(self, labelled: LabelledWindow) -> Tensor:
        """What the encoder says of a window, `[1, frames, width]` in bfloat16."""
        if (kept := self.disk.get(labelled.number)) is not None:
            return kept["encoder_states"].to(self.generator.target.device)
        return self._encoded(labelled.number, self.features(labelled)).hidden.bfloat16()

    def _encoded(self, number: int, features: Tensor) -> Encoding:
        """What the encoder says of one window `[1, mels, frames]`, encoded alone, so that it is always the same."""
        encoding = self.generator.target.encode({"input_features": features})
        self.disk.put(number, {"encoder_states": encoding.hidden.bfloat16()})
        return encoding

    def _features(self, file: str, begin: int) -> Tensor:
        return window_features(self._samples(file)[begin : begin + self.extractor.n_samples], self.extractor)

    def _begins(self, file: Path) -> range:
        """Where the windows of a file begin, in samples; a very short rest is left out."""
        rest = round(_SHORTEST * self.extractor.sampling_rate)
        return range(0, max(len(self._samples(str(file))) - rest, 0), self.extractor.n_samples)

    def _samples(self, file: str) -> Samples:
        return _read(file, self.extractor.sampling_rate)

    def _transcribed(self, first: int) -> list[LabelledWindow]:
        """The transcripts of the windows from number `first` on; all are with timestamps, or none."""
        windows, whisper = self.windows[first : first + _WRITTEN], self.whisper
        features = torch.stack([self._features(*window) for window in windows])
        encoding = Encoding.joined([self._encoded(*one) for one in enumerate(torch.split(features, 1), first)])
        stamped = whisper.setting("no_timestamps_token_id") is not None and first // _WRITTEN % 2 == 1
        task = "transcribe" if whisper.setting("task_to_id") else None
        prompts = whisper.prompts(encoding, language=None, task=task, timestamps=[stamped] * len(windows))
        out = self.generator.generate(
            input_features=features,
            encoder_outputs=encoding,
            decoder_input_ids=prompts,
            max_new_tokens=int(whisper.model.config.max_target_positions) - len(prompts[0]),
            do_sample=False,
            logits_processor=[whisper.timestamp_rules(len(prompts[0]))] if stamped else [],
        )
        found = enumerate(zip(windows, prompts, out.new_tokens(), strict=True), first)
        return [LabelledWindow(i, *window, [*prompt, *new], len(prompt)) for i, (window, prompt, new) in found]

    def _noted(self) -> list[LabelledWindow]:
        """The windows that were written down before; a line that was cut off is left out."""
        if not self.file.exists():
            return []
        return [LabelledWindow(**json.loads(line)) for line in whole_lines(self.file)]


@lru_cache(maxsize=1)  # one file after the other, window after window
def _read(file: str, rate: int) -> Samples:
    return read_audio(file, rate).samples
