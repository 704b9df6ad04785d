"""Texts by their beginnings: `PrefixIndex` finds the one that begins like a prompt, `PrefixCache` keeps
finished ones.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Generic, TypeVar

from specdec.core.drafts import BatchDrafter, SavedState
from specdec.core.rounds import Context
from specdec.options.checks import common_length

LEAST = 16
"""The fewest common positions that are worth a copy."""

_SIZE = array("i").itemsize

Owner = TypeVar("Owner", bound=Hashable)


class PrefixIndex(Generic[Owner]):
    """Owners of texts, one text each, in the order of the texts: a prompt's place is beside the text most like it.

    A look-up is a binary search, whose comparisons are of memory. Texts of different keys have nothing in common.
    """

    def __init__(self) -> None:
        self._texts: dict[Hashable, list[tuple[bytes, int, Owner]]] = {}  # sorted; of equal ones, the latest first
        self._keys: dict[Owner, Hashable] = {}
        self._entries: dict[Owner, tuple[bytes, int, Owner]] = {}
        self._numbers = count(0, -1)

    def find(self, key: Hashable, ids: Sequence[int]) -> tuple[Owner | None, int]:
        """The owner of the text with the longest common beginning, and its length; (None, 0) if nothing is common."""
        texts, wanted = self._texts.get(key, []), array("i", ids).tobytes()
        at = bisect_left(texts, (wanted,))
        best, longest = None, 0
        for text, _, owner in texts[max(at - 1, 0) : at + 1]:
            if (length := common_length(text, wanted) // _SIZE) > longest:
                best, longest = owner, length
        return best, longest

    def put(self, owner: Owner, key: Hashable, ids: Sequence[int], length: int) -> None:
        """Makes the first `length` ids the owner's text, once it is new or grows by `LEAST`; with key None, nothing."""
        known = self._entries.get(owner)
        if key is None or (known is not None and length * _SIZE < len(known[0]) + LEAST * _SIZE):
            return
        self.drop(owner)
        entry = array("i", ids[:length]).tobytes(), next(self._numbers), owner
        self._keys[owner], self._entries[owner] = key, entry
        insort(self._texts.setdefault(key, []), entry)

    def drop(self, owner: Owner) -> None:
        """Forgets an owner, if it has a text."""
        if owner in self._entries:
            texts = self._texts[key := self._keys.pop(owner)]
            del texts[bisect_left(texts, self._entries.pop(owner))]
            if not texts:
                del self._texts[key]


class PrefixCache:
    """Saved states of texts whose sequences have left, at most `limit` bytes; the least recently used is dropped first.

    The target's states (`drafter` None) and those of each drafter lie apart. `room`: the bytes that running sequences
    leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.room, self.bytes = limit, limit, 0
        self._index = PrefixIndex[SavedState]()
        self._states: OrderedDict[SavedState, int | None] = OrderedDict()  # with the ids of their drafters
        self._drafters: dict[int, weakref.ref[BatchDrafter]] = {}

    def find(
        self, context: Context | None, ids: Sequence[int], drafter: BatchDrafter | None = None
    ) -> tuple[SavedState | None, int]:
        """The saved state with the longest common beginning, and its length in positions; (None, 0) below `LEAST`."""
        found, length = self._index.find((context, self._id(drafter)), ids)
        if found is None or length < LEAST:
            return None, 0
        self._states.move_to_end(found)
        return found, length

    def wants(self, context: Context, ids: Sequence[int], drafter: BatchDrafter | None = None) -> bool:
        """Whether a text is long enough to keep, and no state covers it."""
        return len(ids) >= LEAST and self.find(context, ids, drafter)[1] < len(ids)

    def keep(
        self, context: Context, ids: Sequence[int], state: SavedState, drafter: BatchDrafter | None = None
    ) -> None:
        """Adds the state of a wanted text, if it fits; it replaces that of a text which this one continues."""
        if state.bytes > min(self.limit, self.room):
            return
        known, length = self.find(context, ids, drafter)
        if known is not None and known.length == length:
            self._drop(known)
        self._states[state] = self._id(drafter)
        self._index.put(state, (context, self._id(drafter)), ids, len(ids))
        self.bytes += state.bytes
        self.shrink()

    def shrink(self) -> None:
        """Drops the least recently used states until the others fit."""
        while self._states and self.bytes > min(self.limit, self.room):
            self._drop(next(iter(self._states)))

    def clear(self) -> None:
        """Drops all states."""
        for state in [*self._states]:
            self._drop(state)

    def _drop(self, state: SavedState) -> None:
        self._index.drop(state)
        del self._states[state]
        self.bytes -= state.bytes

    def _id(self, drafter: BatchDrafter | None) -> int | None:
        """The drafter's id, which may have been that of one that is gone: their states are dropped here."""
        for gone in [number for number, ref in self._drafters.items() if ref() is None]:
            del self._drafters[gone]
            for state in [state for state, number in self._states.items() if number == gone]:
                self._drop(state)
        if drafter is None:
            return None
        self._drafters[id(drafter)] = weakref.ref(drafter)
        return id(drafter)
