"""The second gear: a model's forward through torch.compile, over the same store as the first.

What is compiled is a function of tensors: the store's buffers go in and a light cache is built around them inside, so
that no compiled code is tied to a session. Sizes that change between passes (rows, nodes, end, capacity) are marked as
dynamic one by one: with `dynamic=True` sizes that happen to be equal, say five nodes and five heads, would be taken
for the same. What remains are sizes of 1, which are always special: one graph for one node, one for several, and the
same two for several rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers.modeling_outputs import CausalLMOutput

from specdec.errors import UnsupportedError
from specdec.models.compat import TAKES_MASKS, attention_of
from specdec.models.layout import Layout
from specdec.models.outputs import LogitNodes
from specdec.models.store import KvStore

if TYPE_CHECKING:
    from specdec.models.language_model import LanguageModel

MOST_NODES = 64  # longer passes are prompts: their kernels take longer than what surrounds them


class CompiledForward:
    """The compiled forward of one model, shared by its sessions; it compiles when a kind of pass is first met."""

    def __init__(self, language: LanguageModel) -> None:
        _check(language)
        self._language = language
        self._can_keep = "logits_to_keep" in language.input_names
        # Compiled code belongs to a code object: a copy per model keeps one model's graphs out of another's way.
        own = FunctionType(_forward.__code__.replace(), _forward.__globals__, "forward")
        self._run: Callable[..., Tensor] = torch.compile(own, fullgraph=True, options={"guard_filter_fn": _guards})

    def takes(self, layout: Layout) -> bool:
        """Whether a pass is worth compiled code: short, and not the first, which allocates the buffers."""
        return layout.start > 0 and layout.nodes <= MOST_NODES

    def __call__(self, ids: Tensor, layout: Layout, kept: LogitNodes, store: KvStore) -> CausalLMOutput:
        """Logits of the kept nodes `[rows, kept, vocab]`, or of all nodes where the model cannot slice."""
        language, kinds, device = self._language, self._language.capability.kinds, self._language.device
        slots, view = layout.all_slots(), layout.view or layout.causal()
        masks = [_fresh(view.mask(kind, language.dtype), device) for kind in kinds]
        names = [kind.name for kind in kinds] if language.capability.masks == "dict" else None
        nodes = _dynamic(torch.tensor(kept.nodes, device=device)) if self._can_keep else None
        buffers = store.flat(len(layout.maps), _borrowed)
        given = (_dynamic(ids), _fresh(view.positions, device), _fresh(slots, device), masks, names, nodes, buffers)
        try:
            logits = self._run(language.model, *given)
        except FailOnRecompileLimitHit:
            warnings.warn("torch.compile gave up: threads or modes changed too often", RuntimeWarning, stacklevel=2)
            logits = _forward(language.model, *given)
        except TorchDynamoException as error:
            name = type(language.model).__name__
            raise UnsupportedError(f"torch.compile cannot take {name}: leave out `gear`='compiled'") from error
        return CausalLMOutput(logits=logits)


def _forward(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    masks: list[Tensor],
    names: list[str] | None,
    nodes: Tensor | None,
    buffers: list[Tensor],
) -> Tensor:
    """`ids`, `positions`, `slots` `[rows, nodes]`, masks `[rows, 1, nodes, end]`, each layer's keys and values."""
    store = KvStore.around(buffers, slots, masks[0].shape[-1])
    given: dict[str, Any] = {} if nodes is None else {"logits_to_keep": nodes}
    output = model(
        input_ids=ids,
        attention_mask=masks[0] if names is None else dict(zip(names, masks, strict=True)),
        position_ids=positions,
        past_key_values=store,
        use_cache=True,
        return_dict=True,
        **given,
    )
    return output.logits


def _guards(entries: Sequence[Any]) -> list[bool]:
    """Which of the compiler's guards to keep: those on tensors, weights included, but not on every module's attributes.

    They take 0.2 ms of a two-layer model's 0.7 ms.
    """
    others = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)  # type: ignore[no-untyped-call]
    return [other or entry.guard_type == "TENSOR_MATCH" for other, entry in zip(others, entries, strict=True)]


def _dynamic(tensor: Tensor) -> Tensor:
    """Marks all sizes above 1 as changing from pass to pass."""
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            maybe_mark_dynamic(tensor, dim)
    return tensor


def _fresh(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that is nobody's view: guards look at what a view was taken of."""
    return _dynamic(tensor.to(device, copy=True, memory_format=torch.contiguous_format))


def _borrowed(buffer: Tensor) -> Tensor:
    """The same memory as no view, with rows and capacity marked, `[rows, heads, capacity, head width]`."""
    buffer = buffer.detach()
    for dim in (0, 2):
        if buffer.shape[dim] > 1:
            maybe_mark_dynamic(buffer, dim)
    return buffer


def _check(language: LanguageModel) -> None:
    capability, attention = language.capability, attention_of(language.model.config)
    reason = None
    if language.is_offloaded:
        reason = "has weights that are read for each pass"
    elif language.is_encoder_decoder:
        reason = "has an encoder"
    elif capability.store != "kv":
        reason = f"does not run on the store of keys and values ({capability.reason})"
    elif capability.positions != "ids":
        reason = "does not take `position_ids`"
    elif capability.boundary is not None:
        reason = "has rotary scaling that depends on the length"
    elif attention not in TAKES_MASKS:
        reason = f'has attention {attention!r}; attn_implementation="sdpa" would do'
    if reason is not None:
        raise UnsupportedError(f"{type(language.model).__name__} {reason}: leave out `gear`='compiled'")
