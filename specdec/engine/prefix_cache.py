"""Texts that were read before: a prompt that begins like one of them continues from what was kept of it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import NamedTuple

from specdec.core.drafts import BatchDrafter, SavedState
from specdec.core.rounds import Context
from specdec.options.checks import common_length

LEAST = 16
"""Tokens that must be in common before copying pays for itself."""


class DrafterRef:
    """A draft that has read a text; the same as itself alone, and no longer there once nobody else needs it."""

    def __init__(self, drafter: BatchDrafter) -> None:
        self._drafter, self._hash = weakref.ref(drafter), id(drafter)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrafterRef) and self._drafter() is other._drafter()

    @property
    def gone(self) -> bool:
        """Whether there is no such draft any more."""
        return self._drafter() is None


class PrefixKey(NamedTuple):
    """What a sequence has read, as far as it can be compared: tokens, and the `context` of their keys and values.

    The first `num_embeds_only` positions have no ids and belong to the context. `drafter` is the draft that has read
    it, None where that is the target.
    """

    tokens: tuple[int, ...]
    context: Context
    num_embeds_only: int = 0
    drafter: DrafterRef | None = None

    @property
    def length(self) -> int:
        """Positions."""
        return self.num_embeds_only + len(self.tokens)

    @property
    def lost(self) -> bool:
        """Whether nobody can continue it any more."""
        return self.drafter is not None and self.drafter.gone

    def common(self, other: PrefixKey) -> int:
        """How many positions, from the beginning, are the same in both."""
        if (self.context, self.drafter) != (other.context, other.drafter):
            return 0
        if self.num_embeds_only != other.num_embeds_only:  # one of them is read in part
            return min(self.num_embeds_only, other.num_embeds_only)
        return self.num_embeds_only + common_length(self.tokens, other.tokens)


class PrefixCache:
    """What was read of texts whose sequences have left, at most `limit` bytes of it; the least recently used go first.

    A text that goes on takes the place of the one that it continues. `room` are the bytes that running sequences leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.room, self.bytes = limit, limit, 0
        self._entries: OrderedDict[PrefixKey, SavedState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, text: PrefixKey) -> tuple[SavedState | None, int]:
        """What its reader kept that shares most with the beginning of `text`, and how many positions that is."""
        best = max(self._entries, key=text.common, default=None)
        length = 0 if best is None else text.common(best)
        if best is None or length < LEAST:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], length

    def wants(self, text: PrefixKey) -> bool:
        """Whether keeping this text would add something."""
        if text.length < LEAST:
            return False
        covered = next((known for known in self._entries if text.common(known) == text.length), None)
        if covered is not None:
            self._entries.move_to_end(covered)
        return covered is None

    def keep(self, text: PrefixKey, kept: SavedState) -> None:
        """Takes what was kept of a text; that of texts which it continues goes, and others' where room is short."""
        if kept.bytes > min(self.limit, self.room):
            return
        for known in [known for known in self._entries if known.common(text) == known.length or known.lost]:
            self._drop(known)
        self._entries[text] = kept
        self.bytes += kept.bytes
        self.shrink()

    def shrink(self) -> None:
        """Forgets texts until the others fit."""
        while self._entries and self.bytes > min(self.limit, self.room):
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Forgets all texts."""
        self._entries.clear()
        self.bytes = 0

    def _drop(self, text: PrefixKey) -> None:
        self.bytes -= self._entries.pop(text).bytes
