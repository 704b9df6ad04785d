"""What sequences can continue: `PrefixIndex` finds the text most like a prompt, `PrefixCache` keeps finished texts."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from specdec.core.drafts import Draft, SavedState
from specdec.core.sequence import Context, RunningSequence
from specdec.core.tree import common_length

LEAST = 16
"""The fewest common positions that are worth a copy."""

_SIZE = array("i").itemsize

Owner = TypeVar("Owner", bound=Hashable)
Key = tuple[Context | None, tuple[int, ...]]
"""What a saved state depends on besides the tokens, and whose it is: a draft's id and its models' epochs; (): the
target's."""


class PrefixIndex(Generic[Owner]):
    """Owners of texts, one text each, in the order of the texts: a prompt's place is beside the text most like it.

    A look-up is a binary search. Texts are bytes, which compare fast. Texts of different keys share nothing.
    """

    def __init__(self) -> None:
        self._texts: dict[Hashable, list[tuple[bytes, int, Owner]]] = {}  # sorted; of equal ones, the latest first
        self._places: dict[Owner, tuple[Hashable, tuple[bytes, int, Owner]]] = {}
        self._numbers = count(0, -1)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._places

    def find(self, key: Hashable, ids: Sequence[int]) -> tuple[Owner | None, int]:
        """The owner of the text with the longest common beginning, and its length; (None, 0) if nothing is common."""
        texts, prompt = self._texts.get(key, []), array("i", ids).tobytes()
        at = bisect_left(texts, (prompt,))
        best, longest = None, 0
        for text, _, owner in texts[max(at - 1, 0) : at + 1]:
            if (length := common_length(text, prompt) // _SIZE) > longest:
                best, longest = owner, length
        return best, longest

    def put(self, owner: Owner, key: Hashable, ids: Sequence[int]) -> None:
        """Makes `ids` the owner's text; with key None, which nobody shares, nothing happens."""
        self.drop(owner)
        if key is not None:
            entry = array("i", ids).tobytes(), next(self._numbers), owner
            self._places[owner] = key, entry
            insort(self._texts.setdefault(key, []), entry)

    def drop(self, owner: Owner) -> None:
        """Forgets an owner, if it has a text."""
        if owner in self._places:
            key, entry = self._places.pop(owner)
            del self._texts[key][bisect_left(self._texts[key], entry)]
            if not self._texts[key]:
                del self._texts[key]


class SharedTexts:
    """The texts that rows of one cache hold, or will hold once these are read, for other sequences to continue.

    The cache is the target's or a draft's. Sequences with an equal `sharing_key` share; with None: with nobody.
    """

    def __init__(self) -> None:
        self._begun: set[RunningSequence] = set()
        self._read = PrefixIndex[RunningSequence]()
        self._reading = PrefixIndex[RunningSequence]()

    def __contains__(self, seq: RunningSequence) -> bool:
        return seq in self._begun

    def is_reading(self, seq: RunningSequence) -> bool:
        """Whether others may wait for what the sequence reads."""
        return seq in self._reading

    def begin(self, seq: RunningSequence, ids: Sequence[int]) -> None:
        """A row begins to read `ids`."""
        self._begun.add(seq)
        self._reading.put(seq, seq.sharing_key, ids)

    def hold(self, seq: RunningSequence, ids: Sequence[int], *, done: bool) -> None:
        """A row has read `ids`; `done`: nobody waits for more."""
        self._read.put(seq, seq.sharing_key, ids)
        if done:
            self._reading.drop(seq)

    def drop(self, seq: RunningSequence) -> None:
        """Nobody continues the sequence's text any longer."""
        self._begun.discard(seq)
        self._read.drop(seq)
        self._reading.drop(seq)

    def read_by_others(self, seq: RunningSequence, ids: Sequence[int]) -> tuple[RunningSequence | None, int]:
        """The sequence whose read text begins most like `ids`, and how many tokens they share, later ones included."""
        other, length = self._read.find(seq.sharing_key, ids)
        if other is not None:
            length += common_length(ids[length:], other.text_ids[length:])  # what the other has written since
        return other, length

    def being_read(self, seq: RunningSequence, ids: Sequence[int]) -> tuple[RunningSequence | None, int]:
        """`read_by_others` for texts that are being read."""
        return self._reading.find(seq.sharing_key, ids)


class PrefixCache:
    """Saved states of texts whose sequences have left, at most `limit` bytes; the least recently used is dropped first.

    `room`: the bytes that running sequences leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.room, self.bytes = limit, limit, 0
        self._index = PrefixIndex[SavedState]()
        self._states: OrderedDict[SavedState, Key] = OrderedDict()
        self._drafts: WeakValueDictionary[int, Draft] = WeakValueDictionary()

    def key_of(self, draft: Draft, context: Context | None) -> Key:
        """The key of a draft's own states; the target's states have the key `(context, ())`."""
        if id(draft) not in self._drafts:  # it may have the id of one that is gone
            self._drop(*[state for state, (_, owner) in self._states.items() if owner and owner[0] not in self._drafts])
            self._drafts[id(draft)] = draft
        return context, (id(draft), *(model.epoch for model in draft.models))

    def find(self, key: Key, ids: Sequence[int]) -> tuple[SavedState | None, int]:
        """The saved state with the longest common beginning, and its length in positions; (None, 0) below `LEAST`."""
        state, length = self._index.find(key, ids)
        if state is None or length < LEAST:
            return None, 0
        self._states.move_to_end(state)
        return state, length

    def wants(self, key: Key, ids: Sequence[int]) -> bool:
        """Whether a text is long enough to keep, and no state covers it."""
        return len(ids) >= LEAST and self.find(key, ids)[1] < len(ids)

    def keep(self, key: Key, ids: Sequence[int], state: SavedState) -> None:
        """Adds the state of a wanted text, if it fits, in place of the state of a text which it continues."""
        if state.bytes > min(self.limit, self.room):
            return
        shorter, length = self.find(key, ids)
        if shorter is not None and shorter.length == length:
            self._drop(shorter)
        self._states[state] = key
        self._index.put(state, key, ids)
        self.bytes += state.bytes
        self.shrink()

    def shrink(self) -> None:
        """Drops the least recently used states until the others fit."""
        while self._states and self.bytes > min(self.limit, self.room):
            self._drop(next(iter(self._states)))

    def clear(self) -> None:
        """Drops all states."""
        self._drop(*self._states)

    def _drop(self, *states: SavedState) -> None:
        for state in states:
            self._index.drop(state)
            del self._states[state]
            self.bytes -= state.bytes
