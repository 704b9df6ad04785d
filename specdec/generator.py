"""`SpecGenerator`: prompts in, text out; whatever a caller names, in all spellings, becomes the parts of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from specdec.call import Extras, Prepared, Running, expand
from specdec.config import Options, resolve
from specdec.draft import (
    EarlyExitDrafter,
    FunctionDrafter,
    HybridDrafter,
    ModelDrafter,
    NgramDrafter,
    SuffixDrafter,
    TextBridge,
    VocabularyIntersection,
)
from specdec.errors import BusyError, OptionError, UnsupportedError, VocabularyError
from specdec.inputs import NAMES as MODEL_INPUTS
from specdec.inputs import Prompt, read_prompts
from specdec.models import LanguageModel, load
from specdec.output import Detokenizer, Event, Generation
from specdec.schedule import Confidence, Constant, Cost, Heuristic, Schedule
from specdec.types import BatchDrafter

DRAFT_ALIASES = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
_DRAFT_DETAILS = {"assistant_tokenizer": "assistant_model", "max_matching_ngram_size": "prompt_lookup_num_tokens"}
_EXTRAS = tuple(Extras.__dataclass_fields__)
_NAMED_DRAFTS = (*DRAFT_ALIASES, *_DRAFT_DETAILS)
_OBJECTS = (*_EXTRAS, "generation_config", *_NAMED_DRAFTS)
_DRAFTING = ("schedule", "num_assistant_tokens", "assistant_confidence_threshold")


class SpecGenerator:
    """Decodes with a target model and a draft; the text is what the target alone would have written.

    `target`: a transformers model, or a hub id or path to load. `draft`: a smaller model (object, id or path),
    `"ngram"`, `"suffix"`, `"early_exit:N"`, a `Drafter` or a function `(tokens, k) -> tokens`, a pair of a text draft
    and a model (hybrid), or None for plain decoding. `options` become the defaults of every `generate` call.

    Raises OptionError for what cannot be a target or draft, VocabularyError where the two do not share a vocabulary.
    """

    def __init__(
        self,
        target: PreTrainedModel | LanguageModel | str,
        draft: Any = None,
        *,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        compile: bool = False,
        **options: Any,
    ) -> None:
        resolve({}, defaults=options)
        self._compile = compile
        self._defaults = options
        self._cost = Cost()
        self._lock = threading.Lock()
        self._made: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(target)
        self.target = self._language_model(target, "target")
        self.drafter = self._drafter(draft, assistant_tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        draft: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        quantization: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> SpecGenerator:
        """A generator whose target, and draft if it is an id or path, are loaded from the hub or a folder.

        Raises OptionError where something cannot be loaded, UnsupportedError for `quantization`.
        """
        if quantization is not None:
            raise UnsupportedError(
                f"`quantization`={quantization!r} is not available yet: load the quantized model with transformers "
                "and pass the object"
            )
        how = {"dtype": dtype, "device_map": device_map, "trust_remote_code": trust_remote_code}
        code = {"trust_remote_code": trust_remote_code}
        if options.get("tokenizer") is None:
            options["tokenizer"] = _tokenizer_of(target, revision=revision, **code)
        parts = list(draft) if isinstance(draft, tuple | list) else [draft]
        for i, part in enumerate(parts):
            if isinstance(part, str) and not _is_text_draft(part):
                if options.get("assistant_tokenizer") is None:
                    options["assistant_tokenizer"] = _tokenizer_of(part, **code)
                parts[i] = load(part, **how)
        draft = tuple(parts) if isinstance(draft, tuple | list) else parts[0]
        compile = bool(options.get("compile"))
        return cls(load(target, revision=revision, compile=compile, **how), draft, **options)

    def __repr__(self) -> str:
        return f"SpecGenerator({self.target!r}, draft={self.drafter!r})"

    def generate(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Generation:
        """Decodes `prompt`: text, a list of texts, or ids `[rows, length]`; `messages` go through the chat template.

        Takes whatever `model.generate` takes, and the options of specdec (`Options`). Raises OptionError before any
        work is done, BusyError while this generator decodes elsewhere.
        """
        with self._working():
            call = self._prepare(prompt, messages, options).start()
            for _ in call.rounds():
                pass
            self._learn(call)
            return call.result()

    def stream(
        self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any
    ) -> Generator[Event, None, Generation]:
        """The same as `generate`, as events of new text, with the `Generation` as the value that the iterator returns.

        Options are checked at once; the generator is busy from the first event until the stream is read or closed.
        """
        prepared = self._prepare(prompt, messages, options)
        if prepared.options.beams > 1:
            raise OptionError("a stream shows text as it becomes final, which beams do at the end: use `generate`")
        return self._events(prepared)

    def _events(self, prepared: Prepared) -> Generator[Event, None, Generation]:
        with self._working():
            call = prepared.start()
            tokenizer = prepared.extras.tokenizer
            texts = [Detokenizer(tokenizer) for _ in call.rows] if tokenizer is not None else None
            for news in call.rounds():
                for row, ids, accepted, last in news:
                    yield Event(texts[row].push(ids, last=last) if texts else "", ids, accepted, row)
            self._learn(call)
            return call.result()

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
        prompts = expand(options, read_prompts(prompt, messages, inputs, options, self.target, extras.tokenizer))
        named = {n: value for n in _NAMED_DRAFTS if (value := objects.get(n, getattr(config, n, None))) is not None}
        drafter = self._suited(self._call_drafter(named), options)
        if drafter is None and (idle := [name for name in _DRAFTING if name in given]):
            raise OptionError(f"`{idle[0]}` says how much to draft, but there is no draft: name one, or leave it out")
        if extras.streamer is not None and options.beams > 1:
            raise OptionError("`streamer` shows text as it becomes final, which beams do at the end: leave it out")
        if extras.streamer is not None and len(prompts.rows) > 1:
            raise OptionError(f"`streamer` shows one row, and this call has {len(prompts.rows)}: use gen.stream()")
        return Prepared(self.target, options, prompts, extras, drafter, self._schedule(options, named))

    def _options(self, given: Mapping[str, Any], config: Any) -> Options:
        """The caller's fields over a generation config's, over this generator's, over the checkpoint's."""
        if config is not None and not isinstance(config, GenerationConfig):
            raise OptionError.of("generation_config", "a transformers GenerationConfig", type(config).__name__)
        return resolve(
            given,
            config=None if config is None else config.to_dict(),
            defaults=self._defaults,
            inherited=self.target.model.generation_config.to_dict(),
        )

    def _schedule(self, o: Options, named: Mapping[str, Any]) -> Schedule:
        """The schedule by name, or the caller's own; prompt lookup by transformers' name drafts as much as it says."""
        if not isinstance(o.schedule, str | None):
            return o.schedule
        k, threshold = o.num_assistant_tokens, o.assistant_confidence_threshold
        lookup = named.get("prompt_lookup_num_tokens")
        match o.schedule:
            case None if lookup is not None and k is None:
                return Constant(lookup, threshold or 0.0)
            case "constant":
                return Constant(k or 5, threshold or 0.0)
            case "confidence":
                return Confidence(k or 20, 0.4 if threshold is None else threshold)
            case "cost":
                return self._cost.fresh(k or 32)
            case _:
                return Heuristic(k or 5, threshold or 0.0)

    def _learn(self, call: Running) -> None:
        """What a call found out about costs and acceptance serves the next one."""
        if call.options.schedule == "cost" and isinstance(call.engine.schedule, Cost):
            self._cost = call.engine.schedule

    def _call_drafter(self, given: Mapping[str, Any]) -> BatchDrafter | None:
        """The draft of this call: this generator's, or the one that the call names in transformers' words."""
        named = [name for name in DRAFT_ALIASES if name in given]
        if len(named) > 1:
            raise OptionError(f"{' and '.join(named)} each name a draft: pass one of them")
        for detail, alias in _DRAFT_DETAILS.items():
            if detail in given and named != [alias]:
                raise OptionError(f"`{detail}` belongs to `{alias}`: pass both")
        match named:
            case ["assistant_model"]:
                return self._drafter(given["assistant_model"], given.get("assistant_tokenizer"))
            case ["assistant_early_exit"]:
                return self._early_exit("assistant_early_exit", given["assistant_early_exit"])
            case ["prompt_lookup_num_tokens"]:
                ngram = given.get("max_matching_ngram_size", 2)
                for name, value in (("prompt_lookup_num_tokens", given[named[0]]), ("max_matching_ngram_size", ngram)):
                    if not isinstance(value, int) or value < 1:
                        raise OptionError.of(name, "a whole number of at least 1", value)
                return NgramDrafter(num_tokens=given[named[0]], max_ngram=ngram)
            case _:
                return self.drafter

    def _early_exit(self, name: str, layers: Any) -> BatchDrafter:
        most = self.target.num_layers - 1
        if not isinstance(layers, int) or not 1 <= layers <= most:
            raise OptionError.of(name, f"a number of the target's {most + 1} layers, at least 1 and not all", layers)
        return EarlyExitDrafter(self.target, layers)

    def _suited(self, drafter: BatchDrafter | None, o: Options) -> BatchDrafter | None:
        """A bridge between vocabularies goes by text for match verification and by shared tokens for rejection."""
        if isinstance(drafter, TextBridge) and o.sampling in ("rejection", "block"):
            return self._kept(drafter, lambda: VocabularyIntersection(*drafter.parts))
        return drafter

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for this object before, or makes it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _drafter(self, draft: Any, tokenizer: Any = None) -> BatchDrafter | None:
        """Whatever the caller named as a draft, as one that serves batches."""
        match draft:
            case None:
                return None
            case "ngram":
                return NgramDrafter()
            case "suffix":
                return SuffixDrafter()
            case str() if draft.startswith("early_exit:"):
                layers = draft.removeprefix("early_exit:")
                return self._early_exit("draft", int(layers) if layers.isdecimal() else draft)
            case str() | PreTrainedModel() | LanguageModel():
                tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(draft)
                return self._model_drafter(self._language_model(draft, "draft"), tokenizer)
            case [text, model]:
                return self._hybrid(text, model, tokenizer)
            case _ if hasattr(draft, "start"):
                return draft
            case _ if hasattr(draft, "propose") or callable(draft):
                return FunctionDrafter(draft)
            case _:
                expected = "a model, an id or path, 'ngram', 'suffix', 'early_exit:N', a Drafter, a pair, or None"
                raise OptionError.of("draft", expected, type(draft).__name__)

    def _hybrid(self, text: Any, model: Any, tokenizer: Any) -> BatchDrafter:
        second = None if isinstance(model, str) and _is_text_draft(model) else self._drafter(model, tokenizer)
        if second is None or text not in ("ngram", "suffix"):
            kinds = tuple(part if isinstance(part, str) else type(part).__name__ for part in (text, model))
            raise OptionError.of("draft", "a pair of 'ngram' or 'suffix' and a model", kinds)
        return HybridDrafter(SuffixDrafter() if text == "suffix" else NgramDrafter(), second)

    def _model_drafter(self, model: LanguageModel, tokenizer: Any) -> BatchDrafter:
        """A draft model, behind a bridge where its tokenizer is another one."""
        shared = model.is_encoder_decoder and self.target.is_encoder_decoder and self.target.shares_encoder_with(model)
        drafter = ModelDrafter(model, shared_encoder=shared)
        if self.tokenizer is not None and tokenizer is not None:
            if self.tokenizer.get_vocab() == tokenizer.get_vocab():
                return drafter
            return TextBridge(drafter, self.tokenizer, tokenizer)
        widths = (model.vocab_size, self.target.vocab_size)
        known = len(self.tokenizer) if self.tokenizer is not None else None
        padded = known is not None and known <= min(widths) and max(widths) <= 1.05 * known
        if widths[0] == widths[1] or padded:
            return drafter
        raise VocabularyError(
            f"draft vocabulary {widths[0]} ≠ target {widths[1]}: pass `assistant_tokenizer=` (with `tokenizer=`), "
            "or draft='ngram'"
        )

    def _language_model(self, model: Any, name: str) -> LanguageModel:
        if isinstance(model, LanguageModel):
            return model
        if not isinstance(model, str | PreTrainedModel):
            raise OptionError.of(name, "a transformers model, or a hub id or path", type(model).__name__)
        return self._kept(model, lambda: load(model, compile=self._compile))


def _is_text_draft(draft: str) -> bool:
    return draft in ("ngram", "suffix") or draft.startswith("early_exit:")


def _tokenizer_of(model: Any, **options: Any) -> Any:
    """The tokenizer beside a model that is named by id or path; None where there is none."""
    if not isinstance(model, str) or _is_text_draft(model):
        return None
    try:
        return AutoTokenizer.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError):
        return None
