"""What drafts of a model share, whether they guess chains or trees: a place in the model's cache for every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from specdec.models import add_rows
from specdec.types import EMPTY, Call, Plan, Row, Tree

if TYPE_CHECKING:
    from specdec.models import Encoding, LanguageModel, Session

PREFILL_CHUNK = 2048

H = TypeVar("H")


class CachedSession(ABC, Generic[H]):
    """A draft model at work on the rows of one call; `H` is what is known of a row's part of its cache."""

    def __init__(self, model: LanguageModel, call: Call, source: str, encoding: object | None = None) -> None:
        self._model, self._call, self._source = model, call, source
        self._max_positions: int | None = getattr(model, "max_positions", None)
        self._encoding = encoding
        self._session: Session | None = None
        self._slots: dict[int, int] = {}
        self._held: list[H] = []

    @abstractmethod
    def _draft(self, rows: Sequence[Row], plans: Sequence[Plan], limits: Sequence[int]) -> list[Tree]:
        """The proposals of rows that have a place in the cache; none where the limit is 0."""

    @abstractmethod
    def _new_held(self, tokens: list[int]) -> H:
        """What is known of a row of which the cache holds `tokens`."""

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One proposal per row, from one pass per level over all rows that still go on."""
        limits = [self._limit(row, plan) for row, plan in zip(rows, plans, strict=True)]
        if not any(limits):
            return [EMPTY] * len(limits)
        try:
            self._admit([row for row, limit in zip(rows, limits, strict=True) if limit])
            return self._draft(rows, plans, limits)
        except BaseException:
            # The cache may hold half a round: forget it, the next call reads the text again.
            self._forget()
            raise

    def release(self, keys: Sequence[int]) -> None:
        """Frees the cache of finished rows."""
        gone = set(keys)
        kept = [key for key in self._slots if key not in gone]
        if len(kept) == len(self._slots):
            return
        if not kept or self._session is None:
            return self._forget()
        slots = [self._slots[key] for key in kept]
        try:
            self._session.select(slots)
        except BaseException:
            self._forget()
            raise
        self._held = [self._held[slot] for slot in slots]
        self._slots = {key: slot for slot, key in enumerate(kept)}

    def _limit(self, row: Row, plan: Plan) -> int:
        """The most nodes worth drafting: the target adds one token itself, and the draft has only so many positions."""
        if plan.limit <= 0 or not row.tokens:
            return 0
        limit = min(plan.limit, row.remaining - 1)
        if self._max_positions is not None:
            beyond = row.tree.depth  # of a search, whose leaves are that far from its text
            limit = min(limit, self._max_positions - len(row.tokens) - beyond + 1)
        return limit if limit > 0 and plan.go_on([[]]) else 0

    def _goes_on(self, token: int) -> bool:
        """Whether a guess may follow `token`: no text ends with it, and the draft can read what processors forced."""
        return token < self._model.vocab_size and token not in self._call.ends

    def _admit(self, rows: Sequence[Row]) -> None:
        """Gives a place in the cache to rows that have none; a text that several begin with is read once."""
        new = [row for row in rows if row.key not in self._slots]
        if not new:
            return
        if self._session is None:
            self._session = self._model.session()
        first = len(self._held)
        texts = [row.tokens if max(row.tokens) < self._model.vocab_size else [] for row in new]
        sources = [row.key if self._call.sources is None else self._call.sources[row.key] for row in new]
        add_rows(self._session, texts, sources, self._encoded(), PREFILL_CHUNK)
        for row, length in zip(new, self._session.lengths[first:], strict=True):
            self._slots[row.key] = len(self._held)
            self._held.append(self._new_held(row.tokens[:length]))

    def _encoded(self) -> Encoding | None:
        """The encoder's reading of all sources."""
        if not self._model.is_encoder_decoder:
            return None
        if self._encoding is None:
            assert self._call.draft_inputs is not None
            self._encoding = self._model.encode(self._call.draft_inputs)
        return self._encoding  # type: ignore[return-value]

    def _forget(self) -> None:
        self._session = None
        self._slots, self._held = {}, []
