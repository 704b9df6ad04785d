"""Checkpoints of heads, a config and named weights, and the checks that they fit their target."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from specdec.errors import LoadError, OptionError, SpecdecError, UnsupportedError
from specdec.models.capability import attention_kinds
from specdec.models.hf.load_errors import check_folder, check_reached, explain_errors
from specdec.models.hf.private_api import cached, set_attention
from specdec.models.language_model import LanguageModel
from specdec.models.protocols import AttentionKind
from specdec.options.fields import is_whole
from specdec.options.load import Loading
from specdec.proposers.heads.formats import kind_of_config, unified
from specdec.proposers.heads.stage import Embedding, Stage

_CONFIG = "config.json"
_WEIGHTS, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_OWN = {"embed_tokens.weight", "d2t", "t2d"}  # what a head has beside its stage
_IGNORED = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")  # only used in training
_CONFIG_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError)


def head_kind(
    source: str | PathLike[str] | PreTrainedModel, revision: str | None = None, *, argument: str = "draft"
) -> str | None:
    """The kind of head ("eagle3", …) that a model is, or that a folder or hub id holds; None if it is no head.

    Raises LoadError, naming `argument`, if the hub cannot be reached.
    """
    try:
        if isinstance(source, PreTrainedModel):
            config = source.config.to_dict()
        elif ":" in str(source) or Path(source).is_file():  # a pair of the package, or a file
            return None
        else:
            config = json.loads(Path(_file(str(source), _CONFIG, revision)).read_text())
    except (OSError, ValueError) as error:
        check_reached(error, str(source), argument)
        return None
    return kind_of_config(config) if isinstance(config, dict) else None


def _file(source: str, name: str, revision: str | None) -> str:
    folder = Path(source)
    return str(folder / name) if folder.is_dir() else cached(source, name, revision)


@dataclass(frozen=True)
class Checkpoint:
    """A head's config and weights in the form of `speculators`; `argument` names it in errors.

    It computes in `dtype`: the dtype that loading sets, or else its weights', with float32 for float16 on a CPU.
    """

    source: str
    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    dtype: torch.dtype
    argument: str = "draft"

    @classmethod
    def read(
        cls,
        source: str | PathLike[str] | PreTrainedModel,
        how: Loading,
        device: torch.device,
        argument: str = "draft",
    ) -> Checkpoint:
        """Reads a folder or hub id, or a model, for a target on `device`.

        Raises OptionError if it does not exist, LoadError for broken or missing files.
        """
        if isinstance(source, PreTrainedModel):
            name = type(source).__name__
            config, weights = source.config.to_dict(), dict(source.state_dict())
        else:
            name = str(source)
            check_folder(source, argument)
            with readable(name, argument):
                config = json.loads(Path(_file(name, _CONFIG, how.revision)).read_text())
                weights = dict(_weights(name, how.revision))
        with readable(name, argument):
            weights = {key: tensor for key, tensor in weights.items() if not key.startswith(_IGNORED)}
            config, weights = unified(config, weights)
            return cls(name, config, weights, _dtype(weights, how, device), argument)

    @property
    def kind(self) -> str:
        """The kind of head."""
        return str(self.config["speculators_model_type"])

    def layers_config(self) -> Any:
        """The config of its decoder layers; raises LoadError if it has none."""
        fields = self.config.get("transformer_layer_config")
        if not isinstance(fields, Mapping):
            raise self.broken("its config has no `transformer_layer_config`")
        values = {name: value for name, value in fields.items() if name != "model_type"}
        rope = values.get("rope_parameters") or {}
        values["rope_parameters"] = rope.get("sliding_attention", rope) or None  # one for all layers, as in the library
        values["use_sliding_window"] = "sliding_attention" in (values.get("layer_types") or ())
        config = AutoConfig.for_model(fields.get("model_type", "qwen3"), **values)
        self.count(config.num_hidden_layers, "num_hidden_layers", 1)
        config.name_or_path = self.source
        set_attention(config, "sdpa")
        return config

    def kinds(self, config: Any) -> tuple[AttentionKind, ...]:
        """The kinds of attention of its layers; raises UnsupportedError for layers of another sort."""
        if (kinds := attention_kinds(config)) is None:
            raise self.broken(f"its layers must all be attention, got {config.layer_types}", UnsupportedError)
        return tuple(kinds)

    def embedding(self, target: LanguageModel) -> Embedding:
        """Its own embeddings, or else the target's; raises LoadError if they lack tokens."""
        table = self.weights.get("embed_tokens.weight")
        if table is None:
            return Embedding(target.input_embeddings)
        if table.ndim != 2 or len(table) < target.vocab_size:
            raise self.broken(
                f"`embed_tokens.weight` is {list(table.shape)}, and a target of {target.vocab_size} tokens"
            )
        return Embedding(table.to(target.device, self.dtype))

    def count(self, size: Any, name: str, least: int, most: float = inf) -> int:
        """`size`, the config's field `name`; raises LoadError unless it is a whole number from `least` to `most`."""
        if not is_whole(size) or not least <= size <= most:
            span = f"of at least {least}" if most == inf else f"from {least} to {most}"
            raise self.broken(f"its `{name}` must be a whole number {span}, got {size!r}")
        return int(size)

    def vocabulary_size(self, target: LanguageModel) -> int:
        """How many tokens it guesses."""
        return self.config.get("draft_vocab_size") or target.vocab_size

    def vocabulary(self, target: LanguageModel) -> Tensor | None:
        """The target's ids `[size]` of the head's own logits; None if it has all."""
        size = self.vocabulary_size(target)
        if size == target.vocab_size and "d2t" not in self.weights:
            return None
        offsets = self.weights.get("d2t")
        if offsets is None:
            raise self.broken(f"it guesses {size} of {target.vocab_size} tokens, but has no `d2t`")
        ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
        unique = sorted(set(ids.tolist()))
        if offsets.shape != (size,) or len(unique) != size or unique[0] < 0 or unique[-1] >= target.vocab_size:
            raise self.broken(f"`d2t` must name {size} different tokens of {target.vocab_size}")
        marks = self.weights.get("t2d")
        if marks is not None and (len(marks) != target.vocab_size or marks.nonzero()[:, 0].tolist() != unique):
            raise self.broken("`t2d` contradicts `d2t`")
        return ids.to(target.device)

    def fill(self, stage: Stage, device: torch.device) -> None:
        """Loads a stage's weights; raises LoadError for missing ones and other shapes.

        Raises UnsupportedError if the checkpoint has others than these, its embeddings and its vocabulary.
        """
        state = stage.state_dict()
        if unknown_names := sorted(self.weights.keys() - state.keys() - _OWN):
            raise self.broken(f"it has unknown weights {', '.join(unknown_names[:3])}…", UnsupportedError)
        if missing_names := [name for name in state if name not in self.weights]:
            raise self.broken(f"{len(missing_names)} weights are missing, {missing_names[0]}…")
        for name, tensor in state.items():
            if self.weights[name].shape != tensor.shape:
                shape, expected = list(self.weights[name].shape), list(tensor.shape)
                raise self.broken(f"`{name}` is {shape}, and by its config {expected}")
            state[name] = self.weights[name].to(device, self.dtype if tensor.is_floating_point() else None)
        stage.load_state_dict(state, assign=True)
        stage.to(device)  # its buffers
        stage.inputs.to(self.dtype)

    def read_layers(self, name: str, target: LanguageModel) -> list[int]:
        """The target's layers whose inputs the head reads: its config's field `name`, or the format's default.

        Raises OptionError for layers that the target lacks; one more than the last stands for the last one's output.
        """
        most = target.num_layers
        layers: list[int] = self.config.get(name) or [2, most // 2, most - 3]
        if not all(0 <= layer <= most for layer in layers) or len(set(layers)) != len(layers):
            raise OptionError(
                f"`{self.argument}` {self.source!r} is of another target, this one has {most} layers: it reads "
                f"{layers}, or `{name}` in its config.json is wrong"
            )
        return layers

    def check_target(self, target: LanguageModel, *, width: int, vocab_size: int) -> None:
        """Raises OptionError, with the reason, if the head was made for another target."""
        verifier = (self.config.get("speculators_config") or {}).get("verifier") or {}
        kinds = verifier.get("architectures") or []
        kind, config = type(target.model).__name__, target.config
        name, theirs = verifier.get("name_or_path") or "", getattr(target.model.config, "name_or_path", "") or ""
        for what, size, target_size in (
            ("hidden states", width, config.hidden_size),
            ("vocabulary", vocab_size, target.vocab_size),
        ):
            if size != target_size:
                raise OptionError(
                    f"`{self.argument}` {self.source!r} was made for another target: its {what} are {size} wide, the "
                    f"target's {target_size}: use a head that was trained for {theirs or kind}"
                )
        # Two hub ids may be of different models; folders may have any name.
        ids = [path for path in (name, theirs) if path.count("/") == 1 and not Path(path).exists()]
        if (kinds and kind not in kinds) or len({path.rpartition("/")[2].lower() for path in ids}) == 2:
            raise OptionError(
                f"`{self.argument}` {self.source!r} was made for {name or kinds[0]!r}, and the target is "
                f"{theirs or kind!r}: use that target, or if they are the same, correct `verifier` in its config.json"
            )

    def broken(self, why: str, kind: type[Exception] = LoadError) -> Exception:
        """The error for a checkpoint that cannot be used."""
        return kind(f"`{self.argument}` {self.source!r} cannot be loaded: {why}")


def _dtype(weights: Mapping[str, Tensor], how: Loading, device: torch.device) -> torch.dtype:
    if how.dtype != "auto":
        return how.dtype if isinstance(how.dtype, torch.dtype) else getattr(torch, how.dtype)
    stored = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    return torch.float32 if stored == torch.float16 and device.type == "cpu" else stored


def _weights(name: str, revision: str | None) -> Iterator[tuple[str, Tensor]]:
    """The weights in one file, or in the files of an index; raises OSError if there is neither."""
    present = (file for file in (_WEIGHTS, _INDEX, _PICKLED) if _is_there(name, file, revision))
    file = next(present, _WEIGHTS)
    files = [file]
    if file == _INDEX:
        files = sorted(set(json.loads(Path(_file(name, _INDEX, revision)).read_text())["weight_map"].values()))
    for path in [_file(name, file, revision) for file in files]:
        try:
            pickled = path.endswith(".bin")
            weights = torch.load(path, "cpu", weights_only=True) if pickled else load_file(path)
        except UnpicklingError as error:
            raise RuntimeError(str(error)) from error
        yield from weights.items()


def _is_there(source: str, name: str, revision: str | None) -> bool:
    try:
        return Path(_file(source, name, revision)).exists()
    except OSError:
        return False


@contextmanager
def readable(source: str, argument: str) -> Iterator[None]:
    """Explains errors in a checkpoint's files (`explain_errors`); invalid fields of its config raise LoadError too."""
    with explain_errors(source, argument):
        try:
            yield
        except SpecdecError:
            raise
        except _CONFIG_ERRORS as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise LoadError(
                f"`{argument}` {source!r} cannot be loaded: its config.json, or the index of its files, makes no sense "
                f"({why})"
            ) from error
