"""`distill`: a draft for any target, trained on given text and on what the target writes itself."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, isnan
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.distill.optimise import descend, make_optimizers, rate
from specdec.distill.recordings import Labeller, Recordings, find_sounds
from specdec.distill.students import STEPS, EagleStudent, LayersStudent, Student, spread_layers
from specdec.distill.teacher import CACHE_GIB, Example, ExampleCache, Teacher
from specdec.distill.texts import Evaluation, Texts, Writer, divide, divide_prompts, encode_prompts, read_texts
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.generator.inputs import check_tokenizer
from specdec.models.vocabulary import likeliest
from specdec.options.checks import is_number, is_whole
from specdec.pipelines.speech.transcribe import processor_beside

KINDS = ("eagle3", "layers")
STATE = "training"  # a folder beside the draft, from which its training goes on
CARD = "card.json"
_VOCABULARY = 8192  # tokens that a head guesses, of larger vocabularies
_LAYERS = {"eagle3": 1, "layers": 2}
_WRITES = 0.25  # about this share of the time at the most, the target continues prompts; learning keeps the others
_LISTENS = 0.5  # the same for what it hears, which is encoded as it is written down
_DECAY_FROM = 0.4  # of the course
_RATES = (0.006, 0.001)  # of Muon, lower for targets that are wider than `_WIDTH`, and of AdamW
_WIDTH = 576
_SAVE_EVERY = 120.0  # seconds
_TRIAL_TOKENS = 48

Notify = Callable[[float, float, str], object]


@dataclass(frozen=True)
class Settings:
    """What a draft is trained with; a training that was broken off goes on with the same settings alone.

    Raises OptionError for values that cannot be, and for options that do nothing.
    """

    kind: str = "eagle3"
    layers: int | None = None
    draft_vocabulary: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError.of("kind", f"one of {', '.join(KINDS)}", self.kind)
        for name in ("layers", "draft_vocabulary"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise OptionError.of(name, "a whole number of at least 1", value)
        if not is_whole(self.seed) or self.seed < 0:
            raise OptionError.of("seed", "a whole number of at least 0", self.seed)


@dataclass(frozen=True)
class Length:
    """How long a training is: so many hours, or steps."""

    hours: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.hours is not None and self.steps is not None:
            raise OptionError("`hours` and `steps` both say how long to train: pass one of them")
        if self.steps is not None and (not is_whole(self.steps) or self.steps < 1):
            raise OptionError.of("steps", "a whole number of at least 1", self.steps)
        if self.hours is not None and not (is_number(self.hours) and self.hours > 0):
            raise OptionError.of("hours", "a number above 0", self.hours)

    @property
    def seconds(self) -> float:
        """In all, where it is time that counts; an hour where nothing was said."""
        return (self.hours or 1.0) * 3600

    def done(self, step: int, seconds: float, before: float = 0.0) -> float:
        """The share of the learning that is done after so many steps, and seconds; it began after some of these."""
        if self.steps is not None:
            return step / self.steps
        return (seconds - before) / (self.seconds - before) if before < self.seconds else 1.0


def distill(
    target: Any,
    out: str | PathLike[str],
    *,
    text: Sequence[str | PathLike[str]] = (),
    prompts: Sequence[str] = (),
    audio: Sequence[str | PathLike[str]] = (),
    tokenizer: Any = None,
    feature_extractor: Any = None,
    kind: str = "eagle3",
    layers: int | None = None,
    draft_vocabulary: int | None = None,
    hours: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    cache_gib: float = CACHE_GIB,
    notify: Notify | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    **loading: Any,
) -> dict[str, Any]:
    """Trains a draft for a target on its distributions, writes it to `out` and returns its card.

    `target` is a model with its `tokenizer`, or an id or folder, loaded as `loading` says (`Loading`). It learns from
    files of `text` and from what a decoder-only target writes after `prompts`, or from `audio` (sound files, folders,
    `.txt` files that name one a line) and what a Whisper target, with its `feature_extractor`, hears in there; one part
    in twenty is held out. `kind`:
    "eagle3" is a head of one or `layers` layers over the target's hidden states, in the format of `speculators`, which
    guesses the `draft_vocabulary` most frequent tokens (EAGLE-3, arXiv 2503.01840); "layers" is a small sibling made
    of two or `layers` of the target's own, which guesses such tokens too. It takes so many `hours` (1 by default) or
    `steps`. What the target says about texts is kept beside the draft until the training ends, and what its encoder
    says of sounds: each in at most `cache_gib` GiB, beyond which the target is asked again each time.

    `notify` is told how much of how much is done, and how good the draft is. Where `is_stopped` says so, training
    ends, and the draft is written as it is. The same call goes on from where the last one ended, and with a larger
    number of `hours` or `steps` beyond its end. Raises OptionError for wrong options, and for a folder that holds
    another draft; UnsupportedError for targets that cannot be distilled like this.
    """
    settings, length = Settings(kind, layers, draft_vocabulary, seed), Length(hours, steps)
    if not (is_number(cache_gib) and 0 <= cache_gib < inf):
        raise OptionError.of("cache_gib", "a number of at least 0", cache_gib)
    if not text and not prompts and not audio:
        raise OptionError("nothing to learn from: pass `text`, `prompts`, or both, or `audio` for a Whisper model")
    if audio and (text or prompts or kind != "layers"):
        raise OptionError("`audio` trains kind 'layers' and goes without `text` and `prompts`: pass it and that alone")
    if any(isinstance(one, str | PathLike) for one in (text, prompts, audio)):
        raise OptionError("`text` and `audio` are lists of files, `prompts` one of texts: pass a list")
    texts, sounds = read_texts(text), find_sounds(audio)
    learned = {"text": texts, "prompts": prompts, "audio": [f"{file} {file.stat().st_size}" for file in sounds]}
    folder = _claimed(Path(out), settings, {**loading, **{name: digest(what) for name, what in learned.items()}})
    check_tokenizer("tokenizer", tokenizer)
    named = isinstance(target, str | PathLike)
    make = SpecGenerator.from_pretrained if named else SpecGenerator
    generator = make(target, tokenizer=tokenizer, backend="eager", **loading)
    if generator.tokenizer is None:
        raise OptionError("`tokenizer` is needed to read texts: there is none beside the target")
    if generator.target.is_encoder_decoder and not audio:
        raise UnsupportedError(
            f"`target` {type(generator.target.model).__name__} has an encoder; drafts are distilled for decoder-only "
            "targets, and for Whisper models from `audio`: the repository's `recipes/` show how others are made"
        )
    cache = int(cache_gib * 2**30)
    trainer = Trainer(generator, _swift(generator), folder, settings, length, cache, notify or _nobody, is_stopped)
    if not audio:
        return trainer.run(*trainer.read(texts, prompts))
    if feature_extractor is None and named:
        feature_extractor = processor_beside(target).feature_extractor
    if feature_extractor is None:
        raise OptionError("`feature_extractor` is needed to hear sounds: pass it with the model")
    return trainer.run(*trainer.label_recordings(sounds, feature_extractor))


def _swift(generator: SpecGenerator) -> SpecGenerator:
    """The same target over packed weights, where it can have them: writing takes a good part of the time."""
    try:
        return SpecGenerator(generator.target.model, tokenizer=generator.tokenizer, backend="packed")
    except UnsupportedError:
        return generator


def _nobody(done: float, total: float, doing: str) -> None:
    """Hears nothing."""


def digest(texts: Sequence[str]) -> str:
    """A short name of these texts, in this order, by which others are told from them."""
    lengths = ",".join(str(len(text)) for text in texts)
    return hashlib.sha256("\0".join([lengths, *texts]).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _claimed(out: Path, settings: Settings, given: dict[str, Any]) -> Path:
    """The folder of a draft, its settings and what else was `given` noted; raises OptionError where others are."""
    note = out / STATE / "settings.json"
    wanted = {**asdict(settings), **{name: str(value) for name, value in given.items()}}
    if note.exists():
        if (found := json.loads(note.read_text())) != wanted:
            differ = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise OptionError(
                f"`out` {str(out)!r} holds a training with another `{differ[0]}`, {found.get(differ[0])!r}: go on with "
                "that, or name another folder"
            )
        return out
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise OptionError.of("out", "a new or empty folder, or one where a training was broken off", str(out))
    try:
        note.parent.mkdir(parents=True)
        note.write_text(json.dumps(wanted, indent=2) + "\n")
    except OSError as error:
        raise OptionError.of("out", "a folder that can be written", str(out), str(error)) from None
    return out


class Dataset(Protocol):
    """What is learned from: numbered windows of a length in tokens, so many `rows` in a step, and held-out texts."""

    @property
    def rows(self) -> int: ...
    @property
    def evaluations(self) -> list[Evaluation]: ...
    @property
    def window(self) -> int: ...
    @property
    def size(self) -> int: ...
    def counts(self) -> Counter[int]: ...
    def batch(self, step: int, seed: int) -> tuple[list[int], Tensor]: ...
    def label(self, teacher: Teacher, number: int, ids: Tensor) -> Example: ...
    def encoder_states(self, numbers: Sequence[int]) -> Tensor | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Trainer:
    """A training: who teaches and who writes, where the draft goes, how and how long it learns, who is told.

    What was said once is kept in files of at most `cache` bytes.
    """

    generator: SpecGenerator
    writer: SpecGenerator
    folder: Path
    settings: Settings
    length: Length
    cache: int
    notify: Notify
    is_stopped: Callable[[], bool]

    def run(self, dataset: Dataset, seconds: float) -> dict[str, Any]:
        """Trains, and says how good the draft is; preparing the examples took so many seconds of the training."""
        training = TrainingRun(self, self._student(dataset), dataset, seconds)
        card = {**training.run(), **self._trial(dataset)}
        _write(self.folder / CARD, card)
        return card

    def label_recordings(self, sounds: Sequence[Path], extractor: Any) -> tuple[Recordings, float]:
        """The target's transcripts of sounds, and how many seconds they took of the training."""
        began = time.perf_counter()

        def go_on(done: int, total: int) -> bool:
            self.notify(done, total, f"the target writes down what it hears, {done} of {total}")
            in_time = self._in_time(time.perf_counter() - began, _LISTENS)
            return not self._begun and in_time and not self.is_stopped()

        notes = self.folder / STATE / "transcripts.jsonl"
        recordings = Labeller(self.writer, extractor, notes, sounds, self.cache).write(go_on)
        return recordings, min(time.perf_counter() - began, _LISTENS * self.length.seconds)

    def read(self, texts: Sequence[str], prompts: Sequence[str]) -> tuple[Texts, float]:
        """What is learned from, and how many seconds the target wrote for that."""
        tokenizer, seconds = self.generator.tokenizer, 0.0
        streams: list[np.ndarray] = []
        held: list[list[int]] = []
        writer = Writer(self.writer, self.folder / STATE / "continuations.jsonl", self.settings.seed)
        if texts:
            stream, held = divide([tokenizer(text, verbose=False)["input_ids"] for text in texts])
            streams.append(stream)
        if prompts:
            learned, held = divide_prompts(encode_prompts(tokenizer, prompts))
            stream, seconds = writer.write(learned, self._may_write)
            if len(stream):
                streams.append(stream)
        if not streams or min(map(len, streams)) <= 2 * STEPS:
            raise OptionError("`prompts` were continued by nothing to learn from: pass more of them, or `text`")
        return Texts(streams, writer.evaluations(held)), min(seconds, _WRITES * self.length.seconds)

    @property
    def _begun(self) -> bool:
        """Whether something was learned already: then the examples stay what they are."""
        return (self.folder / STATE / "state.pt").exists()

    def _may_write(self, done: int, total: int, seconds: float) -> bool:
        self.notify(done, total, f"the target continues prompts, {done} of {total}")
        return not self._begun and self._in_time(seconds, _WRITES) and (not done or not self.is_stopped())

    def _in_time(self, seconds: float, share: float) -> bool:
        """Whether so many seconds are less than a share of those of the training."""
        return self.length.steps is not None or seconds < share * self.length.seconds

    def _student(self, dataset: Dataset) -> Student:
        target, settings = self.generator.target, self.settings
        layers = settings.layers or min(_LAYERS[settings.kind], target.num_layers)
        torch.manual_seed(settings.seed)
        size = settings.draft_vocabulary or min(_VOCABULARY, target.vocab_size)
        ids = sorted(likeliest(target, dataset.counts(), size, "draft_vocabulary"))
        vocabulary = None if len(ids) == target.vocab_size else torch.tensor(ids, device=target.device)
        if settings.kind == "eagle3":
            return EagleStudent(target, vocabulary, layers)
        if layers > target.num_layers:
            raise OptionError.of("layers", f"at most the {target.num_layers} of the target", layers)
        return LayersStudent(target, spread_layers(layers, target.num_layers), self.generator.tokenizer, vocabulary)

    def _trial(self, dataset: Dataset) -> dict[str, Any]:
        """Plain and assisted decoding in turn, on held-out prompts."""
        plain = self.writer
        assisted = SpecGenerator(plain.target, str(self.folder), tokenizer=plain.tokenizer)
        paces: dict[str, list[float]] = {"plain": [], "assisted": []}
        passes = tokens = 0
        for number, evaluation in enumerate([dataset.evaluations[0], *dataset.evaluations]):
            room = min(_TRIAL_TOKENS, len(evaluation.ids) - evaluation.first)
            for name, one in (("plain", plain), ("assisted", assisted)):
                began = time.perf_counter()
                made = one.generate(**evaluation.inputs, max_new_tokens=room, do_sample=False)
                if number:  # the first one warms up
                    paces[name].append((time.perf_counter() - began) / max(len(made.new_tokens()[0]), 1))
            if number and made.stats is not None:
                passes, tokens = passes + made.stats.num_target_passes, tokens + len(made.new_tokens()[0])
        plain_ms, assisted_ms = (1000 * median(paces[name]) for name in ("plain", "assisted"))
        return {
            "tokens_per_pass": round(tokens / max(passes, 1), 3),
            "plain_ms_per_token": round(plain_ms, 3),
            "assisted_ms_per_token": round(assisted_ms, 3),
            "speedup": round(plain_ms / assisted_ms, 3),
        }


class TrainingRun:
    """The course of one training, which can be broken off after any step."""

    def __init__(self, trainer: Trainer, student: Student, dataset: Dataset, seconds: float) -> None:
        self.trainer, self.student, self.dataset = trainer, student, dataset
        muon, adam = _RATES
        width = trainer.generator.target.config.hidden_size
        self.optimizers = make_optimizers(student.module, muon * min(1.0, _WIDTH / width), adam)
        self.step, self.prepared, self.seconds, self.loss = 0, seconds, seconds, float("nan")
        self._state = trainer.folder / STATE / "state.pt"
        file = trainer.folder / STATE / "examples.bin"
        self._examples = ExampleCache(partial(dataset.label, student.teacher), file, dataset.size, trainer.cache)
        if self._state.exists():
            self._resume()

    def run(self) -> dict[str, Any]:
        """Trains to the end, or until somebody stops it, and writes the draft and its state now and then; its card."""
        trainer, saved = self.trainer, time.perf_counter()
        while (done := trainer.length.done(self.step, self.seconds, self.prepared)) < 1 and not trainer.is_stopped():
            began = time.perf_counter()
            numbers, ids = self.dataset.batch(self.step, trainer.settings.seed)
            example = self._examples.example(numbers, ids.to(trainer.generator.target.device))
            example = replace(example, encoder_states=self.dataset.encoder_states(numbers))
            loss = self.student.loss(example, self.step)
            descend(loss, self.optimizers, rate(self.step, done, _DECAY_FROM))
            told = loss.item()
            self.loss = told if self.step == 0 else 0.95 * self.loss + 0.05 * told
            self.step += 1
            self.seconds += time.perf_counter() - began
            self._tell()
            if time.perf_counter() - saved > _SAVE_EVERY:
                self.save()
                saved = time.perf_counter()
        self._examples.close()
        if not trainer.is_stopped():
            self.dataset.close()
        return self.save()

    def save(self) -> dict[str, Any]:
        """Writes the draft, and what its training goes on from; the card."""
        self.student.save(self.trainer.folder)
        card = self.card()
        _write(self.trainer.folder / CARD, card)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "prepared": self.prepared,
            "loss": self.loss,
            "module": self.student.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        fresh = self._state.with_suffix(".new")
        torch.save(state, fresh)
        os.replace(fresh, self._state)
        return card

    def card(self) -> dict[str, Any]:
        """What the draft is, and how good it is on held-out texts."""
        settings, target = self.trainer.settings, self.trainer.generator.target
        right = torch.cat([self._chains(evaluation) for evaluation in self.dataset.evaluations])
        reached = [(right >= step).float().mean().item() for step in range(STEPS + 1)]
        return {
            **{name: value for name, value in asdict(settings).items() if value is not None},
            "target": str(target.model.config.name_or_path) or type(target.model).__name__,
            "steps": self.step,
            "tokens": self.step * self.dataset.rows * self.dataset.window,
            "seconds": round(self.seconds, 1),
            "loss": None if isnan(self.loss) else round(self.loss, 4),
            "agreement": [round(b / a, 4) if a else 0.0 for a, b in pairwise(reached)],
            "acceptance_length": round(sum(reached), 3),
        }

    def _chains(self, evaluation: Evaluation) -> Tensor:
        target = self.trainer.generator.target
        features = evaluation.features
        encoder_states = None if features is None else target.encode({"input_features": features}).hidden
        hits = self.student.hits(torch.tensor([evaluation.ids], device=target.device), encoder_states)
        return hits[0, max(evaluation.first - 2, 0) :].long().cumprod(1).sum(1)

    def _tell(self) -> None:
        length = self.trainer.length
        done, total = (self.step, length.steps) if length.steps is not None else (self.seconds, length.seconds)
        self.trainer.notify(done, total, f"step {self.step}, loss {self.loss:.3f}")

    def _resume(self) -> None:
        try:
            state = torch.load(self._state, map_location=self.trainer.generator.target.device, weights_only=True)
            self.student.module.load_state_dict(state["module"])
            for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self.step, self.seconds, self.prepared = state["step"], state["seconds"], state.get("prepared", 0.0)
            self.loss = state["loss"]
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
            raise LoadError(f"{self._state} is broken: remove it to begin anew") from error


def _write(file: Path, card: dict[str, Any]) -> None:
    file.write_text(json.dumps(card, indent=2) + "\n")
