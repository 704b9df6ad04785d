"""`SpecGenerator`: prompts in, text out."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel

from specdec.core.drafts import Draft
from specdec.decoding.processors.grammar import Grammar, Grammars
from specdec.engine.driver import Driver
from specdec.engine.engine import Engine
from specdec.engine.openmp import release_helpers
from specdec.engine.prefix_cache import PrefixCache
from specdec.errors import OptionError
from specdec.generator.build_request import Call, ScheduledDraft, methods
from specdec.generator.checks import check_draft
from specdec.generator.drafts_by_name import NAMES as DRAFT_NAMES
from specdec.generator.drafts_by_name import Drafts, draft_arguments, loaded
from specdec.generator.extras import Extras
from specdec.generator.generation import Event, Generation
from specdec.generator.inputs.pictures import split_processor
from specdec.generator.inputs.prompts import NAMES as MODEL_INPUTS
from specdec.generator.inputs.prompts import Prompt, beside_inputs, read_prompts
from specdec.generator.job import Job
from specdec.generator.memories import MemoryWish
from specdec.generator.tokenizers import Detokenizer, check_split_rule, check_tokenizer, tokenizer_beside
from specdec.models import LanguageModel, load_model, needs_media_modules, plain_modes
from specdec.options.fields import pop_fields
from specdec.options.generate import Form, Options, to_list
from specdec.options.load import NONE, Loading
from specdec.options.resolve import check_defaults, resolve
from specdec.proposers.form import FormDraft

_EXTRAS = tuple(Extras.__dataclass_fields__)
PREFIX_BYTES = 2**28
"""The default size of the prefix cache."""


class SpecGenerator:
    """Decodes with a target model and a draft; the text is what the target alone would have written.

    `target`: a transformers model, or a hub id or path to load. `draft`: a spelling, which is the same everywhere
    (`"suffix"`, `"ngram"`, `"early_exit:N"`, `"mtp"`, the id or path of a model or head, `"zoo:NAME"`, `"suffix+ID"`
    for a hybrid, `"none"`), a model, a pair like `("suffix", model)`, a `Drafter`, a function `(tokens, k) -> tokens`,
    or None for plain decoding, in which answers in a form have their forced tokens guessed. A draft model with at least
    32 MiB of weights copies from the text besides; `"model:ID"` and `("model", model)` do not. `tokenizer`: the
    target's, or the processor of one that sees. `options` are the defaults of every `generate` call. `task` names
    settings in the checkpoint's `task_specific_params`, which then override its generation config. `kv_budget` limits
    the keys and values of all running calls, in bytes or as a share of the free memory (0.5: half); further calls wait.
    `prefix_cache` keeps keys and values of finished texts in that many bytes (True: 256 MiB), for prompts that begin
    alike; whoever sets it calls `model_changed()` after changing a model. None: 256 MiB for models that were loaded
    here; where target or draft is a model object of the caller's, prompts share within one call alone. False: prompts
    share nothing. Outside of float32 and `exactness`="strict", a text that continues a cached one may differ at
    near-ties. `memory`: drafts that copy look up texts of earlier calls, too, and of the files and folders that it
    names: True (128 MiB at most), a number of bytes, or paths. Calls of another `cache_salt` see the files alone.

    The fields of `Loading` are options, too: they say how a target that is named is loaded. A draft that is named has
    the target's options `dtype`, `backend`, `device_map` and `trust_remote_code`, unless `draft_options` set them, and
    is never offloaded. A model object takes `backend` ("packed" keeps a second copy of its weights, "auto" leaves it as
    it is) and `exactness` alone.

    Raises OptionError for values that are no target or draft, VocabularyError where the two do not share a vocabulary,
    and OptionError, UnsupportedError and LoadError where a model cannot be loaded so.
    """

    _inherits = True

    def __init__(
        self,
        target: PreTrainedModel | LanguageModel | str | PathLike[str],
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        task: str | None = None,
        kv_budget: int | float | None = None,
        prefix_cache: bool | int | None = None,
        memory: Any = False,
        draft_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        how, options = Loading.split(options)
        check_tokenizer("tokenizer", tokenizer)
        self._defaults, self._task, wish = check_defaults(options), task, MemoryWish.read(memory)
        self._prefixes, self._promised = _prefixes(prefix_cache), prefix_cache is not None
        if wish.texts and draft in (None, NONE):  # before anything is loaded
            wish.check(None)
        reader = check_split_rule(target, how) if tokenizer is None else None
        is_name = isinstance(target, str | PathLike)
        model = None if is_name else load_model(target, how, name="target")
        unloaded, draft = draft, loaded(draft, how.of_draft(draft_options))
        if draft_options and draft is unloaded:
            raise OptionError("`draft_options` load a draft model, and `draft` names none: leave them out")
        self.target = load_model(target, how, name="target") if model is None else model
        if tokenizer is None and is_name:  # after the model, whose error gives the reason
            tokenizer = tokenizer_beside(str(target), reads_media=self.target.reads_media, reader=reader, **how.beside)
        self.tokenizer, self.processor = split_processor(tokenizer)
        self.memory, self.grammars = wish.make(self.tokenizer), Grammars(self.target.vocab_size)
        self._drafts = Drafts(self.target, backend=how.backend, memory=self.memory)
        self._scheduled = ScheduledDraft(self.target, self._drafts.make(draft, self.tokenizer, assistant_tokenizer))
        wish.check(self.draft)
        # Where a call has a form and no draft is named, the draft guesses the form's forced tokens; "none" is a name.
        self._form_draft = self._scheduled if draft is not None else ScheduledDraft(self.target, FormDraft())
        self._driver = Driver(Engine(self.target, kv_budget=kv_budget, prefix_cache=self._prefixes))
        release_helpers()  # loading started OpenMP workers here; decoding may run in another thread

    @classmethod
    def from_pretrained(cls, target: str | PathLike[str], draft: Any = None, **options: Any) -> SpecGenerator:
        """`SpecGenerator(target, draft, **options)`, by the name that transformers' users know."""
        return cls(target, draft, **options)

    @property
    def draft(self) -> Draft | None:
        """The generator's draft; a call may name another."""
        return self._scheduled.draft

    @property
    def engine(self) -> Engine:
        """The engine that runs all calls; read only."""
        return self._driver.engine

    def close(self) -> None:
        """Ends the generator's calls and frees its caches; it may be called twice, and by any thread.

        Calls under way raise CancelledError, after the pass under way; later calls raise EngineError. Cached
        prompts and remembered texts are dropped. Inside a call (in a processor, say) this raises EngineError.
        """
        try:
            self._driver.close()
        finally:
            for scheduled in (self._scheduled, self._form_draft, *self._drafts.of_calls):
                scheduled.save_learned()
        if self.memory is not None:
            self.memory.forget()

    def __enter__(self) -> SpecGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SpecGenerator cannot be pickled or copied, since it holds the buffers of running calls: make another "
            "with SpecGenerator(generator.target, draft, tokenizer=generator.tokenizer); models can be shared"
        )

    def __repr__(self) -> str:
        return f"SpecGenerator({self.target!r}, draft={self.draft!r})"

    def model_changed(self) -> None:
        """Says that you changed target or draft models: weights, adapters, hooks, methods, attributes or configs.

        States cached of them are used no longer, and packed copies of your own models are made anew. With
        `prefix_cache=True` for a model of yours, call it after every change; models that were loaded here stay as they
        are. Raises UnsupportedError where the backend that was named cannot run the changed model.
        """
        drafts = [self._scheduled, *self._drafts.of_calls]
        for model in [self.target, *(model for scheduled in drafts for model in scheduled.models)]:
            model.changed()

    def options(self, **arguments: Any) -> Options:
        """The resolved options of a call of `generate` with these arguments; raises as the call does."""
        objects = {*_EXTRAS, "generation_config", *DRAFT_NAMES, *MODEL_INPUTS, *beside_inputs(self.target)}
        fields = {name: value for name, value in arguments.items() if name not in objects}
        return self._options(fields, arguments.get("generation_config"))

    def generate(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Generation:
        """Decodes `prompt`: text, a list of texts, or ids `[rows, length]`; `messages` go through the chat template.

        Takes the arguments of `model.generate` and the fields of `Options`. A call may name a draft
        (`assistant_model=`, ...); the last two so named stay loaded. Several threads may call at once and share the
        target's passes; each text equals the text of its call alone. Raises OptionError before any pass for wrong or
        contradicting options; most options without effect warn.
        """
        return Job(self._prepare(prompt, messages, options), self._driver).run()

    def stream(
        self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any
    ) -> Generator[Event, None, Generation]:
        """Yields the new text of `generate` as events, and returns the `Generation`.

        Beams and ranked samples make one event each, at the end. Options are checked at once, decoding begins with the
        first event, and closing the iterator cancels the call.
        """
        return self._events(self._prepare(prompt, messages, options))

    def submit(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Job:
        """The same call as a `Job`, checked and not begun, for programs that follow and cancel it themselves."""
        return Job(self._prepare(prompt, messages, options), self._driver)

    def _events(self, call: Call) -> Generator[Event, None, Generation]:
        tokenizer, job = call.extras.tokenizer, Job(call, self._driver)
        texts = defaultdict[int, Detokenizer](lambda: Detokenizer(tokenizer, call.options.cut_before))  # by row
        with closing(job.follow()) as rounds:
            for deltas in rounds:
                for delta in deltas:
                    last = delta.finish is not None
                    text = "" if tokenizer is None else texts[delta.row].push(delta.token_ids, last=last)
                    yield Event(text, delta.token_ids, delta.accepted, delta.row, delta.finish)
        assert job.result is not None
        return job.result

    def _prepare(self, prompt: Prompt, messages: Sequence[Any] | None, arguments: Mapping[str, Any]) -> Call:
        """A checked call."""
        self._driver.check_open()
        if torch.is_autocast_enabled(self.target.device.type):
            way_out = "load the model in the type to compute in, SpecGenerator.from_pretrained(…, dtype=…)"
            warnings.warn(f"torch.autocast does not reach specdec's passes: {way_out}", RuntimeWarning, stacklevel=3)
        with plain_modes():
            fields = {name: value for name, value in arguments.items() if value is not None}
            config, tokenizer = fields.pop("generation_config", None), self.tokenizer
            objects = pop_fields(fields, _EXTRAS)
            drafts = pop_fields(fields, DRAFT_NAMES)
            inputs = pop_fields(fields, MODEL_INPUTS | beside_inputs(self.target))
            options = self._options(fields, config)
            if "tokenizer" in objects:
                check_tokenizer("tokenizer", objects["tokenizer"])
                tokenizer = split_processor(objects["tokenizer"])[0]
            extras = Extras(**{**objects, "tokenizer": tokenizer})
            names = draft_arguments(drafts, config) if drafts or config is not None else {}
            scheduled = self._drafts.of_call(names, tokenizer) if names else self._scheduled
            check_draft(scheduled.draft, options, fields, extras.prediction, in_call=bool(names))
            forces = options.form or any(methods(extras.logits_processor, "forced"))
            if forces and not names and not (options.needs_q or options.penalty_alpha or options.output_attentions):
                scheduled = self._form_draft
            draft, models = scheduled.draft, scheduled.models
            self.target.check_unchanged("target")
            for model in models:
                model.check_unchanged("draft")
            if options.form is not None:
                grammar = self._grammar(options.form, options, extras)
                extras = replace(extras, logits_processor=[*extras.logits_processor, grammar])
            prompts = read_prompts(prompt, messages, inputs, options, self.target, extras, self.processor)
            if any(needs_media_modules(row.pictures) for row in prompts.rows):
                for model in models:
                    if model.reads_media:
                        model.load_media_modules()
            pacing = scheduled.pacing(
                options,
                predicted=extras.prediction is not None,
                lookup_tokens=names.get("prompt_lookup_num_tokens"),
            )
            return Call(
                self.target,
                options,
                prompts if options.copies == 1 else prompts.repeat(options.copies),
                extras,
                draft,
                pacing,
                exactness=self.target.exactness,
                shares_prefixes=self._prefixes is not None,
                across_calls=self._promised or all(model.is_owned for model in (self.target, *models)),
            )

    def _grammar(self, form: Form, options: Options, extras: Extras) -> Grammar:
        """The grammar of the form that the options set; raises OptionError without a tokenizer, or with a rival."""
        if extras.tokenizer is None:
            raise OptionError(f"`{form.field}` needs a tokenizer: pass `tokenizer=`")
        if extras.prefix_allowed_tokens_fn is not None:
            raise OptionError(
                f"`{form.field}` and `prefix_allowed_tokens_fn` each say which tokens may follow: pass one of them"
            )
        defaults = to_list(self.target.model.generation_config.eos_token_id)  # where the call ends with no token
        ends = options.eos_ids or defaults or to_list(getattr(extras.tokenizer, "eos_token_id", None))
        return self.grammars.make(form, extras.tokenizer, ends)

    def _options(self, arguments: Mapping[str, Any], config: Any) -> Options:
        """The caller's options over a generation config's, the generator's and the checkpoint's."""
        if config is not None and not isinstance(config, GenerationConfig):
            raise OptionError.of("generation_config", "a transformers GenerationConfig", type(config).__name__)
        inherited: dict[str, Any] = {}
        if self._inherits:  # the checkpoint's settings, and over them its task's
            tasks = getattr(self.target.model.config, "task_specific_params", None) or {}
            inherited = self.target.model.generation_config.to_dict() | tasks.get(self._task, {})
        return resolve(
            arguments,
            # `to_dict` turns a watermarking config into its fields, which lose its class.
            config=None if config is None else config.to_dict() | {"watermarking_config": config.watermarking_config},
            defaults=self._defaults,
            inherited=inherited,
        )


def _prefixes(size: bool | int | None) -> PrefixCache | None:
    """The prefix cache of the argument `prefix_cache`, None for False; raises OptionError for a wrong argument."""
    if size is not None and not isinstance(size, bool) and (not isinstance(size, int) or size <= 0):
        raise OptionError.of("prefix_cache", "True, False or a number of bytes", size)
    if size is False:
        return None
    return PrefixCache(PREFIX_BYTES if size is None or size is True else size)
