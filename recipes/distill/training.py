"""`distill`: trains a draft for a target on given text and the target's own continuations."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf, isnan, nan
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from recipes.distill.new_head import save_eagle
from recipes.distill.student import STEPS, Student
from recipes.distill.teacher import CACHE_GIB, ExampleCache
from recipes.distill.texts import Texts, continued, divide, divide_prompts, encode_prompts, evaluations, read_texts
from recipes.optimise import descend, make_optimizers, rate
from specdec import SpecGenerator
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.generator.tokenizers import check_tokenizer
from specdec.models.language_model import LanguageModel
from specdec.options.fields import check_whole, is_number

STATE = "training"  # the folder beside the draft from which its training resumes
_VOCABULARY = 8192  # tokens of a draft's vocabulary, by default
_WRITING_SHARE = 0.25  # the target continues prompts for about this share of the time at most
_DECAY_FROM = 0.4  # share of the training after which learning rates decay
_RATES = (0.006, 0.001)  # learning rates of Muon (lower for targets wider than `_WIDTH`) and AdamW
_WIDTH = 576
_SAVE_EVERY = 120.0  # seconds

Notify = Callable[[float, float, str], object]


@dataclass(frozen=True)
class TrainingSettings:
    """A draft's settings, which must be the same when its training resumes; raises OptionError for invalid values."""

    layers: int = 1
    draft_vocabulary: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("layers", self.layers)
        if self.draft_vocabulary is not None:
            check_whole("draft_vocabulary", self.draft_vocabulary)
        check_whole("seed", self.seed, 0)


@dataclass(frozen=True)
class Length:
    """The length of a training, in hours or steps; raises OptionError for both, and for invalid values."""

    hours: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.hours is not None and self.steps is not None:
            raise OptionError("`hours` and `steps` both limit the training: pass one of them")
        if self.steps is not None:
            check_whole("steps", self.steps)
        if self.hours is not None and not (is_number(self.hours) and self.hours > 0):
            raise OptionError.of("hours", "a number above 0", self.hours)

    @property
    def seconds(self) -> float:
        """The length in seconds unless `steps` limits it; an hour by default."""
        return (self.hours or 1.0) * 3600

    def done(self, step: int, seconds: float, before: float = 0.0) -> float:
        """The share of the training that is done after `step` steps and `seconds`, of which `before` prepared it."""
        if self.steps is not None:
            return step / self.steps
        return (seconds - before) / (self.seconds - before) if before < self.seconds else 1.0


def distill(
    target: Any,
    out: str | PathLike[str],
    *,
    text: Sequence[str | PathLike[str]] = (),
    prompts: Sequence[str] = (),
    tokenizer: Any = None,
    layers: int = 1,
    draft_vocabulary: int | None = None,
    hours: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    cache_gib: float = CACHE_GIB,
    notify: Notify | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    **loading: Any,
) -> dict[str, Any]:
    """Trains a head on a target's hidden states and distributions, writes it to `out` and returns its card.

    `target` is a decoder-only model with its `tokenizer`, or an id or folder, loaded with the options `loading`
    (`Loading`). The head learns from files of `text` and the target's continuations of `prompts`; one part in twenty is
    held out. It has `layers` layers, the `speculators` format (EAGLE-3, arXiv 2503.01840), and guesses the
    `draft_vocabulary` most frequent tokens. Training takes `hours` (1 by default) or `steps`. Until it ends, the
    target's hidden states and distributions are cached beside the head, in at most `cache_gib` GiB; what does not fit
    is computed again each time.

    `notify(done, total, message)` reports progress. Once `is_stopped()` is true, training ends and the draft is
    written. The same call resumes the training, and larger `hours` or `steps` prolong it. Raises OptionError for wrong
    options, and for a folder that holds another draft; UnsupportedError for targets that cannot be distilled.
    """
    settings, length = TrainingSettings(layers, draft_vocabulary, seed), Length(hours, steps)
    if not (is_number(cache_gib) and 0 <= cache_gib < inf):
        raise OptionError.of("cache_gib", "a number of at least 0", cache_gib)
    if not text and not prompts:
        raise OptionError("nothing to learn from: pass `text`, `prompts`, or both")
    if any(isinstance(argument, str | PathLike) for argument in (text, prompts)):
        raise OptionError("`text` must be a list of files, `prompts` a list of texts, got one string: pass a list")
    texts = read_texts(text)
    folder = _claim_folder(Path(out), settings, {**loading, "text": hash_texts(texts), "prompts": hash_texts(prompts)})
    check_tokenizer("tokenizer", tokenizer)
    make = SpecGenerator.from_pretrained if isinstance(target, str | PathLike) else SpecGenerator
    generator = make(target, tokenizer=tokenizer, backend="eager", **loading)
    if generator.tokenizer is None:
        raise OptionError("`tokenizer` is needed to read texts, and the target has none: pass it")
    if generator.target.is_encoder_decoder:
        raise UnsupportedError(
            f"`target` {type(generator.target.model).__name__} has an encoder; drafts are distilled for decoder-only "
            "targets: see the repository's `recipes/` for others"
        )
    cache = int(cache_gib * 2**30)
    notify = notify or (lambda done, total, message: None)
    training = Training(generator, _packed(generator), folder, settings, length, cache, notify, is_stopped)
    return training.run(*training.read(texts, prompts))


def _packed(generator: SpecGenerator) -> SpecGenerator:
    """The same target with packed weights if possible, since writing takes much of the time."""
    try:
        return SpecGenerator(generator.target.model, tokenizer=generator.tokenizer, backend="packed")
    except UnsupportedError:
        return generator


def hash_texts(texts: Sequence[str]) -> str:
    """A hash of these texts and their order."""
    lengths = ",".join(str(len(text)) for text in texts)
    return hashlib.sha256("\0".join([lengths, *texts]).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _claim_folder(out: Path, settings: TrainingSettings, inputs: dict[str, Any]) -> Path:
    """Writes the settings and what else was `given` to the draft's folder; raises OptionError if it has others."""
    note = out / STATE / "settings.json"
    wanted = {**asdict(settings), **{name: str(value) for name, value in inputs.items()}}
    inside = [part for folder in (out, note.parent) if folder.is_dir() for part in folder.iterdir()]
    parts = [part for part in inside if part not in (note, note.parent)]
    if note.exists() and parts:  # alone, it is of a call that failed before it trained
        if (saved := _settings_in(note)) != wanted:
            differ = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
            raise OptionError(
                f"`out` {str(out)!r} holds a training with another `{differ[0]}`, {saved.get(differ[0])!r}: pass that, "
                "or name another folder"
            )
        return out
    if out.is_file() or parts:
        raise OptionError.of("out", "a new or empty folder, or one with a training to resume", str(out))
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(wanted, indent=2) + "\n")
    except OSError as error:
        raise OptionError.of("out", "a writable folder", str(out), str(error)) from None
    return out


def _settings_in(note: Path) -> dict[str, Any]:
    """The settings in a file; raises LoadError for a broken one."""
    try:
        settings: dict[str, Any] = json.loads(note.read_text())
    except ValueError as error:
        raise LoadError(f"{note} is broken: remove the folder {str(note.parents[1])!r} to begin anew") from error
    return settings


@dataclass
class Training:
    """Prepares the data of a training and runs it; it can be interrupted anywhere and resumed.

    `generator` runs the target for labels, `writer` for continuations. Cached examples take at most `cache` bytes.
    `seconds` have passed, `prepared` of them before the first step.
    """

    generator: SpecGenerator
    writer: SpecGenerator
    folder: Path
    settings: TrainingSettings
    length: Length
    cache: int
    notify: Notify
    is_stopped: Callable[[], bool]
    step: int = 0
    prepared: float = 0.0
    seconds: float = 0.0
    loss: float = nan

    def run(self, dataset: Texts, seconds: float) -> dict[str, Any]:
        """Trains on a dataset whose preparation took `seconds`, until the end, or until it is stopped.

        Saves now and then; returns the draft's card.
        """
        student, target = self._student(dataset), self.generator.target
        muon, adam = _RATES
        optimizers = make_optimizers(student.stage, muon * min(1.0, _WIDTH / target.config.hidden_size), adam)
        self.prepared, self.seconds = seconds, seconds
        examples = ExampleCache(student.teacher.label, self.folder / STATE / "examples", self.cache)
        if self._state.exists():
            self._resume(student, optimizers)
        try:
            self._train(student, optimizers, dataset, examples)
        finally:
            examples.close()
        return self._save(student, optimizers, dataset)

    def _train(self, student: Student, optimizers: list[Optimizer], dataset: Texts, examples: ExampleCache) -> None:
        length, target, saved = self.length, self.generator.target, time.perf_counter()
        while (done := length.done(self.step, self.seconds, self.prepared)) < 1 and not self.is_stopped():
            start = time.perf_counter()
            number, ids = dataset.chosen(self.step, self.settings.seed)
            loss = student.loss(examples.example(number, ids.to(target.device)), self.step)
            descend(loss, optimizers, rate(self.step, done, _DECAY_FROM))
            self.loss = loss.item() if self.step == 0 else 0.95 * self.loss + 0.05 * loss.item()
            self.step += 1
            self.seconds += time.perf_counter() - start
            past, whole = (self.seconds, length.seconds) if length.steps is None else (self.step, length.steps)
            self.notify(past, whole, f"step {self.step}, loss {self.loss:.3f}")
            if time.perf_counter() - saved > _SAVE_EVERY:
                self._save(student, optimizers, dataset)
                saved = time.perf_counter()

    def read(self, texts: Sequence[str], prompts: Sequence[str]) -> tuple[Texts, float]:
        """The dataset of texts and continued prompts, and how many seconds of the training these took."""
        tokenizer, seconds = self.generator.tokenizer, 0.0
        streams: list[np.ndarray] = []
        held_prompts: list[list[int]] = []
        if texts:
            stream, held_prompts = divide([tokenizer(text, verbose=False)["input_ids"] for text in texts])
            streams.append(stream)
        if prompts:
            learned, held_prompts = divide_prompts(encode_prompts(tokenizer, prompts, self.generator.processor))
            file = self.folder / STATE / "continuations.jsonl"
            stream, seconds = continued(self.writer, learned, file, self.settings.seed, self._may_write)
            if len(stream):
                streams.append(stream)
        if not streams or min(map(len, streams)) <= 2 * STEPS:
            raise OptionError("`prompts` have too few tokens with their continuations: pass more of them, or `text`")
        if not (held_out := evaluations(self.writer, held_prompts)):
            raise OptionError(f"the target ends all held-out texts within {STEPS} tokens: pass others, or more of them")
        return Texts(streams, held_out), min(seconds, _WRITING_SHARE * self.length.seconds)

    @property
    def _state(self) -> Path:
        return self.folder / STATE / "state.pt"

    def _may_write(self, done: int, total: int, seconds: float) -> bool:
        """Reports the writing; whether it may go on: for a share of the training, and until that has begun."""
        self.notify(done, total, f"the target continues prompts, {done} of {total}")
        in_time = self.length.steps is not None or seconds < _WRITING_SHARE * self.length.seconds
        return in_time and not self._state.exists() and not self.is_stopped()

    def _student(self, dataset: Texts) -> Student:
        target, settings = self.generator.target, self.settings
        torch.manual_seed(settings.seed)
        size = settings.draft_vocabulary or min(_VOCABULARY, target.vocab_size)
        ids = sorted(_likeliest(target, np.concatenate(dataset.streams), size))
        vocabulary = None if len(ids) == target.vocab_size else torch.tensor(ids, device=target.device)
        return Student(target, vocabulary, settings.layers)

    def _save(self, student: Student, optimizers: list[Optimizer], dataset: Texts) -> dict[str, Any]:
        """Writes the draft and the state of its training; returns the card."""
        save_eagle(student.stage, self.generator.target, self.folder, guesses=STEPS)
        card = self._card(student, dataset)
        (self.folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "prepared": self.prepared,
            "loss": self.loss,
            "stage": student.stage.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        fresh = self._state.with_suffix(".new")
        torch.save(state, fresh)
        os.replace(fresh, self._state)
        return card

    def _card(self, student: Student, dataset: Texts) -> dict[str, Any]:
        """The draft's settings, and its agreement with the target on held-out texts."""
        target, chains = self.generator.target, []
        for evaluation in dataset.evaluations:
            ids = torch.tensor([evaluation.ids], device=target.device)
            hits = student.hits(ids)[0, max(evaluation.first - 2, 0) :]
            chains.append(hits.long().cumprod(1).sum(1))
        right = torch.cat(chains)
        reached = [(right >= step).float().mean().item() for step in range(STEPS + 1)]
        return {
            **{name: value for name, value in asdict(self.settings).items() if value is not None},
            "target": str(target.model.config.name_or_path) or type(target.model).__name__,
            "steps": self.step,
            "tokens": self.step * dataset.window,
            "seconds": round(self.seconds, 1),
            "loss": None if isnan(self.loss) else round(self.loss, 4),
            "agreement": [round(b / a, 4) if a else 0.0 for a, b in pairwise(reached)],
            "acceptance_length": round(sum(reached), 3),
        }

    def _resume(self, student: Student, optimizers: list[Optimizer]) -> None:
        try:
            state = torch.load(self._state, map_location=self.generator.target.device, weights_only=True)
            student.stage.load_state_dict(state["stage"])
            for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(optimizer_state)
            self.step, self.seconds, self.prepared = state["step"], state["seconds"], state.get("prepared", 0.0)
            self.loss = state["loss"]
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, struct.error) as error:
            raise LoadError(f"{self._state} is broken: remove it to begin anew") from error


def _likeliest(language: LanguageModel, stream: np.ndarray, size: int) -> set[int]:
    """The `size` tokens most frequent in `stream`, filled up by the first ids, with those that end a text.

    Raises OptionError for more tokens than exist.
    """
    vocabulary, counts = range(language.vocab_size), Counter[int](stream.tolist())
    eos = getattr(language.model.generation_config, "eos_token_id", None)
    ends = [token for token in ([eos] if isinstance(eos, int) else eos or []) if token in vocabulary]
    if size > len(vocabulary):
        raise OptionError.of("draft_vocabulary", f"at most the {len(vocabulary)} tokens of the draft", size)
    often = [token for token, _ in counts.most_common() if token in vocabulary]
    likely = [*often, *(token for token in vocabulary if token not in counts)]
    others = [token for token in likely if token not in ends]
    return {*ends, *others[: max(size - len(ends), 0)]}
