"""A draft that is the target in 4 bits, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

from specdec.core.budget import Budget
from specdec.core.drafts import SequenceView, refuse_argument
from specdec.core.tree import Tree
from specdec.errors import UnsupportedError
from specdec.models import LanguageModel, Session, quantized
from specdec.proposers.growth import CachedText
from specdec.proposers.model import ModelDraft, ModelProposer


class QuantizedDraft(ModelDraft):
    """Drafts with a copy of the target in 4 bits (self-speculation: QuantSpec, arXiv 2502.10424, section 4).

    The copy reads no text: it attends to the target's keys and values. What it writes behind them for its guesses, the
    target's pass over the guesses writes again. It guesses behind texts, not behind branches of a search.

    Raises UnsupportedError for a target whose weights are rounded or not on a CPU, or whose cache has another form than
    keys and values.
    """

    is_cached = False

    def __init__(self, target: LanguageModel) -> None:
        capability = target.capability
        depends = capability.boundary is not None or capability.cache_reset_length is not None
        if capability.cache_kind != "kv" or depends:
            raise UnsupportedError(
                f"the keys and values of {type(target.model).__name__} depend on the text's length, or are none: "
                "draft='quantized' is not for it, name another draft"
            )
        super().__init__(_copy(target), source="quantized")

    def __repr__(self) -> str:
        return "QuantizedDraft()"

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> QuantizedDraft:
        refuse_argument(argument, name)
        return cls(target)

    @property
    def kind(self) -> str:
        return self.source

    def start(self, vocab_size: int) -> QuantizedProposer:
        return QuantizedProposer(self.model, vocab_size, self.source)


class QuantizedProposer(ModelProposer):
    """Guesses behind the texts in the target's cache, and leaves the cache as it was."""

    def share(self, target: Session) -> None:
        self._session = self._model.session(over=target)

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        rows = [_row(seq) for seq in seqs]
        lengths = [self._session.length(row) for row in rows]
        try:
            return super().propose(seqs, budgets)
        finally:
            self._session.truncate(rows, lengths)

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        return ()

    def unread(self, seq: SequenceView) -> int:
        length: int = seq.length  # type: ignore[attr-defined]
        return length - self._session.length(_row(seq))

    def bound(self, rows: int, columns: int) -> None:
        """Nothing: the engine bounds the target's cache."""

    @contextmanager
    def _kept_whole(self) -> Iterator[None]:
        yield

    def _can_read(self, seq: SequenceView) -> bool:
        return True

    def _row(self, seq: SequenceView) -> CachedText:
        return CachedText(_row(seq), seq, seq.tokens, len(seq.tokens) - self.unread(seq))

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        """No branches of a search: the target's cache holds them in an order of its own."""
        return 0 if seq.tree.tokens else super()._limit(seq, budget)


def _row(seq: SequenceView) -> int:
    """The sequence's row in the target's cache, which the engine's sequences have."""
    row: int = seq.cache_row  # type: ignore[attr-defined]
    return row


def _copy(target: LanguageModel) -> LanguageModel:
    """The target in 4 bits; of a caller's model, made anew with every change."""
    began = perf_counter()
    model = LanguageModel(quantized(target.model), owned=True, capability=target.capability)
    model.loading_seconds = perf_counter() - began
    model.recut = None if target.is_owned else partial(_copy, target)
    return model
