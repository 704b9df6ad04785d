"""The recordings that a speech model's draft is distilled on, with the target's transcripts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.distill.teacher import DiskCache, Example, Teacher
from specdec.distill.texts import EVALUATIONS, HELD_OUT, Evaluation, MayContinue, in_order, whole_lines
from specdec.errors import OptionError, UnsupportedError
from specdec.models.encoding import Encoding
from specdec.pipelines.speech.audio import SUFFIXES, Samples, read_audio, sounds_in, window_features
from specdec.pipelines.speech.whisper import Whisper

_BATCH = 8  # windows that the target transcribes together
_ROWS_PER_STEP = 8  # windows: with fewer, the optimizer takes longer than the passes
_SHORTEST = 0.2  # seconds


def find_sounds(sources: Sequence[str | PathLike[str]]) -> list[Path]:
    """The sound files of `sources`: files, folders, and `.txt` files with one file name per line.

    Raises OptionError for missing files.
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
    """A window of a sound file, which starts at sample `begin`, and the target's transcript.

    `number` counts the windows of all files; `ids` begin with a prompt of `first` tokens.
    """

    number: int
    file: str
    begin: int
    ids: list[int]
    first: int


@dataclass(frozen=True)
class Recordings:
    """Transcribed windows of sound: those to learn from, and held-out ones."""

    labeller: Labeller
    learned: list[LabelledWindow]
    held_out: list[LabelledWindow]
    rows: int = _ROWS_PER_STEP

    @property
    def window(self) -> int:
        """Tokens of the longest transcript, including its prompt, excluding the last one."""
        return max(len(labelled.ids) for labelled in self.learned) - 1

    @property
    def size(self) -> int:
        """The number of windows."""
        return len(self.learned)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """The held-out windows as evaluations."""
        return [
            Evaluation(one.ids, one.first, self.labeller.features(one.file, one.begin)[None]) for one in self.held_out
        ]

    def counts(self) -> Counter[int]:
        """The number of occurrences of each token."""
        return Counter(token for labelled in self.learned for token in labelled.ids)

    def batch(self, step: int, seed: int) -> tuple[list[int], Tensor]:
        """The numbers and ids `[rows, window + 1]` of a step's windows, padded with the end token."""
        numbers = [in_order(self.size, step * self.rows + row, seed) for row in range(self.rows)]
        ids = torch.full((self.rows, self.window + 1), self.labeller.whisper.end)
        for row, number in enumerate(numbers):
            own = torch.tensor(self.learned[number].ids)
            ids[row, : len(own)] = own
        return numbers, ids

    def label(self, teacher: Teacher, number: int, ids: Tensor) -> Example:
        """The example of window `number`, with weight 0 for its prompt and padding."""
        labelled = self.learned[number]
        example = teacher.label(ids[:, : len(labelled.ids) - 1], self.labeller.encoder_states(labelled))
        example.weight[:, : labelled.first - 1] = 0
        return replace(example.padded(ids), encoder_states=None)

    def encoder_states(self, numbers: Sequence[int]) -> Tensor:
        """The encoder's output `[rows, frames, width]` for windows."""
        return torch.cat([self.labeller.encoder_states(self.learned[number]) for number in numbers])

    def close(self) -> None:
        """Removes the file of encoder outputs."""
        self.labeller.disk.close()


@dataclass(frozen=True)
class Labeller:
    """Lets the target transcribe windows of sound, and stores the transcripts in a file, from which it resumes.

    The encoder's output is stored beside them, in at most `cache` bytes, so that a window is encoded once.
    """

    generator: SpecGenerator
    extractor: Any
    file: Path
    files: Sequence[Path]
    cache: int

    @cached_property
    def whisper(self) -> Whisper:
        """The target as a Whisper model; raises UnsupportedError for other models."""
        if self.generator.target.config.model_type != "whisper":
            raise UnsupportedError(
                f"`audio` is for Whisper models, and the target is a {type(self.generator.target.model).__name__}"
            )
        return Whisper(self.generator.target, self.generator.tokenizer)

    @cached_property
    def windows(self) -> list[tuple[str, int]]:
        """All windows: the file and the sample at which the window starts; a very short rest of a file is left out."""
        rest, size = round(_SHORTEST * self.extractor.sampling_rate), self.extractor.n_samples
        lengths = ((str(file), len(self._samples(str(file)))) for file in self.files)
        return [(file, begin) for file, length in lengths for begin in range(0, max(length - rest, 0), size)]

    @cached_property
    def disk(self) -> DiskCache:
        """The encoder's output by number of the window."""
        return DiskCache(self.file.with_name("encoder_states.bin"), len(self.windows), self.cache)

    def write(self, may_continue: MayContinue) -> tuple[Recordings, float]:
        """All windows with transcripts, as far as `may_continue` allows, and the seconds that they took.

        Every other batch has timestamps, if the target writes them. Windows whose transcript does not end are left out;
        one in twenty of the others is held out. Raises OptionError for fewer than two of them.
        """
        start = time.perf_counter()
        done = [LabelledWindow(**json.loads(line)) for line in whole_lines(self.file)]
        total = len(self.windows)
        while len(done) < total and (may_continue(len(done), total, time.perf_counter() - start) or len(done) < 2):
            new = self._transcribed(len(done))
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(vars(labelled)) + "\n" for labelled in new)
            done += new
        whole = [labelled for labelled in done if labelled.ids[-1] == self.whisper.end]
        if len(whole) < 2:
            wanted = "at least two windows of sound whose transcript ends, as one in twenty is held out"
            raise OptionError.of("audio", wanted, f"{len(whole)} of {len(done)} windows")
        learned = [labelled for number, labelled in enumerate(whole) if number % HELD_OUT]
        return Recordings(self, learned, whole[::HELD_OUT][:EVALUATIONS]), time.perf_counter() - start

    def features(self, file: str, begin: int) -> Tensor:
        """Features `[mels, frames]` of the window of a file that starts at sample `begin`."""
        return window_features(self._samples(file)[begin : begin + self.extractor.n_samples], self.extractor)

    def encoder_states(self, labelled: LabelledWindow) -> Tensor:
        """The encoder's output `[1, frames, width]` for a window, in bfloat16."""
        if (kept := self.disk.get(labelled.number)) is not None:
            return kept["encoder_states"].to(self.generator.target.device)
        features = self.features(labelled.file, labelled.begin)[None]
        return self._encoded(labelled.number, features).hidden.bfloat16()

    def _encoded(self, number: int, features: Tensor) -> Encoding:
        """Encodes and stores one window `[1, mels, frames]`, alone, so that the output never depends on a batch."""
        encoding = self.generator.target.encode({"input_features": features})
        self.disk.put(number, {"encoder_states": encoding.hidden.bfloat16()})
        return encoding

    def _samples(self, file: str) -> Samples:
        return _read(file, self.extractor.sampling_rate)

    def _transcribed(self, first: int) -> list[LabelledWindow]:
        """Transcribes a batch of windows from number `first` on."""
        windows, whisper = self.windows[first : first + _BATCH], self.whisper
        features = torch.stack([self.features(*window) for window in windows])
        encoding = Encoding.joined([self._encoded(*one) for one in enumerate(torch.split(features, 1), first)])
        stamped = whisper.setting("no_timestamps_token_id") is not None and first // _BATCH % 2 == 1
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


@lru_cache(maxsize=1)  # files are read one after the other
def _read(file: str, rate: int) -> Samples:
    return read_audio(file, rate).samples
