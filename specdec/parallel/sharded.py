"""Tensor parallelism by transformers' plans: rank 0's view of models whose weights are split over processes.

Every process runs the same passes over its part of the weights, and keeps its part of the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.errors import EngineError, UnsupportedError
from specdec.models.exactness import Exactness
from specdec.models.language_model import LanguageModel
from specdec.models.protocols import Prefix, Session
from specdec.parallel.ranks import Ranks, Shared

_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # names of the modules that make keys


class ShardedModel(Shared, LanguageModel):
    """A model of which every process has a part; rank 0's (`lead`) runs every call in all processes.

    Its backend is "eager".
    """

    is_sharded = True
    ranks: Ranks | None = None

    def lead(self, ranks: Ranks, number: int) -> ShardedModel:
        """Makes this part rank 0's view of what all processes have under `number`."""
        self.ranks, self.number = ranks, number
        ranks.drop_with(self, number)

        def check(*_: Any) -> None:
            if not ranks.in_command:
                raise EngineError(
                    "this model is shared by several processes, and a pass in one of them waits for the others for "
                    "ever: use it through SpecGenerator"
                )

        self.model.register_forward_pre_hook(check)
        return self

    @property
    def kv_bytes(self) -> int:
        """Bytes of one position's keys and values in this process."""
        whole, size = super().kv_bytes, getattr(self.model, "_tp_size", None) or 1
        plan: Mapping[str, str] = getattr(self.model, "_tp_plan", None) or {}
        split = any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items())
        return whole // size if split else whole

    def _find_exactness(self) -> Exactness:
        """As for eager layers: processes add partial sums in one order, independent of the batch."""
        return "exact" if self.dtype in (torch.float32, torch.float64) else "rounding"

    @property
    def input_embeddings(self) -> Any:
        """On rank 0 a whole copy, for drafts, which run there alone."""
        return self._whole_embeddings if self.ranks is not None else super().input_embeddings

    @property
    def output_embeddings(self) -> Any:
        return self._whole_head if self.ranks is not None else super().output_embeddings

    def session(self) -> Session:
        if self.ranks is None:
            return super().session()
        return LedSession(self.ranks, *self.ranks.make(LanguageModel.session, self))

    def early_exit(self, layers: int) -> LanguageModel:
        if self.ranks is None:
            return super().early_exit(layers)
        number, small = self.ranks.load(LanguageModel.early_exit, self, layers)
        assert isinstance(small, ShardedModel)
        return small.lead(self.ranks, number)

    def check_attentions(self, *, drafted: bool = False, branched: bool = False) -> None:
        """Raises UnsupportedError: each process has the attentions of some heads alone."""
        raise UnsupportedError("`output_attentions` are split over the processes of `tp_plan`: leave one of them out")

    @cached_property
    def _whole_embeddings(self) -> nn.Embedding:
        assert self.ranks is not None
        weight = self.ranks.do(_whole, self, "get_input_embeddings", "weight")
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)

    @cached_property
    def _whole_head(self) -> nn.Linear:
        assert self.ranks is not None
        weight, bias = (self.ranks.do(_whole, self, "get_output_embeddings", name) for name in ("weight", "bias"))
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
        return head


def _whole(language: LanguageModel, module: str, name: str) -> Tensor | None:
    weight: Any = getattr(getattr(language.model, module)(), name, None)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


class LedPrefix(Shared, Prefix):
    """Rank 0's part of a prefix's keys and values."""

    def __init__(self, ranks: Ranks, number: int, own: Prefix) -> None:
        super().__init__(own)
        self.number = number
        ranks.drop_with(self, number)


def _noted(name: str) -> Callable[..., Any]:
    """A method without a pass, which every process runs on its own part."""

    def call(led: LedSession, *arguments: Any, **options: Any) -> Any:
        return led._ranks.note(getattr(type(led.own), name), led, *arguments, **options)

    return call


class LedSession(Shared, Session):
    """A session of which every process has a part: changes go to all, and questions to rank 0's part."""

    def __init__(self, ranks: Ranks, number: int, own: Session) -> None:
        self._ranks, self.number, self.own = ranks, number, own
        self.cache_reset_length, self.keeps_prefixes = own.cache_reset_length, own.keeps_prefixes
        ranks.drop_with(self, number)

    def keep_prefix(self, row: int, length: int) -> Prefix:
        return LedPrefix(self._ranks, *self._ranks.make(type(self.own).keep_prefix, self, row, length))

    def length(self, row: int) -> int:
        return self.own.length(row)

    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        bare = [replace(work, tree=Tree(work.tree.tokens, work.tree.parents), proposal=EMPTY) for work in works]
        found = self._ranks.do(type(self.own).run, self, bare, hidden=hidden, attentions=attentions)
        return [replace(out, work=work) for out, work in zip(found, works, strict=True)]

    add, fork, read_from, refresh = _noted("add"), _noted("fork"), _noted("read_from"), _noted("refresh")
    bound, remove, truncate, commit = _noted("bound"), _noted("remove"), _noted("truncate"), _noted("commit")
