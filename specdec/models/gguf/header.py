"""What a GGUF file says of its architecture, where no key may be passed over."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.errors import LoadError, UnsupportedError
from specdec.models.gguf.reader import GgufReader, floats

# Keys that say how a model was trained or stored, not what it computes.
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout"}
# Keys of a part that an architecture may have -> the value that means that the model lacks the part.
_ABSENT: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "expert_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "pooling_type": 0,
}


class Header:
    """The keys of a file that begin with its architecture's name, and its tensors, which say the model's shape.

    `check` raises UnsupportedError for a key that was not read: each key may change what the model computes.
    """

    def __init__(self, reader: GgufReader) -> None:
        self.reader, self.architecture = reader, architecture_of(reader)
        self._names_read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key by its name without the architecture's."""
        self._names_read.add(name)
        return self.reader.keys.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """The value of a key; LoadError without it."""
        value = self.get(name)
        if value is None:
            raise LoadError(
                f"{self.reader.path} lacks the key {self.architecture}.{name}: it is incomplete, make it again"
            )
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """A number that is the same in all layers, where the file may have one for each layer."""
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, np.ndarray | list):
            if len(numbers := set(np.asarray(value).tolist())) != 1:
                raise self.refusal(name, value, "layers of different shapes are not read")
            return numbers.pop()
        return value

    def tensor(self, name: str) -> Any:
        """The tensor of this name, or None."""
        return self.reader.tensors.get(name)

    def floats(self, name: str) -> list[float] | None:
        """The numbers of a vector, or None."""
        tensor = self.tensor(name)
        return None if tensor is None else floats(tensor).tolist()

    def refusal(self, name: str, value: Any, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.reader.path} says {self.architecture}.{name} = {value!r}, and {reason}: use another file, or the "
            "checkpoint in safetensors that it was made of"
        )

    def check(self) -> None:
        """Raises UnsupportedError for a key of the architecture that was not read, unless it changes nothing."""
        prefix = f"{self.architecture}."
        for key, value in self.reader.keys.items():
            name = key.removeprefix(prefix)
            if key == name or name in self._names_read or name in _HARMLESS:
                continue
            if name in _ABSENT and np.all(np.asarray(value) == _ABSENT[name]):
                continue
            raise self.refusal(name, value, f"what that changes in models of {self.architecture} is not known")


def architecture_of(reader: GgufReader) -> str:
    """The architecture's name; LoadError for a file that has none."""
    name = reader.keys.get("general.architecture")
    if not isinstance(name, str):
        raise LoadError(f"{reader.path} lacks the key general.architecture: it is incomplete, make it again")
    return name
