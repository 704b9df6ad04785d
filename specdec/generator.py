"""`SpecGenerator`: prompts in, text out; whatever a caller names, in all spellings, becomes the parts of a call."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from os import PathLike
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specdec.call import Extras, Prepared
from specdec.config import Options, check_defaults, resolve
from specdec.drafts import NAMES as DRAFT_NAMES
from specdec.drafts import Draft, Drafts, copies, guesses_trees, is_name, language_model, loaded, models_of, names_model
from specdec.errors import BusyError, OptionError
from specdec.inputs import NAMES as MODEL_INPUTS
from specdec.inputs import Prompt, check_tokenizer, read_prompts, tokenizer_beside, with_predictions
from specdec.loading import NAMES as LOADING
from specdec.loading import Loading
from specdec.models import LanguageModel
from specdec.output import Detokenizer, Event, Generation
from specdec.schedule import MOST_NODES, Confidence, Constant, Cost, Heuristic, Schedule
from specdec.types import BatchDrafter

_EXTRAS = tuple(Extras.__dataclass_fields__)
_OBJECTS = (*_EXTRAS, "generation_config", *DRAFT_NAMES)
_BRANCHING = ("schedule", "num_assistant_branches")
WIDEST = 32  # nodes that a draft pass continues at most, where the cost rule decides
_DRAFTING = ("schedule", "num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold")


class SpecGenerator:
    """Decodes with a target model and a draft; the text is what the target alone would have written.

    `target`: a transformers model, or a hub id or path to load. `draft`: a smaller model (object, id or path),
    `"ngram"`, `"suffix"`, `"early_exit:N"`, a `Drafter` or a function `(tokens, k) -> tokens`, a pair of a text draft
    and a model (hybrid), or None for plain decoding. `options` become the defaults of every `generate` call. `task`
    names settings among the checkpoint's `task_specific_params`, which then stand over its generation config.

    Raises OptionError for what cannot be a target or draft, VocabularyError where the two do not share a vocabulary.
    """

    def __init__(
        self,
        target: PreTrainedModel | LanguageModel | str | PathLike[str],
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        compile: bool = False,
        task: str | None = None,
        **options: Any,
    ) -> None:
        if early := [name for name in options if name in LOADING]:
            raise OptionError(f"`{early[0]}` says how to load a model: pass it to SpecGenerator.from_pretrained")
        check_defaults(options)
        check_tokenizer("tokenizer", tokenizer)
        self._defaults, self._task = options, task
        self._lock = threading.Lock()
        self.tokenizer = tokenizer_beside(str(target)) if tokenizer is None and is_name(target) else tokenizer
        self.target = language_model(target, "target", compile=compile)
        self._drafts = Drafts(self.target, compile=compile)
        self._draft = Draft(self._drafts.make(draft, self.tokenizer, assistant_tokenizer))

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        compile: bool = False,
        task: str | None = None,
        draft_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SpecGenerator:
        """A generator whose target, and draft if it is an id or path, are loaded from the hub or a folder.

        `options` are those of `Loading`, for the target, and the defaults of `generate`. The draft stays in memory and
        takes over `dtype`, `device_map` and `trust_remote_code`; `draft_options` are its own (`Loading` again).
        Raises OptionError, UnsupportedError and LoadError where something cannot be loaded as asked.
        """
        how, options = Loading.split(options)
        check_defaults(options)
        draft_how = how.of_draft(draft_options)
        if draft_options and not names_model(draft):
            raise OptionError("`draft_options` load a draft model, and `draft` is no id or path: leave them out")
        if tokenizer is None and is_name(target):
            tokenizer = tokenizer_beside(str(target), revision=how.revision, trust_remote_code=how.trust_remote_code)
        draft, beside = loaded(draft, draft_how, compile=compile)
        if assistant_tokenizer is None and tokenizer is not None:
            assistant_tokenizer = beside
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        model = language_model(target, "target", how, compile=compile)
        return cls(model, draft, **tokenizers, compile=compile, task=task, **options)

    @property
    def drafter(self) -> BatchDrafter | None:
        """What drafts where a call names nobody else."""
        return self._draft.drafter

    def __repr__(self) -> str:
        return f"SpecGenerator({self.target!r}, draft={self.drafter!r})"

    def options(self, **given: Any) -> Options:
        """What a call of `generate` with these arguments would go by; raises as the call itself does."""
        given = {name: value for name, value in given.items() if value is not None}
        fields = {name: value for name, value in given.items() if name not in (*_OBJECTS, *MODEL_INPUTS)}
        return self._options(fields, given.get("generation_config"))

    def generate(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Generation:
        """Decodes `prompt`: text, a list of texts, or ids `[rows, length]`; `messages` go through the chat template.

        Takes whatever `model.generate` takes, and the options of specdec (`Options`). The last two assistants named in
        calls are kept. Raises OptionError before any work is done, also for what would have no effect (a `seed` may
        always be given), BusyError while this generator decodes elsewhere.
        """
        with self._working():
            call = self._prepare(prompt, messages, options).start()
            for _ in call.rounds():
                pass
            return call.result()

    def stream(
        self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any
    ) -> Generator[Event, None, Generation]:
        """The same as `generate`, as events of new text, with the `Generation` as the value that the iterator returns.

        Beams and ranked samples come at the end, each as one event. Options are checked at once; the generator is busy
        from the first event until the stream is read or closed.
        """
        return self._events(self._prepare(prompt, messages, options))

    def _events(self, prepared: Prepared) -> Generator[Event, None, Generation]:
        with self._working():
            call = prepared.start()
            tokenizer = prepared.extras.tokenizer
            texts = [Detokenizer(tokenizer) for _ in call.rows] if tokenizer is not None else None
            with closing(call.rounds()) as rounds:
                for news in rounds:
                    if not prepared.options.at_the_end:
                        for row, ids, accepted, last in news:
                            yield Event(texts[row].push(ids, last=last) if texts else "", ids, accepted, row)
            out = call.result()
            if prepared.options.at_the_end:
                for row, ids in enumerate(out.new_tokens()):
                    yield Event(out.texts[row] if out.texts else "", ids, 0, row)
            return out

    @contextmanager
    def _working(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this SpecGenerator is decoding already, in another thread or in a stream that was not read to its "
                "end: close that stream, or make another SpecGenerator (models can be shared)"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _prepare(self, prompt: Prompt, messages: Sequence[Any] | None, given: Mapping[str, Any]) -> Prepared:
        """A call with all its parts named and checked."""
        given = {name: value for name, value in given.items() if value is not None}
        objects = {name: given.pop(name) for name in _OBJECTS if name in given}
        inputs = {name: given.pop(name) for name in MODEL_INPUTS if name in given}
        config = objects.get("generation_config")
        options = self._options(given, config)
        extras = Extras(**{"tokenizer": self.tokenizer, **{n: objects[n] for n in _EXTRAS if n in objects}})
        named = {n: value for n in DRAFT_NAMES if (value := objects.get(n, getattr(config, n, None))) is not None}
        draft = self._drafts.of_call(named, extras.tokenizer) if named else self._draft
        drafter = draft.suited(options.sampling)
        self._check_modes(drafter)
        if not named or any(name in given for name in _BRANCHING):
            _check_branches(drafter, options)
        prompts = read_prompts(prompt, messages, inputs, options, self.target, extras.tokenizer)
        if extras.prediction is not None and not copies(drafter):
            raise OptionError(
                f"`prediction` is for drafts that copy, and this one is {drafter!r}: "
                "use draft='suffix', or a pair of 'suffix' and a model, or leave it out"
            )
        prompts = with_predictions(prompts, extras.prediction, self.target, extras.tokenizer)
        prompts = prompts.repeat(options.copies)
        if drafter is None and (idle := [name for name in _DRAFTING if name in given]):
            raise OptionError(f"`{idle[0]}` says how much to draft, but there is no draft: name one, or leave it out")
        if extras.streamer is not None and options.at_the_end:
            raise OptionError("`streamer` shows text as it comes, but beams and ranked samples are final at the end")
        if extras.streamer is not None and len(prompts.rows) > 1:
            raise OptionError(f"`streamer` shows one row, and this call has {len(prompts.rows)}: use gen.stream()")
        schedule = self._schedule(options, named, draft)
        return Prepared(self.target, options, prompts, extras, drafter, schedule, draft.costs)

    def _check_modes(self, drafter: BatchDrafter | None) -> None:
        """Raises where a model was put into training mode since it was handed over."""
        for name, model in [("target", self.target), *(("draft", model) for model in models_of(drafter))]:
            if model.model.training:
                raise OptionError(
                    f"the {name} is in training mode, where dropout makes it random: call `.eval()` on it"
                )

    def _options(self, given: Mapping[str, Any], config: Any) -> Options:
        """The caller's fields over a generation config's, over this generator's, over the checkpoint's."""
        if config is not None and not isinstance(config, GenerationConfig):
            raise OptionError.of("generation_config", "a transformers GenerationConfig", type(config).__name__)
        return resolve(
            given,
            config=None if config is None else config.to_dict(),
            defaults=self._defaults,
            inherited=inherited(self.target.model, self._task),
        )

    def _schedule(self, o: Options, named: Mapping[str, Any], draft: Draft) -> Schedule:
        """The schedule by name, or the caller's own; prompt lookup by transformers' name drafts as much as it says."""
        if not isinstance(o.schedule, str | None):
            return o.schedule
        k, threshold, branches = o.num_assistant_tokens, o.assistant_confidence_threshold, o.num_assistant_branches
        most = max(MOST_NODES // (branches or 1), 1)
        lookup = named.get("prompt_lookup_num_tokens")
        match o.schedule:
            case None if lookup is not None and k is None:
                return Constant(lookup, threshold or 0.0, branches)
            case "constant":
                return Constant(k or min(5, most), threshold or 0.0, branches)
            case "confidence":
                return Confidence(k or min(20, most), 0.4 if threshold is None else threshold, branches)
            case "cost":
                # Trees that are drawn node by node bring less, the branches of beams are theirs to choose, and without
                # a store of keys and values the paths of a tree run one by one.
                chain = o.beams > 1 or o.sampling in ("rejection", "block") or self.target.capability.store != "kv"
                cost = draft.costs.get(o.family, Cost())
                k = k or min(32, most)
                widest = None if chain else max(min(WIDEST, MOST_NODES // k), 1)
                return cost.fresh(k, branches, widest, far=self.target.is_offloaded)
            case _:
                return Heuristic(k or min(5, most), threshold or 0.0, branches)


def _check_branches(drafter: BatchDrafter | None, options: Options) -> None:
    """Raises where trees are asked of a draft that guesses chains."""
    own = getattr(options.schedule, "branches", None)
    asked = own or options.num_assistant_branches or 1
    if drafter is not None and asked > 1 and not guesses_trees(drafter):
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
