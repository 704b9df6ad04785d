"""`SpecGenerator`: prompts in, text out; whatever a caller names, in all spellings, becomes the parts of a call."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel

from specdec.core.draft_schedules import make_schedule
from specdec.core.drafts import BatchDrafter
from specdec.engine.driver import Dispatcher
from specdec.engine.engine import Engine
from specdec.engine.openmp import release_helpers
from specdec.engine.prefix_cache import Prefixes
from specdec.errors import OptionError
from specdec.generator.call import Call, Extras, Job
from specdec.generator.drafts_by_name import NAMES as DRAFT_NAMES
from specdec.generator.drafts_by_name import (
    Draft,
    Drafts,
    is_head,
    is_name,
    language_model,
    loaded,
    named_drafts,
    names_model,
)
from specdec.generator.inputs import NAMES as MODEL_INPUTS
from specdec.generator.inputs import Prompt, check_tokenizer, read_prompts, tokenizer_beside, with_predictions
from specdec.generator.output import Detokenizer, Event, Generation
from specdec.models import LanguageModel, ModelState, plain_modes
from specdec.models.exactness import Exactness
from specdec.options.checks import warn_of_idle
from specdec.options.generate import Options, check_defaults, resolve
from specdec.options.load import Loading, Vocabulary, check_loaded
from specdec.parallel.load import leading, on_own_device

_EXTRAS = tuple(Extras.__dataclass_fields__)
_OBJECTS = (*_EXTRAS, "generation_config", *DRAFT_NAMES)
PREFIX_BYTES = 2**28
"""What the keys and values of earlier texts may take, where nobody says."""
_BRANCHING = ("schedule", "num_assistant_branches")
_DRAFTING = (*_BRANCHING, "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class SpecGenerator:
    """Decodes with a target model and a draft; the text is what the target alone would have written.

    `target`: a transformers model, or a hub id or path to load. `draft`: a smaller model (object, id or path),
    `"ngram"`, `"suffix"`, `"early_exit:N"`, a `Drafter` or a function `(tokens, k) -> tokens`, a pair of a text draft
    and a model (hybrid), or None for plain decoding. `options` become the defaults of every `generate` call. `task`
    names settings among the checkpoint's `task_specific_params`, which then stand over its generation config.
    `kv_budget` limits the keys and values of all calls under way, in bytes or as a share of the memory that is free
    (0.5: half); calls beyond it wait for their turn. `prefix_cache` keeps keys and values of texts (True, or as many
    bytes), so that a prompt which begins like one of them is not read again; None: in float32, where that changes no
    text. `backend` is what passes run on (`Loading`): "packed" keeps a second copy of the weights of a model that was
    handed over, which is not changed, and "auto" leaves such a model as it is; `exactness`="strict" promises the text
    of plain decoding bit for bit (`Loading`).

    Raises OptionError for what cannot be a target or draft, VocabularyError where the two do not share a vocabulary.
    """

    def __init__(
        self,
        target: PreTrainedModel | LanguageModel | str | PathLike[str],
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        backend: str = "auto",
        exactness: str = "auto",
        task: str | None = None,
        kv_budget: int | float | None = None,
        prefix_cache: bool | int | None = None,
        **options: Any,
    ) -> None:
        check_loaded("SpecGenerator", options)
        check_defaults(options)
        check_tokenizer("tokenizer", tokenizer)
        self._defaults, self._task = options, task
        self.tokenizer = tokenizer_beside(str(target)) if tokenizer is None and is_name(target) else tokenizer
        self.target = language_model(target, "target", Loading(backend=backend, exactness=exactness))
        self._drafts = Drafts(self.target, backend=backend)
        self._draft = Draft(self._drafts.make(draft, self.tokenizer, assistant_tokenizer))
        self._prefixes, self._wants_prefixes = _prefixes(prefix_cache), prefix_cache is not None
        self._dispatcher = Dispatcher(Engine(self.target, kv_budget=kv_budget, prefixes=self._prefixes))
        release_helpers()  # loading had some, and another thread may be the one that decodes

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        task: str | None = None,
        kv_budget: int | float | None = None,
        prefix_cache: bool | int | None = None,
        draft_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SpecGenerator:
        """A generator whose target, and draft if it is an id or path, are loaded from the hub or a folder.

        `options` are those of `Loading`, for the target, and the defaults of `generate`. The draft stays in memory and
        takes over `dtype`, `device_map` and `trust_remote_code`; `draft_options` are its own (`Loading`
        again), and a `vocabulary`: the number of tokens that it may guess, the likeliest by their ids, the path of a
        text whose tokens they are, or a pair of a number and a text in which they are counted.
        With `tp_plan` this returns in the first process of a job alone, which also has the draft; the others work for
        it, and leave the program (SystemExit) when it ends. Raises EngineError in those that lose it.
        Raises OptionError, UnsupportedError and LoadError where something cannot be loaded as asked.
        """
        how, options = Loading.split(options)
        check_defaults(options)
        leads = leading(how) is not None
        draft_how = how.of_draft(draft_options)
        if leads:
            draft_how = on_own_device(draft_how)
        if draft_options and not names_model(draft) and not (is_head(draft) and [*draft_options] == ["vocabulary"]):
            raise OptionError("`draft_options` load a draft model, and `draft` is no id or path: leave them out")
        draft, beside = loaded(draft, draft_how, Vocabulary.of((draft_options or {}).get("vocabulary")))
        model = language_model(target, "target", how)
        if tokenizer is None and is_name(target):  # after the model, which says why nothing can be read
            tokenizer = tokenizer_beside(str(target), **how.beside)
        if assistant_tokenizer is None and tokenizer is not None:
            assistant_tokenizer = beside
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        shared: dict[str, Any] = {
            "backend": how.backend,
            "exactness": how.exactness,
            "task": task,
            "kv_budget": kv_budget,
            "prefix_cache": prefix_cache,
        }
        return cls(model, draft, **tokenizers, **shared, **options)

    @property
    def drafter(self) -> BatchDrafter | None:
        """What drafts where a call names nobody else."""
        return self._draft.drafter

    @property
    def engine(self) -> Engine:
        """What runs all calls; to be looked at, not to be driven."""
        return self._dispatcher.engine

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SpecGenerator cannot be pickled or copied, as it holds the buffers of running calls: make another one "
            "with SpecGenerator(generator.target, draft, tokenizer=generator.tokenizer); models can be shared"
        )

    def __repr__(self) -> str:
        return f"SpecGenerator({self.target!r}, draft={self.drafter!r})"

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until target and draft models run on compiled code, in `backend`="compiled"; whether all of them do.

        They are compiled beside the work; until then passes run as in `backend`="packed". At the most so many seconds
        for each model.
        """
        drafts = () if self.drafter is None else self.drafter.models
        ready = [model.wait_until_compiled(timeout) for model in (self.target, *drafts)]
        return all(ready)

    def options(self, **given: Any) -> Options:
        """What a call of `generate` with these arguments would go by; raises as the call itself does."""
        given = {name: value for name, value in given.items() if value is not None}
        fields = {name: value for name, value in given.items() if name not in (*_OBJECTS, *MODEL_INPUTS)}
        return self._options(fields, given.get("generation_config"))

    def generate(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Generation:
        """Decodes `prompt`: text, a list of texts, or ids `[rows, length]`; `messages` go through the chat template.

        Takes whatever `model.generate` takes, and the options of specdec (`Options`). The last two assistants named in
        calls are kept. Several threads may call at once and share the target's passes; each text is the same as alone.
        Raises OptionError before any work is done, also for what would have no effect (a `seed` may always be given).
        """
        call = self._prepare(prompt, messages, options)
        call.request.waited = call.extras.streamer is None
        run = call.run(self._dispatcher)
        while True:
            try:
                next(run)
            except StopIteration as end:
                out: Generation = end.value
                return out

    def stream(
        self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any
    ) -> Generator[Event, None, Generation]:
        """The same as `generate`, as events of new text, with the `Generation` as the value that the iterator returns.

        Beams and ranked samples come at the end, each as one event. Options are checked at once, work begins with the
        first event, and closing the iterator ends it.
        """
        return self._events(self._prepare(prompt, messages, options))

    def submit(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Job:
        """The same call, checked and ready, for programs that follow it themselves and may cancel it."""
        return Job(self._prepare(prompt, messages, options), self._dispatcher)

    def _events(self, call: Call) -> Generator[Event, None, Generation]:
        tokenizer = call.extras.tokenizer
        texts = [Detokenizer(tokenizer, call.stops) for _ in call.seqs] if tokenizer is not None else None
        run = call.run(self._dispatcher, stream=not call.options.at_the_end)
        with closing(run):
            while True:
                try:
                    news = next(run)
                except StopIteration as end:
                    out: Generation = end.value
                    break
                for row, steps, accepted, finish in news:
                    ids = [step.token for step in steps]
                    yield Event(texts[row].push(ids, last=finish is not None) if texts else "", ids, accepted, row)
        if call.options.at_the_end:
            for row, ids in enumerate(out.new_tokens()):
                yield Event(out.texts[row] if out.texts else "", ids, 0, row)
        return out

    def _prepare(self, prompt: Prompt, messages: Sequence[Any] | None, given: Mapping[str, Any]) -> Call:
        """A call with all its parts named and checked."""
        if torch.is_autocast_enabled(self.target.device.type):
            what = "load the model in the type to compute in, SpecGenerator.from_pretrained(…, dtype=…)"
            warnings.warn(f"torch.autocast does not reach specdec's passes: {what}", RuntimeWarning, stacklevel=3)
        with plain_modes():
            return self._call(prompt, messages, given)

    def _call(self, prompt: Prompt, messages: Sequence[Any] | None, given: Mapping[str, Any]) -> Call:
        given = {name: value for name, value in given.items() if value is not None}
        objects = {name: given.pop(name) for name in _OBJECTS if name in given}
        inputs = {name: given.pop(name) for name in MODEL_INPUTS if name in given}
        config = objects.get("generation_config")
        options = self._options(given, config)
        extras = Extras(**{"tokenizer": self.tokenizer, **{n: objects[n] for n in _EXTRAS if n in objects}})
        named = named_drafts(objects, config)
        draft = self._drafts.of_call(named, extras.tokenizer) if named else self._draft
        drafter = None if draft.drafter is None else draft.drafter.for_sampling(options.sampling)
        state = self.target.state("target")
        exactness = self.target.exactness_of(state)
        for model in () if drafter is None else drafter.models:
            model.state("draft")
        if not named or any(name in given for name in _BRANCHING):
            _check_branches(drafter, options)
        prompts = read_prompts(prompt, messages, inputs, options, self.target, extras.tokenizer)
        if extras.prediction is not None and (drafter is None or not drafter.reads_predictions):
            raise OptionError(
                f"`prediction` is for drafts that copy, and this one is {drafter!r}: "
                "use draft='suffix', or a pair of 'suffix' and a model, or leave it out"
            )
        prompts = with_predictions(prompts, extras.prediction, self.target, extras.tokenizer)
        prompts = prompts.repeat(options.copies)
        if drafter is None and (idle := [name for name in _DRAFTING if name in given]):
            warn_of_idle(f"`{idle[0]}` says how much to draft, and there is no draft: name one")
        if extras.streamer is not None and options.at_the_end:
            raise OptionError("`streamer` shows text as it comes, but beams and ranked samples are final at the end")
        if extras.streamer is not None and len(prompts.rows) > 1:
            raise OptionError(f"`streamer` shows one row, and this call has {len(prompts.rows)}: use gen.stream()")
        schedule = partial(
            make_schedule,
            options,
            offloaded=self.target.is_offloaded,
            trees=self.target.capability.cache_kind == "kv",
            lookup_tokens=named.get("prompt_lookup_num_tokens"),
        )
        return Call(
            self.target,
            options,
            prompts,
            extras,
            draft,
            drafter,
            make_schedule=lambda learned: schedule(learned=learned),
            state=state,
            exactness=exactness,
            reuses_prefixes=self._reuses_prefixes(exactness, state),
        )

    def _reuses_prefixes(self, exactness: Exactness, state: ModelState) -> bool:
        """Whether prompts continue what was read before: where that is asked for, or can change no text."""
        changes_none = exactness in ("exact", "strict") and state.is_readable
        return self._prefixes is not None and (self._wants_prefixes or changes_none)

    def _options(self, given: Mapping[str, Any], config: Any) -> Options:
        """The caller's fields over a generation config's, over this generator's, over the checkpoint's."""
        if config is not None and not isinstance(config, GenerationConfig):
            raise OptionError.of("generation_config", "a transformers GenerationConfig", type(config).__name__)
        return resolve(
            given,
            # A watermark of another kind would be one by its fields.
            config=None if config is None else config.to_dict() | {"watermarking_config": config.watermarking_config},
            defaults=self._defaults,
            inherited=self._inherited(),
        )

    def _inherited(self) -> dict[str, Any]:
        """The settings that come with the checkpoint."""
        return inherited(self.target.model, self._task)


def _prefixes(wanted: bool | int | None) -> Prefixes | None:
    """The texts that a generator keeps."""
    if wanted is not None and not isinstance(wanted, bool) and (not isinstance(wanted, int) or wanted <= 0):
        raise OptionError.of("prefix_cache", "True, False or a number of bytes", wanted)
    if wanted is False:
        return None
    return Prefixes(PREFIX_BYTES if wanted in (None, True) else wanted)


def _check_branches(drafter: BatchDrafter | None, options: Options) -> None:
    """Raises where trees are asked of a draft that guesses chains."""
    own = options.schedule is not None and not isinstance(options.schedule, str)
    asked = options.schedule.max_branches if own else options.num_assistant_branches or 1
    if drafter is not None and asked > 1 and not drafter.guesses_trees:
        name = f"`schedule`={options.schedule!r}" if own else f"`num_assistant_branches`={asked}"
        raise OptionError(
            f"{name} asks for trees of guesses, but {drafter!r} guesses one continuation at a time: "
            "leave the branches out, or draft with a model that has the target's vocabulary"
        )


def inherited(model: PreTrainedModel, task: str | None) -> dict[str, Any]:
    """The generation settings that come with a checkpoint: its own, and over them those of a task, where it has any."""
    settings: dict[str, Any] = model.generation_config.to_dict()
    tasks = getattr(model.config, "task_specific_params", None) or {}
    return settings | tasks.get(task, {})
