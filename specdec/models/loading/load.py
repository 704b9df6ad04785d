"""From a name, a path or a model to a `LanguageModel`; weights come from safetensors and GGUF files only."""

from __future__ import annotations

import logging
import shutil
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from specdec import kernels
from specdec.errors import OptionError, UnsupportedError
from specdec.models.backends.packed_layers import why_not_packed
from specdec.models.hf.derived import media_modules, part_class
from specdec.models.hf.load_errors import check_complete, check_folder, explain_errors
from specdec.models.hf.private_api import auto_class, cached, class_of
from specdec.models.language_model import LanguageModel
from specdec.models.loading.gguf import GgufFile, gguf_path
from specdec.models.loading.kept_weights import KeptWeights
from specdec.models.loading.lighten import hearing, lightened, narrowed, stored_dtype
from specdec.models.loading.packed_folder import is_packed_folder, read_packed, save_packed
from specdec.models.loading.placement import POLICIES, device_map, dispatch, offload_folder, read_ahead, to_devices
from specdec.models.loading.quantizers import Quantizer, settle_four_bits
from specdec.models.loading.stored_integers import StoredIntegers, refuse_rounding, stored_quantizer
from specdec.models.loading.weight_files import find
from specdec.options import bundled_models
from specdec.options.load import AUTO, PASSES, QUANTIZATIONS, Loading, split_gguf

_log = logging.getLogger(__name__)
_HOST = ("cpu", "disk")
_LARGE = 2**26  # bytes of weights; passes of smaller models spend their time elsewhere
_WHOLE = {"device_map", "offload"}  # options of loading that place the whole model at once


def load_model(
    source: str | PathLike[str] | PreTrainedModel | LanguageModel, how: Loading | None = None, *, name: str = "model"
) -> LanguageModel:
    """Loads the model at a hub name, path, GGUF file or `zoo:NAME` as `how` says; wraps a given model.

    `name` is the caller's word for the argument: "model" and "target" mean a zoo pair's target, other words its draft.

    Raises OptionError for loading options other than `PASSES` with a given model, and others than a `LanguageModel`
    has, an unknown `dtype` or device, and sources that do not exist; UnsupportedError if a quantization, backend or
    exactness is impossible here; LoadError for a broken checkpoint, and if memory or disk run out.
    """
    how, source = how or Loading(), unwrapped(source, name)
    if isinstance(source, LanguageModel | PreTrainedModel):
        if names := [option for option in how.changes if option not in PASSES]:
            raise OptionError(
                f"`{names[0]}` applies to loading, but the model is loaded already: change the model instead"
            )
        if isinstance(source, LanguageModel):
            for option in PASSES:
                value, current = getattr(how, option), getattr(source, option)
                if value not in ("auto", current):
                    raise OptionError(
                        f"`{option}`={value!r} does not reach a `{name}` that is a LanguageModel in {option} "
                        f"{current!r} already: make it with LanguageModel(model, {option}={value!r}), or pass the "
                        "transformers model"
                    )
            return source
        if (getattr(source, "tp_size", None) or 1) > 1:
            raise UnsupportedError(
                f"the {name} is shared by several processes, which would not follow one another: load all of it in one "
                "process, with `device_map='auto'` on several devices"
            )
        language = LanguageModel(source, backend=how.backend, exactness=how.exactness)
        if name == "target" and how.backend == AUTO and _is_slow(language):
            _report_slow(type(source).__name__)
        return language
    if not isinstance(source, (str, PathLike)):
        raise OptionError.of(name, "a hub name, a path or a transformers model", type(source).__name__)
    return _from_checkpoint(str(source), *_source_folder(source, how, name), name)


def _is_slow(language: LanguageModel) -> bool:
    """Whether a caller's model runs eager, and packed passes would be faster, if there are kernels or can be some."""
    could_be_packed = language.backend == "eager" and language.capability.cache_kind == "kv"
    return could_be_packed and language.weight_bytes >= _LARGE and why_not_packed(language.model) is None


@cache
def _report_slow(model: str) -> None:
    _log.warning(
        "the target, a %s, stays as you loaded it (`backend='eager'`), so its passes are slower: load it by name, "
        "SpecGenerator.from_pretrained(…), or pass `backend='packed'`, which keeps a second copy of its weights",
        model,
    )


def check_source(source: str, how: Loading, name: str = "model") -> None:
    """Raises OptionError where `source` names no model, and LoadError where the hub cannot say; it reads no weights."""
    folder, how = _source_folder(source, how, name)
    if how.gguf_file is None:
        with explain_errors(source, name):
            config, _ = PreTrainedConfig.get_config_dict(folder, revision=how.revision)
            if not config:
                raise OSError("it has no config.json")
    elif Path(folder).is_dir():
        gguf_path(folder, str(how.gguf_file), how.revision)


def _source_folder(source: str | PathLike[str], how: Loading, name: str) -> tuple[str, Loading]:
    """The folder or hub name of a source, and how it is loaded, with the name of a GGUF file."""
    folder, file = split_gguf(
        bundled_models.locate(str(source), "target" if name in ("model", "target") else "draft", name)
    )
    if file is None:
        check_folder(source, name)
    elif how.gguf_file is None:
        how = replace(how, gguf_file=file)
    else:
        raise OptionError(f"`gguf_file` names a file in a folder, and `{name}` is a GGUF file itself: leave one out")
    _check_devices(how)
    return folder, how


def unwrapped(model: Any, name: str) -> Any:
    """The transformers model inside PEFT's or torch.compile's wrapper; other models as they are.

    Raises UnsupportedError if PEFT adds something outside of that model, such as learned prompts.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, str | PathLike | PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for adapter, config in getattr(model, "peft_config", {}).items():
        outside = getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None)
        if outside or getattr(config, "peft_type", None) in ("XLORA", "POLY"):
            raise UnsupportedError(
                f"`{name}` has the adapter {adapter!r}, a {type(config).__name__}, which works outside of the "
                "transformers model: pass one whose adapters lie in its layers (LoRA, say), or merge them"
            )
    return model.get_base_model()


def _from_checkpoint(source: str, folder: str, how: Loading, name: str) -> LanguageModel:
    """The wrapped model in `folder`, a path or hub name; `source` is the caller's word for it."""
    packs = how.backend != "eager" and _computes_on_cpu(how) and kernels.available()  # which may build them
    began = perf_counter()
    with explain_errors(source, name):
        is_whole = packs and not _WHOLE & how.changes.keys()
        weights = KeptWeights(folder, how) if is_whole else None
        model = weights and weights.read(_read)
        model = model or _read_fast(folder, how, is_whole)
    language = LanguageModel(model, backend=how.backend, exactness=how.exactness, owned=True)
    kernels.give_back()
    if how.backend not in (AUTO, language.backend):
        raise OptionError(
            f"`backend`={how.backend!r} does not reach the {name}, whose weights are {language.backend}: leave it out, "
            "or load other weights"
        )
    language.loading_seconds = perf_counter() - began
    if weights and (writing := weights.writing(model)):
        writing.start()
    if language.reads_media and not media_modules(model):
        language.media_loader = partial(_eyes, source, folder, how, name, language)
    return language


def _read_fast(folder: str, how: Loading, is_whole: bool) -> Any:
    """The model of `_read`, with the numbers that are fastest here for speech and drafts, unless options name some.

    `is_whole`: all of it goes into this processor's memory.
    """
    few, packs = how.quantization == AUTO, how.backend != "eager"
    how = replace(how, quantization=None) if few else how
    chooses, stored = packs and how.dtype == AUTO and how.quantization is None, None
    if chooses and is_whole and how.gguf_file is None:
        config = AutoConfig.from_pretrained(folder, revision=how.revision, trust_remote_code=how.trust_remote_code)
        stored = stored_dtype(config)
    model = _read(folder, replace(how, dtype=stored or how.dtype))
    if stored is not None:
        place = Path(cached(folder, "config.json", how.revision)).parent
        narrowed(model, [str(file) for file in place.glob("*.safetensors")])
    if chooses:
        model = hearing(model)
    return lightened(model, owned=True) if packs and few else model


def _eyes(source: str, folder: str, how: Loading, name: str, language: LanguageModel) -> dict[str, nn.Module]:
    """The part of a checkpoint that reads pictures, in the dtype of the text model."""
    hub = {"revision": how.revision, "trust_remote_code": how.trust_remote_code}
    with explain_errors(source, name):
        config = AutoConfig.from_pretrained(folder, **hub)
        kind = part_class(config, reads_text=False)
        options = {**hub, "dtype": language.dtype, "use_safetensors": True, "output_loading_info": True}
        if quantizer := _stored_quantizer(folder, config, how):
            options["quantization_config"] = quantizer.config(language.dtype)
        model, info = kind.from_pretrained(folder, config=config, **options)
        check_complete(info)
        if quantizer:
            quantizer.convert(model)
    return {part: module.eval().to(language.device) for part, module in model.base_model.named_children()}


def _check_devices(how: Loading) -> None:
    """Raises OptionError if `device_map` names a device that does not exist here."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind, count = ("", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())
    for place in _places(how):
        if place in (*POLICIES, *_HOST):
            continue
        try:
            device = torch.device(kind or "cuda", place) if isinstance(place, int) else torch.device(place)
        except (RuntimeError, TypeError):
            expected = f"one of {', '.join((*POLICIES, *_HOST))}, a device of torch, or a mapping to these"
            raise OptionError.of("device_map", expected, place) from None
        if device.type not in ("cpu", "meta", kind) or (device.type == kind and (device.index or 0) >= count):
            devices = f"{count} of {kind}" if kind else "no accelerator"
            raise OptionError(f"`device_map` names {place!r}, but torch finds {devices} here: pass 'auto' or 'cpu'")


def _places(how: Loading) -> list[Any]:
    if how.device_map is None:
        return []
    return list(how.device_map.values()) if isinstance(how.device_map, Mapping) else [how.device_map]


def _read(name: str, how: Loading) -> Any:
    """The model of a checkpoint in eval mode, quantized and on its devices."""
    if how.gguf_file is not None:
        file = GgufFile(name, str(how.gguf_file), how.revision)
        return _read_blocks(file.config, how, file.read)
    quantizer = make_quantizer(how.quantization)
    with offload_folder(how) as folder, warnings.catch_warnings():
        # The warning is wrong for weights outside of modules, which accelerate places well.
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        hub = {"revision": how.revision, "trust_remote_code": how.trust_remote_code}
        config = AutoConfig.from_pretrained(name, **hub)
        if is_packed_folder(config):
            refuse_rounding(name, "packed", how)
            return _read_blocks(config, how, partial(read_packed, name, config, revision=how.revision))
        quantizer = _stored_quantizer(name, config, how) or quantizer
        kind = auto_class(config)
        places = device_map(how, kind, config)
        text = None if _WHOLE & how.changes.keys() else part_class(config, reads_text=True)
        reader = text or kind
        options: dict[str, Any] = {**hub, **_numbers(how, config, quantizer), "use_safetensors": True}
        options |= {"config": config, "output_loading_info": True, "offload_folder": folder}
        options["device_map"] = how.device_map if places is None or quantizer.converts else places
        # A copy, as transformers replaces strings in it.
        options["max_memory"] = how.max_memory and dict(how.max_memory)
        model, info = reader.from_pretrained(name, **options)
        if options["dtype"] == "auto" and _widens(model.dtype, config, how):  # the config had no dtype
            options["dtype"] = _widened(config)
            model = None
            model, info = reader.from_pretrained(name, **options)
        if text is not None:
            model.__class__ = class_of(kind, config)
        check_complete(info)
        stored = find(model)
        settle_four_bits(model)
        if quantizer.converts:
            quantizer.packs = places is None and how.backend != "eager"
            quantizer.rounds = how.activations != "float"
            quantizer.convert(model)
            if places is not None:
                dispatch(model, places, folder)
                stored = find(model)
        read_ahead(model, how, stored)
        if folder is not None and how.offload_folder is None:
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        return model.eval()


def _stored_quantizer(name: str, config: Any, how: Loading) -> StoredIntegers | None:
    """The quantizer of a checkpoint that is quantized already, on a CPU; elsewhere transformers reads it."""
    return stored_quantizer(name, config, how) if _computes_on_cpu(how) else None


def _read_blocks(config: Any, how: Loading, read: Callable[..., Any]) -> Any:
    """The model that `read` makes in host memory of blocks that are packed already, on its devices."""
    dtype = _numbers(how, config, Quantizer())["dtype"]
    dtype = config.dtype if dtype == "auto" else dtype
    model = read(dtype=dtype, packs=_packs(how, dtype), rounds=how.activations != "float")
    to_devices(model, how)
    return model.eval()


def _packs(how: Loading, dtype: torch.dtype) -> bool:
    """Whether layers of few bits are packed, in a model that computes in this dtype."""
    return how.backend != "eager" and _computes_on_cpu(how) and dtype in kernels.FLOATS.values() and kernels.available()


def save_loaded(source: str, folder: Path, how: Loading) -> None:
    """Writes the model at `source`, loaded as `how` says, into a folder from which it loads without rounding.

    Raises what `load_model` and `save_packed` raise, OptionError for the quantizations of other packages, and
    UnsupportedError without kernels.
    """
    kernels.check("a packed folder")
    words = [word for word, kind in QUANTIZATIONS.items() if kind.package is None]
    if how.quantization not in (None, *words):
        raise OptionError.of("quantization", f"one of {', '.join(words)}", how.quantization)
    place, how = _source_folder(source, how, "target")
    with explain_errors(source, "target"):
        model = _read(place, how)
        LanguageModel(model)  # raises for models that no layers of few bits fit
    save_packed(model, folder)


def _numbers(how: Loading, config: Any, quantizer: Quantizer) -> dict[str, Any]:
    """The dtype and quantization arguments of `from_pretrained`."""
    dtype = how.dtype if how.dtype == "auto" or isinstance(how.dtype, torch.dtype) else getattr(torch, how.dtype)
    if dtype == "auto" and _widens(config.dtype or config.get_text_config().dtype, config, how):
        dtype = _widened(config)
    quantized = quantizer.config((config.dtype or torch.float32) if dtype == "auto" else dtype)
    return {"dtype": dtype} if quantized is None else {"dtype": dtype, "quantization_config": quantized}


def _widens(stored: torch.dtype | None, config: Any, how: Loading) -> bool:
    """Whether weights of this dtype load in float32: float16, not quantized, on a CPU."""
    plain = getattr(config, "quantization_config", None) is None
    return stored == torch.float16 and plain and _computes_on_cpu(how)


def _widened(config: Any) -> torch.dtype:
    """Logs that float16 weights load in float32, and returns float32; for speech, `hearing` logs the numbers."""
    _log.log(
        logging.DEBUG if config.model_type == "whisper" else logging.INFO,
        "weights in float16 compute in float32, with the same numbers: CPUs are slow in float16 "
        "(`dtype='bfloat16'` takes half the memory, `dtype='float16'` keeps them as they are)",
    )
    return torch.float32


def _computes_on_cpu(how: Loading) -> bool:
    if how.offload is None and how.device_map is None:
        return torch.get_default_device().type == "cpu"
    if not torch.accelerator.is_available():
        return True
    return how.offload is None and all(str(place) in _HOST for place in _places(how))


def make_quantizer(name: str | None) -> Quantizer:
    """The quantizer of this name; None gets one that changes nothing. UnsupportedError if its package is missing."""
    if name is None:
        return Quantizer()
    entry = QUANTIZATIONS[name]
    if entry.package is not None and find_spec(entry.package) is None:
        free = " or ".join(repr(word) for word, kind in QUANTIZATIONS.items() if kind.package is None)
        raise UnsupportedError(
            f"`quantization`={name!r} needs {entry.package}: pip install {entry.install or entry.package}, "
            f"or use {free}, which need no package"
        )
    kind: Any = entry.kind
    if isinstance(kind, str):
        module, _, attribute = kind.partition(":")
        kind = getattr(import_module(f"specdec.models.loading.{module}"), attribute)
    return kind(name)
