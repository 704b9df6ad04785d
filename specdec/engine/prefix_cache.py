"""Texts that were read before: a prompt that begins like one of them continues from its saved state."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import NamedTuple

from specdec.core.drafts import Draft, SavedState
from specdec.core.rounds import Context
from specdec.options.checks import common_length

LEAST = 16
"""The fewest common positions that are worth a copy."""


class DrafterRef:
    """A weak reference to a drafter, which compares and hashes by identity also once the drafter is gone."""

    def __init__(self, drafter: Draft) -> None:
        self._drafter, self._hash = weakref.ref(drafter), id(drafter)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrafterRef) and self._drafter() is other._drafter()

    @property
    def gone(self) -> bool:
        """Whether the drafter no longer exists."""
        return self._drafter() is None


class PrefixKey(NamedTuple):
    """The text that a saved state covers: its tokens, and the `context` of their keys and values.

    The first `num_embeds_only` positions have no ids; the context covers them. `drafter` is the draft whose state it
    is, None for the target's.
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
        """Whether its drafter no longer exists."""
        return self.drafter is not None and self.drafter.gone

    def common(self, other: PrefixKey) -> int:
        """The length of the common beginning, in positions."""
        if (self.context, self.drafter) != (other.context, other.drafter):
            return 0
        if self.num_embeds_only != other.num_embeds_only:  # one of them ends within the embeddings
            return min(self.num_embeds_only, other.num_embeds_only)
        return self.num_embeds_only + common_length(self.tokens, other.tokens)


class PrefixCache:
    """Saved states of texts whose sequences have left, at most `limit` bytes; the least recently used is dropped first.

    A text replaces those that it continues. `room`: the bytes that running sequences leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.room, self.bytes = limit, limit, 0
        self._entries: OrderedDict[PrefixKey, SavedState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: PrefixKey) -> tuple[SavedState | None, int]:
        """The saved state with the longest common beginning, and its length in positions; (None, 0) below `LEAST`."""
        best = max(self._entries, key=key.common, default=None)
        length = 0 if best is None else key.common(best)
        if best is None or length < LEAST:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], length

    def wants(self, key: PrefixKey) -> bool:
        """Whether no entry covers this text yet, and it is long enough to keep."""
        if key.length < LEAST:
            return False
        covering = next((known for known in self._entries if key.common(known) == key.length), None)
        if covering is not None:
            self._entries.move_to_end(covering)
        return covering is None

    def keep(self, key: PrefixKey, state: SavedState) -> None:
        """Adds a saved state, if it fits, and drops those of texts that it continues and of drafters that are gone."""
        if state.bytes > min(self.limit, self.room):
            return
        for known in [known for known in self._entries if known.common(key) == known.length or known.lost]:
            self._drop(known)
        self._entries[key] = state
        self.bytes += state.bytes
        self.shrink()

    def shrink(self) -> None:
        """Drops the least recently used texts until the others fit."""
        while self._entries and self.bytes > min(self.limit, self.room):
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drops all texts."""
        self._entries.clear()
        self.bytes = 0

    def _drop(self, key: PrefixKey) -> None:
        self.bytes -= self._entries.pop(key).bytes
