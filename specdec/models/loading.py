"""From a name, a path or a model to a `LanguageModel`; weights come from safetensors only."""

from __future__ import annotations

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
from specdec.models.language_model import LanguageModel

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    source: str | PathLike[str] | PreTrainedModel | LanguageModel,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
) -> LanguageModel:
    """The model at a hub name or path, or the given one as it is, in eval mode when it is loaded here.

    Raises OptionError when loading options are given with a model, when `dtype` is unknown, or nothing can be loaded.
    """
    given = {"dtype": dtype != "auto", "device_map": device_map is not None, "revision": revision is not None}
    if isinstance(source, LanguageModel):
        _check_unused(given | {"compile": compile})
        return source
    if isinstance(source, PreTrainedModel):
        _check_unused(given)
        return LanguageModel(source, compile=compile)
    if not isinstance(source, (str, PathLike)):
        raise OptionError.of("model", "a hub name, a path or a transformers model", type(source).__name__)
    name = str(source)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = _read(AutoConfig, name, options)
    weights = {"config": config, "dtype": _dtype(dtype), "device_map": device_map, "use_safetensors": True}
    model = _read(_auto_class(config), name, options | weights)
    return LanguageModel(model.eval(), compile=compile)


def _check_unused(given: dict[str, bool]) -> None:
    names = [name for name, used in given.items() if used]
    if names:
        raise OptionError(f"`{names[0]}` applies to loading, but the model is loaded already: change the model instead")


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in _DTYPES:
        raise OptionError.of("dtype", f'"auto", a torch.dtype or one of {sorted(_DTYPES)}', dtype)
    return _DTYPES[dtype]


def _auto_class(config: Any) -> Any:
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return next(
        (c for c in (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq) if type(config) in c._model_mapping),
        AutoModelForSeq2SeqLM,
    )


def _read(kind: Any, name: str, options: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        hint = "check the name, or convert the checkpoint to safetensors if that is what is missing"
        raise OptionError(f"`model` {name!r} cannot be loaded ({error}): {hint}") from error
