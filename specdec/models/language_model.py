"""A transformers model and how it is run: sessions, encoder passes, early exits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specdec.errors import OptionError, UnsupportedError
from specdec.kernels import ALIKE, PackedLinear, block_kind, check
from specdec.models.backends.kv_session import KvSession
from specdec.models.backends.packed_layers import in_backend, is_packed
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.snapshot import ReplaySession
from specdec.models.capability import AT_MASKS, cache_reset_length, kv_width, rope_boundary
from specdec.models.encoding import EncoderOutput, Encoding
from specdec.models.exactness import Exactness, exactness, strict_obstacle
from specdec.models.hf.derived import media_modules, shallow_exit
from specdec.models.hf.device_hooks import execution_device, is_offloaded
from specdec.models.hf.model_state import float32_is_rounded, origins, plain_modes
from specdec.models.hf.patching import CHANGING
from specdec.models.hf.positions import STYLES, Lookup, Scaling
from specdec.models.hf.private_api import CACHE, attention_of, gives_hidden_states, text_class
from specdec.models.hf.sides import (
    decoder_of,
    encoder_inputs,
    frame_mask,
    is_composite,
    model_inputs,
    num_ids,
    num_source_ids,
    position_padding,
    text_config,
    text_embedding,
)
from specdec.models.pictures import reads_media
from specdec.models.probe import find_capability
from specdec.models.protocols import Capability, Session
from specdec.options.fields import is_list, is_whole
from specdec.options.load import BACKENDS

_LOADING = threading.RLock()  # held while a model gets the modules that read pictures


class LanguageModel:
    """A transformers model and how it is run; its weights, config and caches are never changed.

    `config` is the text decoder's, `vocab_size` the width of the logits, `max_positions` None without a limit. The text
    may hold `num_ids` ids, an encoder's input `num_source_ids` (None: it looks up none); the two differ if the two
    sides have separate vocabularies. `source_names` are the encoder's arguments. Ids go to `device`, `dtype` is the
    type of activations and masks. `backend`: "eager" runs its layers as they are, in padded passes. "packed" runs
    copies of its weights in the order in which short passes on a CPU read them, and attention of our own, which needs
    no padding; an `owned` model keeps nothing else. Passes of models that use transformers' attention interface are
    recorded, and run without Python from then on. "auto": packed if the model is owned and that is faster, otherwise
    eager. "packed" needs a C++ compiler, and weights, hooks and adapters that stay as they are, which `check_unchanged`
    compares unless the model is owned. Recorded passes return no attentions, and models with hooks or methods of a
    caller are not recorded.

    `epoch` counts the changes that callers reported (`changed`): what was saved of the model in an earlier one is void.

    `exactness`="strict" promises that a token's logits depend, bit for bit, on its text alone: not on other tokens of a
    pass, other rows, or branches.
    `reads_media`: it reads pictures or recordings in its text.

    Raises OptionError for a model in training mode and unknown backends, UnsupportedError for one without a language
    head or that continues text at a mask token, and for an impossible backend or exactness.
    """

    loading_seconds = 0.0
    """How long it took to load, if specdec loaded it."""
    media_loader: Callable[[], Mapping[str, nn.Module]] | None = None
    """Loads the modules that read pictures, by name, if they were left out (`load_media_modules`)."""
    recut: Callable[[], LanguageModel] | None = None
    """For an early exit of a caller's model: makes it again, from the model as it is by then."""

    @plain_modes()
    def __init__(
        self,
        model: Any,
        *,
        backend: str = "auto",
        exactness: str = "auto",
        owned: bool = False,
        capability: Capability | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise OptionError.of("backend", f"one of {', '.join(BACKENDS)}", backend)
        self.is_strict = exactness == "strict"
        if self.is_strict and backend == "eager":
            raise OptionError("`exactness`='strict' needs layers of our own: leave out `backend`='eager'")
        if self.is_strict:
            check("`exactness`='strict'")
            backend = "packed" if backend == "auto" else backend
        if model.training:
            raise OptionError("`model` is in training mode, where dropout makes its output random: call `model.eval()`")
        self.model, self.is_owned, self.epoch = model, owned, 0
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.config: Any = text_config(model)
        if self.config.model_type in AT_MASKS:
            way_out = "call `model.generate`"
            raise UnsupportedError(
                f"{type(model).__name__} continues text at a mask token that is taken back: {way_out}"
            )
        self.input_names, self.prefix = model_inputs(model), "decoder_" if self.is_encoder_decoder else ""
        self.reads_media = reads_media(model, self.input_names)
        self.source_names = encoder_inputs(model)
        self.vocab_size = _logits_width(model, self.config)
        self.num_ids, self.num_source_ids = num_ids(model) or self.vocab_size, num_source_ids(model)
        self.max_positions = _max_positions(self.decoder, self.config)
        self.capability = replace(
            capability or find_capability(self),
            boundary=rope_boundary(self.config),
            cache_reset_length=cache_reset_length(self.config),
        )
        self.device, self.dtype = execution_device(text_embedding(model)), model.dtype
        self.model = in_backend(model, backend, owned=owned)
        self._choice, self._is_packed = backend, is_packed(self.model)
        style, boundary = self.capability.positions, self.capability.boundary
        looks_up = self.capability.cache_kind == "kv" and style in STYLES
        self._lookup = Lookup(self.decoder, style) if looks_up else None
        self._scaling = None if boundary is None else Scaling(self.decoder, boundary)
        if self.is_strict:
            for module in self.model.modules():
                if isinstance(module, PackedLinear):
                    module.way = ALIKE
        self.ragged = self._make_ragged()
        if self.is_strict:
            self._check_strict()
        self._attention, self._source = attention_of(self.config), ref(model)
        is_copy = not owned and (self._is_packed or self.ragged is not None)
        self._origins = origins(model) if is_copy else {}
        self._exactness: Exactness | None = None

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        backend = "" if self.backend == "eager" else f", {self.backend}"
        return f"LanguageModel({type(self.model).__name__}, {self.num_layers} layers, {dtype}, {self.device}{backend})"

    @property
    def backend(self) -> str:
        """The backend of passes: "eager" or "packed"."""
        return "packed" if self._is_packed else "eager"

    @cached_property
    def is_offloaded(self) -> bool:
        """Whether some weights are read from elsewhere in every pass."""
        return is_offloaded(self.model)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        for name in ("decoder_layers", "num_decoder_layers", "num_hidden_layers"):
            if getattr(self.config, name, None) is not None:
                return int(getattr(self.config, name))
        raise UnsupportedError(
            f"the config of {self.config.model_type!r} has no number of decoder layers: set `num_hidden_layers`"
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one position, in all layers."""
        return self.num_layers * kv_width(self.config) * self.dtype.itemsize

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of the decoder reads."""
        outside = list(media_modules(self.model).values()) if self.reads_media else []
        outside += [self.model.get_encoder()] if self.is_encoder_decoder else []
        unread = {weight for part in outside for weight in (*part.parameters(), *part.buffers())}
        read = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.nbytes for tensor in read if tensor not in unread)

    @cached_property
    def weight_kind(self) -> str:
        """What most of the weights are stored in: a dtype, packed integers ("int4", "int8"), or blocks ("Q4_K")."""
        counts = Counter[str]()
        for module in self.model.modules():
            if isinstance(module, PackedLinear):
                counts[block_kind(module) or module.kind] += module.inputs * module.outputs
            for weight in module.parameters(recurse=False):
                counts[str(weight.dtype).removeprefix("torch.")] += weight.numel()
        return max(counts, key=lambda kind: counts[kind])

    def check_unchanged(self, name: str = "model") -> None:
        """Raises OptionError in training mode, and if a caller changed the model in a way that passes do not follow.

        `name` is the caller's word for the model.
        """
        source = self._source()
        if source is not None and source.training:
            raise OptionError(f"the {name} is in training mode, where dropout makes it random: call `.eval()` on it")
        if not (changes := self.changes()):
            return
        way, was = "make another SpecGenerator", "it was passed to SpecGenerator"
        if self._origins.keys() >= {*changes}:
            way = "call `generator.model_changed()`, or use `backend`='eager', which follows changes"
            was = f"its weights were put into backend {self.backend!r}"
        raise OptionError(f"the {name} was changed after {was} ({', '.join(changes)}): {way}")

    def changes(self) -> list[str]:
        """The caller's changes that passes do not follow; none for an owned model, at which nobody looks."""
        source = self._source()
        if self.is_owned or source is None:  # a copy may outlive its source
            return []
        same = {
            "device": execution_device(text_embedding(source)) == self.device,
            "dtype": source.dtype == self.dtype,
            "attention implementation": attention_of(self.config) == self._attention,
        }
        if self._origins:
            same |= {what: now == self._origins[what] for what, now in origins(source).items()}
        return [what for what, is_same in same.items() if not is_same]

    def changed(self) -> None:
        """Says that a caller has changed the model: saved prefixes are void, and copies of the model are made anew.

        Passes that begin later run the new copy. Raises UnsupportedError if the backend cannot run the changed model.
        """
        source, fresh = self._source(), None
        if self.recut is not None:
            fresh = self.recut()
        elif self._origins and source is not None and self._origins.keys() >= {*self.changes()}:
            fresh = LanguageModel(source, backend=self._choice, exactness="strict" if self.is_strict else "auto")
        if fresh is not None:  # in place, since sessions and drafts hold this object
            self.__dict__.update(vars(fresh) | {"epoch": self.epoch})
        self._exactness = None
        self.epoch += 1

    @cached_property
    def forgets_order(self) -> bool:
        """Whether tokens see later ones where no mask is given, as PaliGemma's do, and UMT5's in transformers 5.17."""
        masks_itself = self.is_encoder_decoder or attention_of(self.config) == "eager"
        end = ".SelfAttention" if masks_itself else ".self_attn"
        layers = [module for name, module in self.decoder.named_modules() if name.endswith(end)]
        return not all(getattr(layer, "is_causal", True) for layer in layers)

    @property
    def exactness(self) -> Exactness:
        """What a draft can change in a text: nothing ("strict", "exact"), near-ties ("rounding"), or more.

        "strict" was verified bit for bit when the model was made; with "row-dependent" a draft may change the text. It
        is measured once, and again after `changed`; torch's float32 precision settings are read each time.
        """
        if self.is_strict:
            return "strict"
        if self._exactness is None:
            with plain_modes():
                self._exactness = exactness(self.model, self.dtype)
        is_rounded = self._exactness == "exact" and float32_is_rounded(self.device)
        return "rounding" if is_rounded else self._exactness

    def session(self, over: Session | None = None) -> Session:
        """A new session, without rows; or one that runs the rows of `over`, a session of a model with equal caches."""
        if self.capability.cache_kind == "kv":
            return KvSession(self, over)  # type: ignore[arg-type]
        return ReplaySession(self)

    def early_exit(self, layers: int) -> LanguageModel:
        """The model cut after its first `layers` decoder layers; weights are shared."""
        if not 1 <= layers < self.num_layers:
            raise OptionError.of("layers", f"between 1 and {self.num_layers - 1}, fewer than the model has", layers)
        cut = LanguageModel(
            shallow_exit(self.model, self.num_layers, layers),
            backend="eager" if self._choice == "packed" or not self.ragged else self._choice,
        )
        cut.is_owned, cut.recut = self.is_owned, None if self.is_owned else partial(self.early_exit, layers)
        return cut

    def load_media_modules(self) -> Mapping[str, nn.Module]:
        """The modules that read pictures, by name; loads them now if loading the model left them out."""
        with _LOADING:
            if self.media_loader is not None:
                modules, self.media_loader = self.media_loader(), None
                with CHANGING:
                    for name, module in modules.items():
                        self.model.base_model.add_module(name, module)
            return media_modules(self.model)

    @torch.no_grad()
    def encode(
        self, inputs: Mapping[str, Tensor], *, output_hidden_states: bool = False, output_attentions: bool = False
    ) -> Encoding:
        """One encoder pass over its inputs, such as `input_ids` with `attention_mask`, or `input_features`.

        Raises OptionError where the encoder cannot read them, for example more than it has positions.
        """
        if not self.is_encoder_decoder:
            raise UnsupportedError(f"{type(self.model).__name__} has no encoder to read {sorted(inputs)} with")
        encoder = self.model.get_encoder()
        read = inputs.keys() & (self.source_names | self.input_names)  # a target of another class may read more
        arguments = {name: self._place(name, inputs[name]) for name in inputs if name in read}
        merged = arguments.keys() - self.source_names - {"attention_mask"}  # the model puts pictures among the text
        if not merged:
            arguments = {name: value for name, value in arguments.items() if name in self.source_names}
        extras = {"output_hidden_states": True} if output_hidden_states else {}
        extras |= {"output_attentions": True} if output_attentions else {}
        fast, features = self.ragged and self.ragged.frame_encoder, arguments.get("input_features")
        if fast and not extras and features is not None and fast.reads(features):
            return Encoding(torch.cat([fast(row) for row in torch.split(features, 1)]))
        try:
            output = (
                self._encode_by_model(arguments, extras) if merged else encoder(**arguments, **extras, return_dict=True)
            )
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError) as error:  # as each family refuses, most of them in torch's words
            sizes = ", ".join(f"`{name}` {list(value.shape)}" for name, value in arguments.items())
            way_out = "shorten it, or pad recordings as the model's processor does"
            raise OptionError(
                f"the encoder of {type(self.model).__name__} cannot read {sizes} ({error}): {way_out}"
            ) from error
        return self.encoding_of(output, inputs.get("attention_mask"))

    @torch.no_grad()
    def project(self, encoding: Encoding) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[rows, heads, frames, head width]` of each layer's cross-attention.

        If the layers' names are not known, a pass over one token makes them, and its output is dropped.
        """
        if self.ragged and self.ragged.frame_encoder:
            return self.ragged.frame_encoder.project(encoding.hidden)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = torch.zeros(len(encoding), 1, dtype=torch.long, device=self.device)
        self.model(decoder_input_ids=start, encoder_outputs=encoding.output, **{CACHE: cache}, use_cache=True)
        return [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers]

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """An input of the encoder on the model's device; features get the model's type, masks and ids keep theirs."""
        is_feature = tensor.is_floating_point() and not name.endswith("mask")
        return tensor.to(self.device, self.dtype if is_feature else None)

    def _encode_by_model(self, arguments: Mapping[str, Tensor], extras: Mapping[str, bool]) -> Any:
        """The encoder's output in a pass of the whole model, which makes the encoder's input from `arguments`."""
        start = torch.zeros(len(next(iter(arguments.values()))), 1, dtype=torch.long, device=self.device)
        output = self.model(**arguments, **extras, decoder_input_ids=start, use_cache=False, return_dict=True)
        return EncoderOutput(
            last_hidden_state=output.encoder_last_hidden_state,
            hidden_states=output.encoder_hidden_states,
            attentions=output.encoder_attentions,
        )

    def encoding_of(self, output: Mapping[str, Any], input_mask: Any = None) -> Encoding:
        """What the encoder returned for inputs with this mask."""
        return Encoding.of(output, input_mask, frame_mask(self.model, output, input_mask))

    def check_attentions(self, *, drafted: bool = False, branched: bool = False) -> None:
        """Raises UnsupportedError where attentions of chains (`drafted`) or trees (`branched`) are unavailable."""
        name, capability = type(self.model).__name__, self.capability
        if capability.cache_kind != "kv" and getattr(self.config, "num_attention_heads", None) is None:
            raise UnsupportedError(f"{name} has no attention: leave `output_attentions` out")
        # Some versions set attention on the whole model's config only.
        parts = [self.decoder, *([self.model.get_encoder()] if self.is_encoder_decoder else [])]
        parts += [] if is_composite(self.model.config) else [self.model]  # which attends in its parts alone
        kinds = [attention_of(getattr(part, "config", self.config)) for part in parts]
        if wrong := [kind for kind in kinds if kind != "eager"]:
            raise UnsupportedError(
                f'`output_attentions` needs {name} to be loaded with attn_implementation="eager", it has {wrong[0]!r}'
            )
        if drafted and not capability.chunks:
            raise UnsupportedError(f"{name} takes its tokens one by one: no `output_attentions` with a draft")
        if branched and capability.cache_kind != "kv":
            raise UnsupportedError(f"{name} runs the paths of a tree one by one: no `output_attentions` with branches")

    def check_hidden_states(self, layers: Sequence[int]) -> None:
        """Raises OptionError for layers that do not exist, UnsupportedError for classes that return no states."""
        if not is_list(layers) or not all(is_whole(layer) and 0 <= layer <= self.num_layers for layer in layers):
            raise OptionError.of("hidden_layers", f"a list of layers from 0 to {self.num_layers} of the target", layers)
        if not gives_hidden_states(self.decoder):
            way_out = "use a draft model, or draft='suffix'"
            name = type(self.model).__name__
            raise UnsupportedError(f"{name} returns no hidden states, which the draft reads: {way_out}")

    def lookup(self, query: Tensor, key: Tensor) -> AbstractContextManager[None]:
        """`Lookup.running` with `query` `[rows, nodes]` and `key` `[rows, end]`, for models that look positions up."""
        return nullcontext() if self._lookup is None else self._lookup.running(query, key)

    def scaling(self, spans: Tensor | None) -> AbstractContextManager[None]:
        """`Scaling.running` with `spans` `[rows, nodes]`; no change if scaling does not depend on length."""
        return nullcontext() if spans is None or self._scaling is None else self._scaling.running(spans)

    def shares_encoder_with(self, other: LanguageModel) -> bool:
        """Whether both have encoders with equal weights, so that one encoder pass serves both."""
        if not (self.is_encoder_decoder and other.is_encoder_decoder):
            return False
        weights, others = (_weights(m.model.get_encoder()) for m in (self, other))
        if any(weight.is_meta for weight in (*weights.values(), *others.values())):
            return False  # they cannot be compared
        types, other_types = ({name: weight.dtype for name, weight in side.items()} for side in (weights, others))
        return types == other_types and all(torch.equal(w, others[name].to(w.device)) for name, w in weights.items())

    @property
    def input_embeddings(self) -> Any:
        """The token embedding, as drafts use it."""
        return text_embedding(self.model)

    @property
    def output_embeddings(self) -> Any:
        """The language head, as drafts use it."""
        return self.model.get_output_embeddings()

    @property
    def decoder(self) -> Any:
        """The decoder, whose layers hold the cache."""
        return decoder_of(self.model)

    @property
    def logits_argument(self) -> str | None:
        """The argument that says which logits a pass returns; None for models that return all."""
        name = "logits_to_keep"
        return next((argument for argument in (name, self.prefix + name) if argument in self.input_names), None)

    def _make_ragged(self) -> RaggedForward | None:
        """Ragged passes, for packed models that allow them. Passes of an owned model are recorded here.

        Otherwise the first pass would take several times as long as any other, also in the eyes of a draft schedule.
        """
        try:
            ragged = RaggedForward(self) if self._is_packed else None
        except UnsupportedError:
            return None
        if ragged is not None and self.is_owned:
            ragged.recorded  # noqa: B018 (it is cached)
        return ragged

    def _check_strict(self) -> None:
        """Raises UnsupportedError if a token's logits depend on anything but its text."""
        name = type(self.model).__name__
        if self.ragged is None:
            raise UnsupportedError(f"{name} does not run on attention of our own: leave out `exactness`='strict'")
        if reason := strict_obstacle(self):
            other = "" if self._is_packed else "`backend`='packed' packs them, or "
            raise UnsupportedError(f"{name} cannot be strict here, {reason}: {other}leave out `exactness`='strict'")


def _logits_width(model: Any, config: Any) -> int:
    head: nn.Module | None = model.get_output_embeddings()
    if head is None or isinstance(head, nn.ModuleList):
        several = "" if head is None else f"{len(head)} heads for the codes of a sound, and "
        auto_class = text_class(model) if head is None else None
        way_out = "call `model.generate`" if auto_class is None else f"load it as {auto_class}"
        raise UnsupportedError(f"{type(model).__name__} has {several}no language head: {way_out}")
    width = getattr(head, "outputs" if isinstance(head, PackedLinear) else "out_features", None)
    return int(width) if width is not None else int(config.vocab_size)


def _max_positions(decoder: nn.Module, config: Any) -> int | None:
    """The length of the position table; None if positions are rotated, biased or implied."""
    modules = (*decoder.named_modules(), *decoder.named_buffers())
    tables = {"wpe", "embed_positions", "position_embeddings"} & {name.rpartition(".")[2] for name, _ in modules}
    names: tuple[str, ...] = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
    if not tables:
        names = ("max_seq_len",) if config.model_type == "mpt" else ()  # its bias is a table of this length
    length = next((int(length) for name in names if (length := getattr(config, name, None))), None)
    padding = position_padding(decoder)
    streams = int(bool(getattr(config, "ngram", 0)))  # ProphetNet's streams of guesses stand one position further
    return length if length is None or padding is None else length - padding - 1 - streams


def _weights(encoder: nn.Module) -> dict[str, Tensor]:
    """All weights by name, unpacked; without biases of zeros, which layers get that are joined."""
    layers = {name: module for name, module in encoder.named_modules() if isinstance(module, PackedLinear)}
    weights = {n: w for n, w in encoder.state_dict().items() if n.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        weights[f"{name}.weight"] = layer.weight()
        if layer.bias is not None:
            weights[f"{name}.bias"] = layer.bias.to(layer.takes[0])
    return {name: w for name, w in weights.items() if not name.endswith(".bias") or w.is_meta or w.any()}
