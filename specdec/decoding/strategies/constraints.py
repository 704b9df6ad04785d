"""The phrases that a text must contain, and its progress with them, as values.

Semantics of transformers 4.49. transformers 5 dropped constrained search (Fast Lexically Constrained Decoding,
arXiv 1804.06609; Guided Generation of Cause and Effect, 2107.09846).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from specdec.errors import OptionError
from specdec.options.fields import is_list, is_whole, plain


class Constraint:
    """One of several phrases must occur; `begun` are the ids of a phrase that the text ends with."""

    def __init__(self, phrases: Sequence[tuple[int, ...]]) -> None:
        following: dict[tuple[int, ...], dict[int, None]] = {}
        for phrase in phrases:
            for i, token in enumerate(phrase):
                following.setdefault(phrase[:i], {})[token] = None
        self._following = {begun: tuple(tokens) for begun, tokens in following.items()}
        self.longest = max(map(len, phrases))
        self.ids = {token for phrase in phrases for token in phrase}

    def advance(self, begun: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The ids that would advance it; none when it is complete."""
        return self._following.get(begun, ())

    def remaining(self, begun: tuple[int, ...]) -> int:
        """How many ids are missing, of the longest phrase; 0 when one is complete."""
        return self.longest - len(begun) if self.advance(begun) else 0


class PhrasalConstraint(Constraint):
    """The text must contain the ids `token_ids` in a row."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = _phrase("token_ids", token_ids)
        super().__init__([self.token_ids])

    def __repr__(self) -> str:
        return f"PhrasalConstraint({list(self.token_ids)})"


class DisjunctiveConstraint(Constraint):
    """The text must contain one of several phrases, `nested_token_ids`.

    Raises OptionError if one phrase begins with another, since the longer one could never be completed.
    """

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        if not is_list(nested_token_ids) or not len(nested_token_ids):
            raise OptionError.of("nested_token_ids", "a list of phrases, each a list of ids", nested_token_ids)
        self.token_ids = tuple(_phrase("nested_token_ids", phrase) for phrase in nested_token_ids)
        for i, phrase in enumerate(self.token_ids):
            if any(other[: len(phrase)] == phrase for j, other in enumerate(self.token_ids) if j != i):
                raise OptionError(
                    f"`nested_token_ids` holds {list(phrase)} and another phrase that begins with it: drop one of them"
                )
        super().__init__(self.token_ids)

    def __repr__(self) -> str:
        return f"DisjunctiveConstraint({[list(phrase) for phrase in self.token_ids]})"


@dataclass(frozen=True)
class ConstraintProgress:
    """A text's constraints: those not begun, the one in progress with its ids `begun`, and how many are complete."""

    pending: tuple[Constraint, ...]
    now: Constraint | None = None
    begun: tuple[int, ...] = ()
    complete: int = 0
    longest: int = 0

    @classmethod
    def of(cls, constraints: Sequence[Constraint]) -> ConstraintProgress:
        """The progress of an empty text."""
        return cls(tuple(constraints), longest=max(constraint.longest for constraint in constraints))

    @property
    def fulfilled(self) -> bool:
        """Whether all are complete."""
        return not self.pending and self.now is None

    @property
    def bank(self) -> int:
        """How many steps the text has made; beams compete with beams of the same number."""
        begun = 0 if self.now is None else self.longest - self.now.remaining(self.begun)
        return self.complete * self.longest + begun

    def advance(self) -> list[int]:
        """The ids that would advance a constraint, in order, with repetitions."""
        if self.now is not None:
            return list(self.now.advance(self.begun))
        return [token for constraint in self.pending for token in constraint.advance()]

    def after(self, tokens: Iterable[int]) -> ConstraintProgress:
        """The progress after `tokens`."""
        return reduce(ConstraintProgress._add, tokens, self)

    def forced(self) -> list[tuple[int, ConstraintProgress]]:
        """Every id that advances a constraint, and the progress after it.

        As in 4.49, where copies of a disjunction in progress share one list of ids: an id that one copy tries is begun
        for the next ones, and all copies that their id does not complete end up with the whole list.
        """
        pairs, shared = [], self
        for token in self.advance():
            pairs.append((token, shared._add(token)))
            if shared.now is not None and token in shared.now.advance(shared.begun):
                shared = replace(shared, begun=(*shared.begun, token))
        if self.now is None:
            return pairs
        return [(token, after if after.now is None else replace(after, begun=shared.begun)) for token, after in pairs]

    def _add(self, token: int) -> ConstraintProgress:
        if self.now is not None:
            if token in self.now.advance(self.begun):
                return self._begun(self.now, (*self.begun, token), self.pending)
            # An id that breaks a phrase does not begin another one.
            return replace(self, pending=(*self.pending, self.now), now=None, begun=())
        for i, constraint in enumerate(self.pending):
            if token in constraint.advance():
                return self._begun(constraint, (token,), self.pending[:i] + self.pending[i + 1 :])
        return self

    def _begun(self, now: Constraint, begun: tuple[int, ...], pending: tuple[Constraint, ...]) -> ConstraintProgress:
        if now.remaining(begun):
            return replace(self, pending=pending, now=now, begun=begun)
        return replace(self, pending=pending, now=None, begun=(), complete=self.complete + 1)


def read_constraints(constraints: Any, force_words_ids: Any) -> list[Constraint]:
    """All constraints of a call, objects first; raises OptionError for anything else."""
    objects = [] if constraints is None else constraints
    if not is_list(objects) or not all(isinstance(item, Constraint) for item in objects):
        expected = "a list of specdec.PhrasalConstraint and specdec.DisjunctiveConstraint"
        raise OptionError.of("constraints", expected, constraints)
    words = [] if force_words_ids is None else force_words_ids
    if not is_list(words):
        raise OptionError.of("force_words_ids", "a list of phrases, or of lists of phrases", force_words_ids)
    if any(value is not None and not len(value) for value in (constraints, force_words_ids)):
        name = "constraints" if constraints is not None and not len(constraints) else "force_words_ids"
        raise OptionError(f"`{name}` is empty: pass at least one phrase, or leave it out")
    return [*objects, *map(_word, words)]


def _word(ids: Any) -> Constraint:
    try:
        nested = is_list(ids) and len(ids) > 0 and is_list(ids[0])
        return DisjunctiveConstraint(ids) if nested else PhrasalConstraint(ids)
    except OptionError as error:
        raise OptionError(f"`force_words_ids` holds {ids!r}: {error}") from None


def _phrase(name: str, ids: Any) -> tuple[int, ...]:
    ids = plain(ids)
    if not is_list(ids) or not len(ids) or not all(is_whole(item) and item >= 0 for item in ids):
        raise OptionError.of(name, "phrases: lists of at least one id", ids)
    return tuple(map(int, ids))
