"""Models made of other models, which stay unchanged: copies over their weights, their first layers, parts of them.

An early exit shares all weights, and only the modules above the layer list are copied, shallowly.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.errors import OptionError, UnsupportedError
from specdec.models.hf.patching import attributes_of
from specdec.models.hf.private_api import attention_of, auto_class, class_of, set_attention
from specdec.models.hf.sides import decoder_config, decoder_of

_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers", "n_layer", "n_layers")
_CONFIGS = ("vision_config", "audio_config")
_IGNORED = "_keys_to_ignore_on_load_unexpected"
_DECODER = ("activation_function", "max_target_positions", "scale_embedding", "vocab_size")


def shallow_copy(model: Any, *, attention: str | None = None) -> Any:
    """A model of copied modules that share all weights with `model`, but not later changes of modules.

    Its layers use the named `attention`, if any. Passes of `model` may run meanwhile.
    """
    return _copy(model, set(model.modules()), None if attention is None else partial(set_attention, kind=attention))


def shallow_exit(model: Any, total: int, layers: int) -> Any:
    """`model` cut after the first `layers` of its `total` decoder layers; weights are shared, nothing is changed."""
    *names, last = _path_to_layers(model, total)
    above = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    if classes := [type(module).__name__ for module in above if "forward" in vars(module)]:
        raise UnsupportedError(f"{classes[0]} has a replaced `forward` (offloading does that): no early exit for it")
    shallow = _copy(model, set(above), partial(_cut, total=total, layers=layers))
    shallow.set_submodule(".".join([*names, last]), nn.ModuleList(list(getattr(above[-1], last))[:layers]))
    return shallow


def _copy(model: Any, modules: set[nn.Module], change: Callable[[Any], None] | None) -> Any:
    """`model` with copies of these `modules`; with `change`, which changes a config, they have copied configs too."""
    copies: dict[nn.Module, nn.Module] = {}
    configs: dict[int, Any] = {}

    def copy_of(module: nn.Module) -> nn.Module:
        if module not in modules:
            return module
        if module not in copies:
            copies[module] = other = type(module).__new__(type(module))
            # Dicts are copied, so that hooks of one are not shared.
            other.__dict__.update({n: v.copy() if isinstance(v, dict) else v for n, v in attributes_of(module).items()})
            children = {name: None if child is None else copy_of(child) for name, child in module._modules.items()}
            other.__dict__["_modules"] = children
            if change is not None and hasattr(module, "config"):
                if (key := id(module.config)) not in configs:
                    configs[key] = copy.deepcopy(module.config)
                    change(configs[key])
                other.__dict__["config"] = configs[key]
        return copies[module]

    return copy_of(model)


def _path_to_layers(model: Any, total: int) -> list[str]:
    decoder = decoder_of(model)
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return [part for part in f"{prefix}.{name}".split(".") if part]
    raise UnsupportedError(f"cannot find the {total} decoder layers of {type(model).__name__}: no early exit for it")


def _cut(config: Any, total: int, layers: int) -> None:
    """Lets a config describe fewer layers."""
    text = decoder_config(config)
    # Not by the setters, which check counts against lists before both are cut.
    fields = vars(text)
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:layers]
    for name in _COUNTS:
        if fields.get(name) == total:
            fields[name] = layers


def on_encoder_of(target: Any, draft: Any) -> Any:
    """A `WhisperForCausalLM` draft joined to a target's encoder, sharing all weights; any other draft unchanged.

    Raises OptionError if the decoder's width differs from the encoder's.
    """
    has_encoder = target.config.model_type == "whisper" and target.config.is_encoder_decoder  # unlike a decoder alone
    if type(draft).__name__ != "WhisperForCausalLM" or not has_encoder:
        return draft
    from transformers import WhisperForConditionalGeneration

    width = target.config.d_model
    if draft.config.d_model != width:
        raise OptionError.of("draft", f"a decoder of the target's width, {width}", draft.config.d_model)
    settings = draft.config.to_dict()
    parts = {name: settings[name] for name in settings if name.startswith("decoder_") or name in _DECODER}
    options = {**target.config.to_dict(), **parts, "attn_implementation": attention_of(draft.config)}
    config = type(target.config)(**options)
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    model.model.encoder, model.model.decoder = target.get_encoder(), draft.get_decoder()
    model.proj_out, model.generation_config = draft.proj_out, draft.generation_config
    model.training = model.model.training = draft.training  # the target's encoder may have another mode
    return model


def media_modules(model: Any) -> dict[str, nn.Module]:
    """The modules beside a model's decoder, by their names in its base model."""
    base, decoder = model.base_model, model.get_decoder()
    if base is decoder:
        return {}
    return {name: part for name, part in base.named_children() if decoder not in part.modules()}


def part_class(config: Any, *, reads_text: bool) -> Any:
    """A class that loads only the part that reads text, or only the rest; None for models that cannot be divided.

    Set a loaded model's class to `class_of` again, which can be pickled.
    """
    kind = class_of(auto_class(config), config)
    if kind is None or config.is_encoder_decoder or not any(hasattr(config, name) for name in _CONFIGS):
        return None

    class Part(kind):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            media, base = media_modules(self), self.base_model
            removed = [(base, name) for name in media]
            if media and not reads_text:
                removed = [(base, name) for name, _ in base.named_children() if name not in media]
                removed += [(self, name) for name, part in self.named_children() if part is not base]
            for owner, name in removed:
                delattr(owner, name)
            patterns = {rf"(^|\.){re.escape(name)}\." for _, name in removed}
            setattr(self, _IGNORED, {*(getattr(self, _IGNORED, None) or ()), *patterns})

        def tie_weights(self, *args: Any, **options: Any) -> Any:
            return super().tie_weights(*args, **options) if reads_text else None

    Part.__name__ = Part.__qualname__ = kind.__name__
    Part.__module__ = kind.__module__
    return Part
