"""Checkpoints in two parts: one reads text, and is loaded first; the other reads pictures, and waits for the first."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from specdec.models.hf.private_api import class_of

_CONFIGS = ("vision_config", "audio_config")
_IGNORED = "_keys_to_ignore_on_load_unexpected"


def eyes(model: Any) -> dict[str, nn.Module]:
    """The modules beside a model's decoder, by their names in its base model."""
    base, decoder = model.base_model, model.get_decoder()
    if base is decoder:
        return {}
    return {name: part for name, part in base.named_children() if decoder not in part.modules()}


def part_class(auto_class: Any, config: Any, *, reads_text: bool) -> Any:
    """A class that loads only the part that reads text, or the other; None for models that cannot be divided.

    Give a loaded model its own class back (`class_of`), which can be pickled.
    """
    kind = class_of(auto_class, config)
    if kind is None or not any(hasattr(config, name) for name in _CONFIGS):
        return None

    class Part(kind):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *given: Any, **options: Any) -> None:
            super().__init__(config, *given, **options)
            beside, base = eyes(self), self.base_model
            dropped = [(base, name) for name in beside]
            if not reads_text and beside:
                own = [(owner, name) for owner in (base, self) for name, _ in owner.named_children()]
                dropped = [(owner, name) for owner, name in own if getattr(owner, name) is not base]
                dropped = [(owner, name) for owner, name in dropped if owner is self or name not in beside]
            for owner, name in dropped:
                delattr(owner, name)
            ignored = {rf"(^|\.){re.escape(name)}\." for _, name in dropped}
            setattr(self, _IGNORED, {*(getattr(self, _IGNORED, None) or ()), *ignored})

        def tie_weights(self, *given: Any, **options: Any) -> Any:
            return super().tie_weights(*given, **options) if reads_text else None

    Part.__name__ = Part.__qualname__ = kind.__name__
    Part.__module__ = kind.__module__
    return Part
