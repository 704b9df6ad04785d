"""Drafts that are made of the target and guess over its keys and values: its first layers, and a copy in 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from specdec.core.budget import Budget
from specdec.core.drafts import Proposer
from specdec.core.tree import Tree
from specdec.errors import OptionError, UnsupportedError
from specdec.models import LanguageModel, Session, quantized
from specdec.proposers.growth import CachedText
from specdec.proposers.model import GrowingProposer, ModelDraft


class SelfDraft(ModelDraft):
    """Drafts with a model made of the target, which has the keys and values of the target's first layers.

    It reads no text: it attends to the target's keys and values. What it writes behind them for its guesses, the
    target's pass over the guesses writes again.
    """

    is_cached = False

    def start(self, vocab_size: int) -> Proposer:
        return super().start(vocab_size) if self.is_cached else SelfProposer(self, vocab_size)


class SelfProposer(GrowingProposer):
    """Guesses behind the texts and branches in the target's cache, and leaves the cache as it was."""

    def share(self, target: Session) -> None:
        self._session = self._model.session(over=target)

    def propose(self, seqs: Sequence[Any], budgets: Sequence[Budget]) -> list[Tree]:
        rows = [seq.cache_row for seq in seqs]
        lengths = [self._session.length(row) for row in rows]
        try:
            return self._trees(seqs, self._readers(seqs, budgets))
        finally:
            paths = [list(range(seq.num_cached)) for seq in seqs]
            self._session.commit(rows, paths, num_texts=[0] * len(rows))
            self._session.truncate(rows, lengths)

    def _row(self, seq: Any) -> CachedText:
        """The target's row; leaves that it holds are fed again, for their logits."""
        num_text, nodes = self._session.length(seq.cache_row) - seq.num_embeds_only, range(seq.num_cached)
        branch_of = {node: node for node in nodes if node not in seq.leaves}
        return CachedText(seq.cache_row, seq, seq.tokens, num_text, branches=seq.tree.part(nodes), branch_of=branch_of)


class EarlyExitDraft(SelfDraft):
    """Drafts with the target's first `layers` layers and its own head (LayerSkip, arXiv 2404.16710, section 3.3).

    Where the target's cache holds more than keys and values, they read texts into a cache of their own.
    """

    def __init__(self, target: LanguageModel, layers: int) -> None:
        model = target.early_exit(layers)
        super().__init__(model, source=f"early_exit:{layers}", shared_encoder=target.is_encoder_decoder)
        self.layers, self.is_cached = layers, not target.capability.cache_kind == model.capability.cache_kind == "kv"

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> EarlyExitDraft:
        """The draft `early_exit:N`; raises OptionError, naming the caller's argument `name`, for any other N."""
        layers = int(argument or 0)
        if not 1 <= layers < target.num_layers:
            least = f"early_exit:N with N of the target's {target.num_layers} layers, at least 1 and not all"
            raise OptionError.of(name, least, f"early_exit:{argument}")
        return cls(target, layers)

    def __repr__(self) -> str:
        return f"EarlyExitDraft({self.layers})"


class QuantizedDraft(SelfDraft):
    """Drafts with a copy of the target in 4 bits (self-speculation: QuantSpec, arXiv 2502.10424, section 4).

    Raises UnsupportedError for a target with fewer than 8 bits or not on a CPU, or whose cache holds more than keys and
    values.
    """

    def __init__(self, target: LanguageModel) -> None:
        if target.capability.cache_kind != "kv":
            raise UnsupportedError(
                f"{type(target.model).__name__} does not run on buffers of keys and values "
                f"({target.capability.reason}): draft='quantized' is not for it, name another draft"
            )
        super().__init__(_copy(target), source="quantized", shared_encoder=target.is_encoder_decoder)

    def __repr__(self) -> str:
        return "QuantizedDraft()"

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> QuantizedDraft:
        return cls(target)


def _copy(target: LanguageModel) -> LanguageModel:
    """The target in 4 bits; of a caller's model, made anew with every change."""
    began = perf_counter()
    model = LanguageModel(quantized(target.model), owned=True, capability=target.capability)
    model.loading_seconds = perf_counter() - began
    model.recut = None if target.is_owned else partial(_copy, target)
    return model
