"""From a name, a path or a model to a `LanguageModel`; weights come from safetensors only."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from specdec.errors import OptionError
from specdec.loading import DTYPES, Loading
from specdec.models.failures import check_complete, explained
from specdec.models.int8 import quantize_weights
from specdec.models.language_model import LanguageModel
from specdec.models.placement import device_map, dispatch, keep, offload_folder, read_ahead
from specdec.models.quantize import bitsandbytes_config, settle_four_bits
from specdec.models.stored import check


def load(
    source: str | PathLike[str] | PreTrainedModel | LanguageModel, how: Loading | None = None, *, compile: bool = False
) -> LanguageModel:
    """The model at a hub name or path, loaded as `how` says, or the given one as it is.

    Raises OptionError when loading options are given with a model, when `dtype` is unknown, or nothing is found;
    UnsupportedError where a quantization cannot run here; LoadError for a broken checkpoint, and where memory or disk
    run out.
    """
    how = how or Loading()
    if isinstance(source, LanguageModel):
        _check_unused([*how.given, *(["compile"] if compile else [])])
        return source
    if isinstance(source, PreTrainedModel):
        _check_unused(list(how.given))
        return LanguageModel(source, compile=compile)
    if not isinstance(source, (str, PathLike)):
        raise OptionError.of("model", "a hub name, a path or a transformers model", type(source).__name__)
    if not isinstance(how.dtype, str | torch.dtype):
        raise OptionError.of("dtype", f"a torch.dtype or one of {', '.join(DTYPES)}", how.dtype)
    return LanguageModel(_read(str(source), how), compile=compile)


def _check_unused(names: list[str]) -> None:
    if names:
        raise OptionError(f"`{names[0]}` applies to loading, but the model is loaded already: change the model instead")


def _read(name: str, how: Loading) -> Any:
    """The model of a checkpoint, in eval mode, quantized and in its place."""
    with explained(name), offload_folder(how) as folder, warnings.catch_warnings():
        # accelerate places weights outside of modules well, and warns of them.
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        hub = {"revision": how.revision, "trust_remote_code": how.trust_remote_code}
        config = AutoConfig.from_pretrained(name, **hub)
        kind, ours = _auto_class(config), how.quantization == "int8-weight"
        places = device_map(how, kind, config)
        options: dict[str, Any] = {**hub, **_numbers(how, config), "use_safetensors": True, "offload_folder": folder}
        options["device_map"] = how.device_map if places is None or ours else places
        options["max_memory"] = how.max_memory and dict(how.max_memory)  # strings in it are replaced
        model, info = kind.from_pretrained(name, config=config, output_loading_info=True, **options)
        check_complete(name, info)
        check(model)
        settle_four_bits(model)
        if ours:
            quantize_weights(model)
        if ours and places is not None:
            dispatch(model, places, folder)
        read_ahead(model, how)
        keep(model, how, folder)
        return model.eval()


def _numbers(how: Loading, config: Any) -> dict[str, Any]:
    """In which type weights are loaded, and what bitsandbytes makes of them."""
    dtype = how.dtype if how.dtype == "auto" or isinstance(how.dtype, torch.dtype) else getattr(torch, how.dtype)
    quantized = bitsandbytes_config(how.quantization, (config.dtype or torch.float32) if dtype == "auto" else dtype)
    return {"dtype": dtype} if quantized is None else {"dtype": dtype, "quantization_config": quantized}


def _auto_class(config: Any) -> Any:
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return next(
        (c for c in (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq) if type(config) in c._model_mapping),
        AutoModelForSeq2SeqLM,
    )
