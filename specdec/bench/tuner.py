"""Which draft and which weights are the fastest here: short answers of each in turn, within a number of seconds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import ne
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch

from specdec import kernels
from specdec.bench.machine import Watch, memory_bandwidth
from specdec.bench.parts import Drafting, Mode
from specdec.bench.prompts import PromptText, pick_prompts
from specdec.bench.runner import in_words
from specdec.bench.suite import PRESETS, Cell
from specdec.bench.systems import Systems, measure
from specdec.core.stats import Stats, total
from specdec.generator.generator import SpecGenerator
from specdec.models import LanguageModel, free_bytes
from specdec.options.drafts import ALONE, read_draft
from specdec.options.fields import COPYING
from specdec.options.load import AUTO, NONE, is_gguf

_TOKENS = 96  # the most tokens of an answer
_FEW = 8  # tokens that say how fast an answer is
_LEAST = 4  # tokens after the first, without which an answer that time ended says nothing
_WARM = 16  # tokens in which a draft makes its first passes, which are slow
_STEADY = 16  # the most tokens of an answer without a draft, each of which takes about as long
_WORTH = 1.25  # an answer so many times as long as one of a few words is worth more than another prompt's
_LAPS = 3  # over all prompts, at most
_AGAIN = 0.7  # of the first loading's time, that loading in fewer bits takes
_LARGE = 2**27  # bytes of weights: rounding smaller models gains little and hurts them more
_FASTER = 0.97  # share of a time, at most: a smaller gain is noise
_LATE = "not measured: too few tokens came in time"
_QUESTION = "Why do people in cold countries put salt on roads, and when does it not help? Answer in a few sentences."
_EDIT = """Rename `values` to `numbers` in this function, write all of it, then say what it returns:

```python
def spread(values):
    least, greatest = min(values), max(values)
    return {"least": least, "greatest": greatest, "spread": greatest - least}
```"""


@dataclass(frozen=True)
class TimedAnswer:
    """An answer to a `kind` of prompt; `ms` per token after the first; `first_token` in seconds."""

    ms: float
    first_token: float
    tokens: Sequence[int]
    stats: Stats
    kind: str = ""


@dataclass(frozen=True)
class Trial:
    """A draft with a target in one mode: its `answers` and `plain` decoding's, by the number of the prompt.

    `exactness`: what the target promises.
    """

    mode: Mode
    draft: str
    answers: Mapping[int, TimedAnswer]
    plain: Mapping[int, TimedAnswer]
    exactness: str

    @property
    def ms(self) -> float:
        return mean(answer.ms for answer in self.answers.values())

    @property
    def first_token(self) -> float:
        return mean(answer.first_token for answer in self.answers.values())

    @property
    def speedup(self) -> float:
        """Plain decoding's time per token over the draft's."""
        return mean(answer.ms for answer in self.plain.values()) / self.ms

    @property
    def speedups(self) -> dict[str, float]:
        """`speedup` by kind of prompt."""
        kinds = {at: answer.kind for at, answer in self.answers.items()}
        return {kind: _cut(self, [at for at in kinds if kinds[at] == kind]).speedup for kind in kinds.values()}

    @property
    def pays(self) -> bool:
        """Whether the draft is faster than plain decoding, beyond noise."""
        return _FASTER * self.speedup > 1

    @property
    def different(self) -> int:
        """How many answers part from plain decoding's before the shorter one ends, as time ends them."""
        pairs = [(answer.tokens, self.plain[at].tokens) for at, answer in self.answers.items()]
        return sum(any(map(ne, mine, theirs)) for mine, theirs in pairs)

    @property
    def weights(self) -> str:
        """What most of the target's weights are stored in."""
        stats = next(iter(self.answers.values())).stats
        return stats.settings.get("weight_kind", self.mode.label)

    @property
    def reason(self) -> str:
        """Why the draft does not pay: how often it is right, and what guessing and checking cost."""
        stats = total([answer.stats for answer in self.answers.values()])
        if not stats.num_draft_tokens:
            name = read_draft(self.draft)
            copies = name.copies and not (name.model or name.argument)
            return "it guessed nothing, as these texts repeat nothing" if copies else "it guessed nothing in that time"
        a_pass = _pass_seconds(self.plain)
        guess, wide = stats.draft_seconds / stats.num_draft_tokens / a_pass, _pass_seconds(self.answers) / a_pass
        right = f"{stats.draft_acceptance_rate:.0%} of {stats.num_draft_tokens} guesses were right"
        cost = f"a guess took {guess:.2f} of a pass, reading prompts included"
        return f"{right}, {cost}, and a pass over guesses {wide:.2f} of a plain one"


@dataclass(frozen=True)
class Skipped:
    """What was not measured in a mode, and why; `failed`: its models cannot be loaded, or do not run.

    `draft`: the draft that was not measured, None for all. `seconds`: how many more a mode would have taken.
    """

    mode: Mode
    why: str
    failed: bool = False
    draft: str | None = None
    seconds: float = 0.0


def _pass_seconds(answers: Mapping[int, TimedAnswer]) -> float:
    """Seconds of one of the target's passes after the first token."""
    parts = [answer.stats for answer in answers.values()]
    seconds = sum(stats.verify_seconds + stats.select_seconds - stats.first_token_seconds for stats in parts)
    return max(seconds, 1e-9) / max(sum(stats.num_target_passes - len(stats.finish_reasons) for stats in parts), 1)


def drafts_to_try(draft: str) -> list[str]:
    """What to measure: none, a word that copies, what `draft` names, a model with copies, and auto.

    A model alone is tried where it was named so: on few prompts it may win, over many kinds of text it does not.
    """
    name = read_draft(draft)
    if name.model is None:
        return [*dict.fromkeys((NONE, COPYING[0], draft, AUTO))]
    model = draft if name.word is None else draft[len(name.word) + 1 :]
    word = name.word if name.copies else COPYING[0]
    alone = [draft] if name.word == ALONE else []
    return [NONE, str(word), *alone, f"{word}+{model}", AUTO]


def further_modes(target: LanguageModel, mode: Mode) -> list[Mode]:
    """Ways to load the target in which a pass reads less, the nearest text first.

    None where `mode` says how, elsewhere than on a CPU, and for small or rounded models.
    """
    how = mode.loading
    chosen = how.keys() & {"dtype", "quantization", "gguf_file"} or how.get("backend") == "eager"
    if chosen or target.device.type != "cpu" or target.is_encoder_decoder or not kernels.available():
        return []
    if target.weight_bytes < _LARGE or target.weight_kind not in ("float32", "bfloat16", "float16"):
        return []
    words: list[dict[str, Any]] = [{"quantization": "int8-weight"}, {"quantization": "int4-weight"}]
    if target.weight_kind == "float32":
        words.insert(0, {"dtype": "bfloat16"})
    return [mode.model_copy(update=options) for options in words]


def prompts_for(generator: SpecGenerator, source: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Kinds of prompts and arguments of `generate`: the prompts of a file or set, or an edit, a question and code.

    A model with a chat template gets them as messages, code aside. Time may end before the last: an answer with copies
    and one without come first.
    """
    chats = bool(getattr(generator.tokenizer, "chat_template", None))
    if source is not None:
        texts = pick_prompts(source, 12)
    else:
        sets = ("code",) if chats else ("code", "text", "copy")
        texts = [replace(prompt, category=name) for name in sets for prompt in pick_prompts(name, 1)]
        texts = [PromptText(_EDIT, "edit"), PromptText(_QUESTION, "question"), *texts] if chats else texts
    return [
        (prompt.category, {"messages": [{"role": "user", "content": prompt.text}]})
        if chats and (source or prompt.category != "code")
        else (prompt.category, {"prompt": prompt.text})
        for prompt in texts
    ]


def comparable(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the prompts that all of them answered; without one, the trials of the first mode alone."""
    prompts = set.intersection(*({*trial.answers} for trial in trials))
    if not prompts:
        return [trial for trial in trials if trial.mode == trials[0].mode]
    return [_cut(trial, prompts) for trial in trials]


def _cut(trial: Trial, prompts: Iterable[int]) -> Trial:
    """The trial with these prompts alone."""
    answers, plain = ({at: side[at] for at in sorted(prompts)} for side in (trial.answers, trial.plain))
    return replace(trial, answers=answers, plain=plain)


def best(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that are as fast as the fastest, but for noise: the nearest text first, then the simplest draft."""
    fastest = min(trial.ms for trial in trials)
    return [trial for trial in trials if _FASTER * trial.ms <= fastest]


@dataclass
class Tuner:
    """Measures `drafts` with the target in `mode`, then in further modes as far as the time until `deadline` allows.

    The deadline is one of `clock`, and loading counts. However late it is, every draft of `mode` answers in a few
    words, but for `auto`, which was not named. Every draft of a mode answers the same prompts in turn, greedily, for
    equally many seconds; in further modes, none, the fastest of the first, and the models that were named.
    `report(done, total, doing)` hears of seconds.
    """

    target: str
    drafts: Sequence[str]
    mode: Mode
    deadline: float
    prompts: str | None = None
    report: Callable[[float, float, str], None] = lambda done, total, doing: None
    clock: Callable[[], float] = perf_counter
    watch: Watch = field(default_factory=Watch)
    _models: dict[str | None, dict[str, Any]] = field(default_factory=dict)
    _bytes: int = 0  # of memory that the next model needs
    _loading: float = 0.0  # seconds that the next model may take to load
    _few: float = 0.0  # seconds of an answer in a few words
    _calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # the kinds of prompts, and arguments

    def __post_init__(self) -> None:
        self._began, self._modes = self.clock(), [self.mode]  # modes that are left
        self.watch.look()

    def run(self) -> Iterator[SpecGenerator | Trial | Skipped]:
        """Yields a generator with the draft model that was named, or the last draft, once it is loaded; then what was
        measured and what was not.
        """
        while self._modes:
            mode = self._modes.pop(0)
            if mode is not self.mode and (lack := self._lack(mode)):
                yield lack
                continue
            self._say(f"loading {self.target}, {mode.label}")
            began = self.clock()
            try:
                systems = Systems(self.target, mode, models=self._models.setdefault(mode.loading.get("dtype"), {}))
            except Exception as error:
                yield Skipped(mode, in_words(error), failed=mode is self.mode)
                continue
            self._loading = self.clock() - began
            if mode is self.mode:
                self._modes = [] if is_gguf(Path(self.target)) else further_modes(systems.plain.target, mode)
                self._bytes = int(1.5 * systems.plain.target.weight_bytes)
                self._calls = prompts_for(systems.plain, self.prompts)
            try:
                yield from self._measure(systems, mode)
            except Exception as error:
                yield Skipped(mode, in_words(error), failed=mode is self.mode)
            finally:
                systems.close()
            del systems
            gc.collect()

    def _lack(self, mode: Mode, draft: str | None = None) -> Skipped | None:
        """Why a mode's target, or a draft made of it, is not loaded: no time for it and an answer of each draft, or no
        memory.

        A draft is made in half the target's time, and its memory is not known.
        """
        left, seconds = max(self._left(), 0.0), self._loading / (1 if draft is None else 2) + self._lap
        if left < seconds:
            words = f"not tried: it takes about {seconds:.0f} s, and {left:.0f} s are left"
            return Skipped(mode, words, draft=draft, seconds=seconds if draft is None else 0.0)
        size, room = self._bytes / 2**30, free_bytes(torch.device("cpu")) / 2**30
        if draft is None and size > room:
            return Skipped(mode, f"not tried: loading it takes {size:.1f} GiB, and {room:.1f} GiB are free")
        return None

    @property
    def num_prompts(self) -> int:
        """How many prompts there are, answered or not."""
        return len(self._calls)

    @property
    def _lap(self) -> float:
        """Seconds in which all drafts answer a prompt in a few words."""
        return self._few * len(self.drafts)

    def _left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.clock()

    def _say(self, doing: str) -> None:
        total = max(self.deadline - self._began, 1e-9)
        self.report(min(self.clock() - self._began, total), total, doing)

    def _measure(self, systems: Systems, mode: Mode) -> Iterator[Any]:
        """All drafts of a mode; what cannot be loaded is told once."""
        generators, skipped = dict[str, SpecGenerator](), list[Skipped]()
        for draft in self.drafts:
            is_new = _model_of(draft) not in map(_model_of, generators)
            generator = self._load(systems, mode, draft, generators)
            if isinstance(generator, Skipped):
                if generator not in skipped:
                    yield generator
                skipped.append(generator)
                continue
            generators[draft] = generator
            if is_new:
                self._say(f"{mode.label}, draft {draft}, first passes")
                most = max(self._left() / 8, 1.0)
                generator.generate(**self._calls[0][1], do_sample=False, max_new_tokens=_WARM, max_time=most)
            if mode is self.mode and draft == NONE:
                began = self.clock()
                self._answer(generator, 0, _FEW)
                self._few = self.clock() - began
        self.drafts = [*generators]
        if mode is self.mode:
            named = [draft for draft in generators if read_draft(draft).model is not None]
            yield generators[(named or self.drafts)[-1]]
        yield from self._trials(mode, generators)

    def _load(
        self, systems: Systems, mode: Mode, draft: str, generators: Mapping[str, SpecGenerator]
    ) -> SpecGenerator | Skipped:
        """The generator of a draft, beside those that are loaded, or why there is none."""
        if draft == AUTO and mode is self.mode and (late := self._lack(mode, draft)):
            return late
        if draft != NONE:
            self._say(f"loading the draft {draft}")
        try:
            generator = systems.generator("", None if draft == NONE else Cell(draft, Drafting(schedule="auto")))
        except Exception as error:
            return Skipped(mode, in_words(error), failed=True)
        names = {repr(other.draft): name for name, other in generators.items()}
        if draft == AUTO and (name := names.get(repr(generator.draft))):
            return Skipped(mode, f"it is {name} for this target", draft=draft)
        return generator

    def _trials(self, mode: Mode, generators: Mapping[str, SpecGenerator]) -> Iterator[Trial | Skipped]:
        """As many prompts as fit, and then again: of several answers to one, the fastest counts."""
        self.watch.bandwidths.append(memory_bandwidth())
        calls, end = self._calls, self.clock() + self._share()
        answers = {draft: dict[int, TimedAnswer]() for draft in generators}
        for lap in range(_LAPS * len(calls)):
            number, seconds = lap % len(calls), end - self.clock()
            if lap and seconds < self._lap:
                break
            laps = min(max(int(seconds / max(_WORTH * self._lap, 1e-9)), 1), max(len(calls) - lap, 1))
            is_owed = mode is self.mode and lap == 0  # an answer, however late it is
            for place, (draft, generator) in enumerate(generators.items()):
                if (left := self._left()) <= 0 and not is_owed:
                    break
                self._say(f"{mode.label}, draft {draft}, prompt {number + 1} of {len(calls)}")
                self.watch.look()
                most = min(max((end - self.clock()) / (laps * len(generators) - place), self._few), left)
                tokens = _STEADY if draft == NONE else _TOKENS
                answer = self._answer(generator, number, tokens, most) if left > 0 else None
                if answer is None and is_owed:
                    answer = self._answer(generator, number, _FEW)
                if answer is not None:
                    before = answers[draft].get(number, answer)
                    answers[draft][number] = min(before, answer, key=lambda one: one.ms)
        prompts = set(answers[NONE]).intersection(*filter(None, answers.values()))
        times = dict[str, float]()
        for draft in generators:
            if prompts and answers[draft]:
                exactness = generators[draft].target.exactness
                yield (trial := _cut(Trial(mode, draft, answers[draft], answers[NONE], exactness), prompts))
                times[draft] = trial.ms
            else:
                yield Skipped(mode, _LATE, draft=draft)
        if mode is self.mode:
            fastest = min(times.keys() - {NONE}, key=lambda draft: times[draft], default=NONE)
            self.drafts = [draft for draft in generators if draft in (NONE, fastest) or read_draft(draft).model]

    def _share(self) -> float:
        """Seconds for the answers of this mode, which leave loading and a lap to as many further modes as possible."""
        drafts = len(self.drafts)
        for count in range(len(self._modes), -1, -1):
            later = count * min(drafts, 3)  # none, the fastest, and a model
            preparing = _AGAIN * self._loading + self._lap  # first passes included
            seconds = (self._left() - count * preparing) * drafts / (drafts + later)
            if seconds >= self._lap:
                break
        return seconds

    def _answer(
        self, generator: SpecGenerator, number: int, most: int, seconds: float | None = None
    ) -> TimedAnswer | None:
        """An answer to prompt `number`, of at most so many tokens and seconds; None if it has too few tokens."""
        kind, arguments = self._calls[number]
        limits = {"max_new_tokens": most, "max_time": seconds}
        out, measured = measure(generator, {**arguments, **PRESETS["greedy"], **limits})
        assert out.stats is not None
        gaps, least = measured["gaps"], _LEAST if "time" in out.stats.finish_reasons else 1
        if not least <= len(gaps) < out.stats.num_new_tokens:  # all came at once, the prompt's reading included
            return None
        # A draft model reads the prompt in the longest round, which is taken to last as long as the others.
        rounds = sorted(sum(group) for _, group in groupby(gaps))
        usual = sum(rounds[:-1]) / (len(rounds) - 1) if len(rounds) > 1 else rounds[0]
        ms = 1e3 * usual * len(rounds) / len(gaps)
        return TimedAnswer(ms, measured["first_token"], out.new_tokens()[0], out.stats, kind)


def _model_of(draft: str) -> str | None:
    """The model that a draft loads, `auto` its own; None without one."""
    return AUTO if draft == AUTO else read_draft(draft).model
