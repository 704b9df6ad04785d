"""`SpecGenerator`: prompts in, text out. What a caller may name, in all its spellings, becomes the parts of a call here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from specdec.call import Extras, Plan, Running, expand
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
_DRAFT_DETAILS = ("assistant_tokenizer", "max_matching_ngram_size")
_OBJECTS = (*Extras.__dataclass_fields__, "generation_config", *DRAFT_ALIASES, *_DRAFT_DETAILS)
_LIMITS = {"max_new_tokens", "max_length"}


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
        resolve(options, {})
        self._compile = compile
        self._defaults = options
        self._cost = Cost()
        self._lock = threading.Lock()
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
        options.setdefault("tokenizer", _tokenizer_of(target))
        if isinstance(draft, str) and not _is_text_draft(draft):
            options.setdefault("assistant_tokenizer", _tokenizer_of(draft))
            draft = load(draft, **how)
        return cls(load(target, revision=revision, **how), draft, **options)

    def __repr__(self) -> str:
        return f"SpecGenerator({self.target!r}, draft={self.drafter!r})"

    def generate(self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any) -> Generation:
        """Decodes `prompt`: text, a list of texts, or ids `[rows, length]`; `messages` go through the chat template.

        Takes whatever `model.generate` takes, and the options of specdec (`Options`). Raises OptionError before any
        work is done, BusyError while this generator decodes elsewhere.
        """
        with self._working():
            call = self._start(prompt, messages, options)
            for _ in call.rounds():
                pass
            self._learn(call)
            return call.result()

    def stream(
        self, prompt: Prompt = None, *, messages: Sequence[Any] | None = None, **options: Any
    ) -> Iterator[Event]:
        """The same as `generate`, as events of new text; the generator is busy until the stream is read or closed."""
        with self._working():
            call = self._start(prompt, messages, options)
            tokenizer = options.get("tokenizer") or self.tokenizer
            texts = [Detokenizer(tokenizer) for _ in call.rows] if tokenizer is not None else None
            for news in call.rounds():
                for row, ids, accepted, last in news:
                    yield Event(texts[row].push(ids, last=last) if texts else "", ids, accepted, row)
            self._learn(call)

    @contextmanager
    def _working(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this SpecGenerator is decoding already, in another thread or in a stream that was not read to its "
                "end: close that stream, or make another SpecGenerator (models can be shared)"
            )
        try:
            with torch.no_grad():
                yield
        finally:
            self._lock.release()

    def _start(self, prompt: Prompt, messages: Sequence[Any] | None, given: Mapping[str, Any]) -> Running:
        given = {name: value for name, value in given.items() if value is not None}
        objects = {name: given[name] for name in _OBJECTS if name in given}
        inputs = {name: given[name] for name in MODEL_INPUTS if name in given}
        options = self._options(
            {n: v for n, v in given.items() if n not in objects and n not in inputs}, objects.get("generation_config")
        )
        extras = Extras(
            **{"tokenizer": self.tokenizer, **{n: v for n, v in objects.items() if n in Extras.__dataclass_fields__}}
        )
        prompts = expand(options, read_prompts(prompt, messages, inputs, options, self.target, extras.tokenizer))
        drafter = self._suited(self._call_drafter(objects), options)
        if extras.streamer is not None and len(prompts.rows) > 1:
            raise OptionError(f"`streamer` shows one row, and this call has {len(prompts.rows)}: use gen.stream()")
        return Plan(self.target, options, prompts, extras, drafter, self._schedule(options)).start()

    def _options(self, given: Mapping[str, Any], config: Any) -> Options:
        """The caller's fields over a generation config's, over this generator's, over the checkpoint's."""
        named = {} if config is None else _fields(config)
        named = {**named, **given}
        if _LIMITS & given.keys():
            named = {n: v for n, v in named.items() if n not in _LIMITS or n in given}
        defaults = {n: v for n, v in self._defaults.items() if n not in _LIMITS or not _LIMITS & named.keys()}
        return resolve({**defaults, **named}, _fields(self.target.model.generation_config))

    def _schedule(self, o: Options) -> Schedule:
        """The schedule by name, or the caller's own."""
        if not isinstance(o.schedule, str | None):
            return o.schedule
        k = o.num_assistant_tokens
        match o.schedule:
            case "constant":
                return Constant(k or 5)
            case "confidence":
                threshold = o.assistant_confidence_threshold
                return Confidence(k or 20, 0.4 if threshold is None else threshold)
            case "cost":
                return self._cost.fresh() if k is None else Cost(k)
            case _:
                return Heuristic(k or 5)

    def _learn(self, call: Running) -> None:
        """What a call found out about costs and acceptance serves the next one."""
        if isinstance(call.engine.schedule, Cost):
            self._cost = call.engine.schedule

    def _call_drafter(self, objects: Mapping[str, Any]) -> BatchDrafter | None:
        """The draft of this call: this generator's, or the one that the call names in transformers' words."""
        named = [name for name in DRAFT_ALIASES if name in objects]
        if len(named) > 1:
            raise OptionError(f"{' and '.join(named)} each name a draft: pass one of them")
        ngram = objects.get("max_matching_ngram_size")
        if ngram is not None and named != ["prompt_lookup_num_tokens"]:
            raise OptionError("`max_matching_ngram_size` belongs to `prompt_lookup_num_tokens`: pass both")
        if "assistant_tokenizer" in objects and named != ["assistant_model"]:
            raise OptionError(
                "`assistant_tokenizer` belongs to `assistant_model`: pass both, or give it to SpecGenerator"
            )
        match named:
            case ["assistant_model"]:
                return self._drafter(objects["assistant_model"], objects.get("assistant_tokenizer"))
            case ["assistant_early_exit"]:
                return EarlyExitDrafter(self.target, objects["assistant_early_exit"])
            case ["prompt_lookup_num_tokens"]:
                return NgramDrafter(num_tokens=objects["prompt_lookup_num_tokens"], max_ngram=ngram or 2)
            case _:
                return self.drafter

    def _suited(self, drafter: BatchDrafter | None, o: Options) -> BatchDrafter | None:
        """A bridge between vocabularies goes by text for match verification and by shared tokens for rejection."""
        if isinstance(drafter, TextBridge) and o.samples and o.sampling in ("rejection", "block"):
            return VocabularyIntersection(drafter.drafter, drafter.target_tokenizer, drafter.draft_tokenizer)
        return drafter

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
                if not layers.isdecimal():
                    raise OptionError.of("draft", "'early_exit:N' with a number of layers", draft)
                return EarlyExitDrafter(self.target, int(layers))
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
        second = self._drafter(model, tokenizer)
        if second is None or text not in ("ngram", "suffix"):
            raise OptionError.of("draft", "a pair such as ('suffix', model)", (text, type(model).__name__))
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
        if isinstance(model, str):
            model = load(model).model
        if not isinstance(model, PreTrainedModel):
            raise OptionError.of(name, "a transformers model, or a hub id or path", type(model).__name__)
        return LanguageModel(model, compile=self._compile)


def _is_text_draft(draft: str) -> bool:
    return draft in ("ngram", "suffix") or draft.startswith("early_exit:")


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer beside a model that is named by id or path; None where there is none."""
    if not isinstance(model, str) or _is_text_draft(model):
        return None
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        return None


def _fields(config: Any) -> dict[str, Any]:
    """What a generation config sets."""
    fields = config.to_dict()
    return {
        n: v for n, v in fields.items() if v is not None and n not in ("transformers_version", "_from_model_config")
    }
