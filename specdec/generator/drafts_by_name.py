"""A draft by any name that a caller gives it, as a `Draft` of one target."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.core.drafts import Draft, Drafter, refuse_argument
from specdec.errors import DraftError, OptionError, UnsupportedError, VocabularyError
from specdec.generator.build_request import ScheduledDraft
from specdec.generator.inputs.prompts import FEATURES
from specdec.generator.tokenizers import check_split_rule, check_tokenizer, tokenizer_beside
from specdec.models import LanguageModel, load_model, may_draft, place_tokens, reads_media_alike, unwrapped
from specdec.models.hf.derived import on_encoder_of
from specdec.models.hf.load_errors import check_folder
from specdec.models.loading.lighten import lightened
from specdec.options.drafts import ALONE, FOLLOWING, SPELLINGS, read_draft
from specdec.options.fields import COPYING, check_whole, is_whole
from specdec.options.load import AUTO, Loading
from specdec.proposers import (
    DRAFTS,
    EarlyExitDraft,
    FunctionDraft,
    HybridDraft,
    ModelDraft,
    MtpDraft,
    NgramDraft,
    QuantizedDraft,
    SuffixDraft,
    TextAloneDraft,
    TextBridge,
)
from specdec.proposers.copying import TextDraft
from specdec.proposers.function import refuse_class
from specdec.proposers.heads import head_kind, load_head
from specdec.proposers.memory import Memory

_log = logging.getLogger(__name__)

# transformers' arguments that name a call's draft -> the arguments that belong to each.
ALIASES: dict[str, tuple[str, ...]] = {
    "assistant_model": ("assistant_tokenizer",),
    "prompt_lookup_num_tokens": ("max_matching_ngram_size",),
    "assistant_early_exit": (),
    "use_mtp": (),
}
NAMES = (*ALIASES, *(detail for details in ALIASES.values() for detail in details))
_PAIR = f"a pair of {' or '.join(map(repr, (*COPYING, ALONE)))} and a model that is loaded"
_KINDS = f"{SPELLINGS}, a loaded model, {_PAIR}, a Drafter or None"
_MOST_RECENT = 2  # drafts named in calls that stay; each may hold a model
_DEAR = 2**25  # bytes of weights; a pass of so many is dear beside a look into the text


@dataclass(frozen=True)
class HeadAt:
    """A head by folder or hub id, which is loaded after its target."""

    source: str
    how: Loading


@dataclass(frozen=True)
class LoadedModel:
    """A draft model by folder or hub id, which is loaded before its target, and the tokenizer beside it."""

    model: LanguageModel
    tokenizer: Any


class Drafts:
    """Makes the drafts of one target, and keeps the last two that calls named, with their models."""

    def __init__(self, target: LanguageModel, *, backend: str = "auto", memory: Memory | None = None) -> None:
        self._target, self._memory = target, memory
        self._how = Loading(backend=backend, quantization=AUTO)
        self._lock = threading.Lock()
        # The arguments that name drafts, and the drafts; the last first.
        self._recent: list[tuple[tuple[Any, ...], ScheduledDraft]] = []

    def make(
        self, draft: Any, tokenizer: Any, assistant_tokenizer: Any = None, *, name: str = "draft", alone: bool = False
    ) -> Draft | None:
        """The draft that the caller's argument `name` stands for; `tokenizer` is the target's.

        A large model copies from the text besides, unless it is to be `alone`. Drafts that copy get the memory.

        Raises OptionError for a value that is no draft, VocabularyError where target and draft do not share a
        vocabulary.
        """
        check_tokenizer("assistant_tokenizer", assistant_tokenizer)
        draft = loaded(unwrapped(draft, name), self._how, name=name)
        if assistant_tokenizer is not None:
            _check_bridge(draft, tokenizer, name)
        match draft:
            case None | "none":
                return None
            case "auto":
                return self._automatic()
            case str():
                return self._registered(draft, name)
            case HeadAt():
                return load_head(draft.source, self._target, draft.how, argument=name)
            case PreTrainedModel() if head_kind(draft, argument=name) is not None:
                return load_head(draft, self._target, self._how, argument=name)
            case LoadedModel() | PreTrainedModel() | LanguageModel():
                model = self._model(draft, tokenizer, assistant_tokenizer, name)
                return model if alone else self._with_copies(model)
            case tuple() | list():
                return self._hybrid(draft, tokenizer, assistant_tokenizer, name)
            case _:
                return self._remembering(_callers_draft(draft, name))

    def of_call(self, arguments: Mapping[str, Any], tokenizer: Any) -> ScheduledDraft:
        """The draft that a call names by transformers' arguments.

        Raises OptionError where several arguments name a draft.
        """
        aliases = [alias for alias in ALIASES if alias in arguments]
        if len(aliases) > 1:
            raise OptionError(f"{' and '.join(aliases)} each name a draft: pass one of them")
        parts = (tokenizer, *(arguments.get(name) for name in NAMES))
        with self._lock:
            entry = next((entry for entry in self._recent if all(map(_same, entry[0], parts))), None)
            # The oldest draft is freed before another draft is loaded.
            self._recent = [recent for recent in self._recent if recent is not entry][: _MOST_RECENT - 1]
            entry = entry or (parts, ScheduledDraft(self._target, self._of_call(aliases[0], arguments, tokenizer)))
            self._recent.insert(0, entry)
            return entry[1]

    @property
    def of_calls(self) -> list[ScheduledDraft]:
        """The drafts that calls named and that are still loaded."""
        with self._lock:
            return [scheduled for _, scheduled in self._recent]

    def _of_call(self, name: str, arguments: Mapping[str, Any], tokenizer: Any) -> Draft | None:
        match name:
            case "prompt_lookup_num_tokens":
                return self._remembering(_lookup(**arguments))
            case "assistant_early_exit":
                layers, most = arguments[name], self._target.num_layers - 1
                if not is_whole(layers) or not 1 <= layers <= most:
                    expected = f"a number of the target's {most + 1} layers, at least 1 and not all"
                    raise OptionError.of(name, expected, layers)
                return EarlyExitDraft(self._target, layers)
            case "use_mtp":
                if arguments[name] is not True:
                    raise OptionError.of(name, "True or False", arguments[name])
                return MtpDraft.of(self._target, None, name)
            case _:
                return self.make(arguments[name], tokenizer, arguments.get("assistant_tokenizer"), name=name)

    def _automatic(self) -> Draft | None:
        """The target in 4 bits where that drafts well for it, and copies beside texts; of speech, nothing else."""
        target = self._target
        hears = target.config.model_type == "whisper" and target.is_encoder_decoder
        writes = hears or not target.is_encoder_decoder  # what is read by an encoder is mostly copied
        if writes and self._how.backend != "eager" and target.is_owned and may_draft(target.model):
            with suppress(UnsupportedError):  # a cache of another form, or other logits in 4 bits
                return self._with_copies(QuantizedDraft(target))
        return None if hears else self._remembering(SuffixDraft())

    def _registered(self, draft: str, name: str) -> Draft:
        """The draft of a word; raises DraftError for a wrong entry of `DRAFTS`."""
        spelling = read_draft(draft, name, DRAFTS)
        word, argument = str(spelling.word), spelling.argument
        if argument in FOLLOWING:
            return self._hybrid((word, argument), None, None, name)
        kind = DRAFTS[word]
        is_class = isinstance(kind, type)
        if not (issubclass(kind, Draft) if is_class else callable(kind)):
            must = "a function (tokens, k) -> tokens, or a subclass of `specdec.core.drafts.Draft`"
            raise DraftError(f"DRAFTS[{word!r}] must be {must}, got {kind!r}")
        if not is_class:
            refuse_argument(argument, name)
            return FunctionDraft(kind)
        result = kind.of(self._target, argument, name)
        if not isinstance(result, Draft):
            got = type(result).__name__
            raise DraftError(f"`of` of the draft {word!r} must return a `specdec.core.drafts.Draft`, got {got}")
        return self._remembering(result)

    def _model(self, draft: Any, tokenizer: Any, assistant_tokenizer: Any, name: str) -> Draft:
        """A draft model; with another tokenizer than the target's, behind a `TextBridge`."""
        target = self._target
        if isinstance(draft, LoadedModel):
            model = draft.model
            if tokenizer is not None and assistant_tokenizer is None:
                assistant_tokenizer = draft.tokenizer
        else:
            model = _draft_model(on_encoder_of(target.model, draft), name, self._how)
        if model.is_encoder_decoder and not target.is_encoder_decoder:
            raise OptionError(
                f"`{name}` is an encoder-decoder model, and the target has no encoder inputs to give it: "
                "name a decoder-only model, or 'suffix'"
            )
        shared = target.shares_encoder_with(model)
        if model.is_encoder_decoder and not shared:
            _check_encoders(model, target, name)
        translates = assistant_tokenizer is not None and (
            _vocabulary(tokenizer, "tokenizer") != _vocabulary(assistant_tokenizer, "assistant_tokenizer")
        )
        media = reads_media_alike(model, target) and not translates
        result: Draft = ModelDraft(model, shared_encoder=shared, reads_media=media)
        if assistant_tokenizer is None:
            _check_widths(model, target, tokenizer)
        elif translates:
            _log.warning("the draft has another tokenizer than the target: guesses travel as text, which costs time")
            result = TextBridge(result, tokenizer, assistant_tokenizer)
        is_blind = target.reads_media and not media
        return TextAloneDraft(result, place_tokens(target.model.config)) if is_blind else result

    def _with_copies(self, draft: Draft) -> Draft:
        """The draft of a model, beside a text draft where its passes are dear, or the memory has files.

        Encoder-decoders mostly write new words.
        """
        model, has_files = draft.models[0], self._memory is not None and self._memory.has_files
        if not has_files and (model.is_encoder_decoder or model.weight_bytes < _DEAR):
            return draft
        return HybridDraft(self._remembering(SuffixDraft()), draft)

    def _remembering(self, draft: Any) -> Any:
        """A copy, with the memory, of a draft that copies, alone or in a pair, and has no memory; others unchanged."""
        if self._memory is not None and isinstance(draft, HybridDraft):
            draft = copy(draft)
            draft.text = self._remembering(draft.text)
        if self._memory is None or not isinstance(draft, TextDraft) or draft.memory is not None:
            return draft
        draft = copy(draft)
        draft.memory = self._memory
        return draft

    def _hybrid(self, pair: Sequence[Any], tokenizer: Any, assistant_tokenizer: Any, name: str) -> Draft:
        kinds = tuple(part if isinstance(part, str) else type(part).__name__ for part in pair)
        if len(pair) != 2 or kinds[0] not in (*COPYING, ALONE) or _is_unloaded(pair[1]):
            raise OptionError.of(name, _PAIR, kinds, f"a hybrid with a model by name is '{COPYING[0]}+MODEL'")
        model = self.make(pair[1], tokenizer, assistant_tokenizer, name=name, alone=True)
        assert model is not None
        if kinds[0] == ALONE:
            return model
        return HybridDraft(self._remembering(DRAFTS[pair[0]].of(self._target, None)), model)


def _is_unloaded(part: Any) -> bool:
    """Whether the second part of a pair is none that a hybrid takes."""
    return isinstance(part, str | PathLike | None) and part not in FOLLOWING


def copying_beside(draft: Draft | None) -> Draft:
    """The draft, with one beside it that copies from predictions unless it does so itself."""
    if draft is None:
        return SuffixDraft()
    return draft if draft.reads_predictions else HybridDraft(SuffixDraft(), draft)


def draft_arguments(arguments: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The arguments of `ALIASES` in a call or else its generation config.

    Warns of a call's details without the argument that they belong to.
    """
    names = {name: value for name in NAMES if (value := arguments.get(name, getattr(config, name, None))) is not None}
    if names.get("use_mtp") is False:
        del names["use_mtp"]
    for alias, details in ALIASES.items():
        for detail in details:
            if detail in names and alias not in names:
                del names[detail]
                if detail in arguments:
                    warnings.warn(f"`{detail}` changes nothing without `{alias}`: pass both", stacklevel=2)
    return names


def _draft_model(model: Any, name: str, how: Loading) -> LanguageModel:
    """A caller's draft model: a copy in few bits where that makes it faster, which follows no later change."""
    if isinstance(model, PreTrainedModel) and how.backend != "eager":
        light = lightened(model, owned=False)
        if light is not model:
            language = LanguageModel(light, backend=how.backend, owned=True)
            language.recut = partial(_draft_model, model, name, how)
            return language
    return load_model(model, replace(how, quantization=None), name=name)


def loaded(draft: Any, how: Loading, *, name: str = "draft") -> Any:
    """The caller's argument `name`, with a `LoadedModel` or `HeadAt` in place of a model's id or path.

    The spelling of a hybrid becomes a pair; other words and objects are unchanged.
    """
    word, source = None, draft
    if isinstance(draft, str):
        spelling = read_draft(draft, name, DRAFTS)
        word, source = spelling.word, spelling.model
    if not isinstance(source, str | PathLike):
        return draft
    if not Path(source).is_file():
        check_folder(source, name)
    model: HeadAt | LoadedModel
    if how.gguf_file is None and head_kind(source, how.revision, argument=name) is not None:
        model = HeadAt(str(source), how)
    else:
        reader, language = check_split_rule(source, how), load_model(source, how, name=name)
        model = LoadedModel(language, tokenizer_beside(str(source), reader=reader, **how.beside))
    return model if word is None else (word, model)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same object, or equal names or numbers."""
    return a is b or (isinstance(a, str | PathLike | int) and type(a) is type(b) and bool(a == b))


def _callers_draft(draft: Any, name: str) -> Draft:
    """The caller's drafter or function; raises OptionError for other objects."""
    refuse_class(name, draft)
    if isinstance(draft, Draft):
        return draft
    if hasattr(draft, "start"):
        raise OptionError.of(name, "a `specdec.core.drafts.Draft`", type(draft).__name__, "subclass it")
    if isinstance(draft, Drafter) or (callable(draft) and not isinstance(draft, nn.Module)):
        return FunctionDraft(draft)
    raise OptionError.of(name, _KINDS, type(draft).__name__)


def _lookup(prompt_lookup_num_tokens: Any, max_matching_ngram_size: Any = 2) -> Draft:
    check_whole("prompt_lookup_num_tokens", prompt_lookup_num_tokens)
    check_whole("max_matching_ngram_size", max_matching_ngram_size)
    return NgramDraft(num_tokens=prompt_lookup_num_tokens, max_ngram=max_matching_ngram_size)


def _check_bridge(draft: Any, tokenizer: Any, name: str) -> None:
    """Raises OptionError where an `assistant_tokenizer` has no effect."""
    model = draft[-1] if isinstance(draft, tuple | list) and draft else draft
    if not isinstance(model, LoadedModel | PreTrainedModel | LanguageModel):
        kind = repr(draft) if draft is None or isinstance(draft, str) else type(draft).__name__
        raise OptionError(f"`assistant_tokenizer` belongs to a draft model, and `{name}` is {kind}: leave it out")
    if tokenizer is None:
        raise OptionError("`assistant_tokenizer` works together with the target's own: pass `tokenizer=` too")


def _vocabulary(tokenizer: Any, name: str) -> Any:
    if not hasattr(tokenizer, "get_vocab"):
        raise OptionError.of(
            name, "a tokenizer with `get_vocab`, to compare target and draft", type(tokenizer).__name__
        )
    return tokenizer.get_vocab()


def _check_encoders(draft: LanguageModel, target: LanguageModel, name: str) -> None:
    """Raises OptionError where the encoders of draft and target read no input in common."""
    inputs = [{"input_ids", *FEATURES} & model.source_names for model in (draft, target)]
    if not inputs[0] & inputs[1]:
        reads, needs = (" or ".join(f"`{input_name}`" for input_name in sorted(names)) for names in inputs)
        raise OptionError(
            f"`{name}` has an encoder that reads {reads or 'other inputs'}, and the target's reads "
            f"{needs or 'others'}: name a draft for the same inputs, or 'suffix'"
        )
    sizes = (draft.num_source_ids, target.num_source_ids)
    if sizes[0] is not None and sizes[1] is not None and sizes[0] < sizes[1]:
        raise VocabularyError(
            f"the draft's encoder reads {sizes[0]} ids, the target's {sizes[1]}: name a draft with the target's "
            "vocabulary for sources, or 'suffix'"
        )


def _check_widths(draft: LanguageModel, target: LanguageModel, tokenizer: Any) -> None:
    """Raises VocabularyError where the widths of logits differ by more than padding."""
    widths = (draft.vocab_size, target.vocab_size)
    count = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    are_padded = count is not None and count <= min(widths) and max(widths) <= 1.05 * count
    if widths[0] != widths[1] and not are_padded:
        raise VocabularyError(
            f"draft vocabulary {widths[0]} ≠ target {widths[1]}: pass `assistant_tokenizer=` (with `tokenizer=`), "
            "or draft='suffix'"
        )
