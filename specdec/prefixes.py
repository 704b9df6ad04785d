"""Texts that were read before: a prompt that begins like one of them continues from its keys and values."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from specdec.models import Prefix
from specdec.values import common_length

LEAST = 16
"""Tokens that must be in common before copying pays for itself."""


class Text(NamedTuple):
    """What a row has read, as far as it can be compared: `context` stands for embeddings and encoder inputs.

    The first `unseen` positions have no ids and belong to the context.
    """

    tokens: tuple[int, ...]
    context: bytes = b""
    unseen: int = 0

    @property
    def length(self) -> int:
        """Positions."""
        return self.unseen + len(self.tokens)

    def common(self, other: Text) -> int:
        """How many positions, from the beginning, are the same in both."""
        if self.context != other.context:
            return 0
        if self.unseen != other.unseen:  # one of them is read in part
            return min(self.unseen, other.unseen)
        return self.unseen + common_length(self.tokens, other.tokens)


@dataclass(frozen=True, slots=True)
class _Entry:
    prefix: Prefix
    bytes: int


class Prefixes:
    """Keys and values of texts whose rows have left, at most `limit` bytes of them; the least recently used go first.

    A text that goes on takes the place of the one that it continues. `room` are the bytes that running rows leave.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.room, self.bytes = limit, limit, 0
        self._entries: OrderedDict[Text, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, text: Text) -> tuple[Prefix | None, int]:
        """The keys and values that share most with the beginning of `text`, and how many positions that is."""
        best = max(self._entries, key=text.common, default=None)
        length = 0 if best is None else text.common(best)
        if best is None or length < LEAST:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best].prefix, length

    def wants(self, text: Text) -> bool:
        """Whether keeping this text would add something."""
        if text.length < LEAST:
            return False
        covered = next((known for known in self._entries if text.common(known) == text.length), None)
        if covered is not None:
            self._entries.move_to_end(covered)
        return covered is None

    def keep(self, text: Text, prefix: Prefix) -> None:
        """Takes the keys and values of a text; those of texts that it continues go, and others where room is short."""
        size = sum(t.numel() * t.element_size() for layer in prefix for t in layer)
        if size > min(self.limit, self.room):
            return
        for known in [known for known in self._entries if known.common(text) == known.length]:
            self._drop(known)
        self._entries[text] = _Entry(prefix, size)
        self.bytes += size
        self.shrink()

    def shrink(self) -> None:
        """Forgets texts until the others fit."""
        while self._entries and self.bytes > min(self.limit, self.room):
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Forgets all texts."""
        self._entries.clear()
        self.bytes = 0

    def _drop(self, text: Text) -> None:
        self.bytes -= self._entries.pop(text).bytes
