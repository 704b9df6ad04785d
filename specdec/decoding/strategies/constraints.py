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
    """One of several phrases must occur; `prefix`: the ids of a phrase with which the text ends."""

    def __init__(self, phrases: Sequence[tuple[int, ...]]) -> None:
        following: dict[tuple[int, ...], dict[int, None]] = {}
        for phrase in phrases:
            for i, token in enumerate(phrase):
                following.setdefault(phrase[:i], {})[token] = None
        self._following = {prefix: tuple(tokens) for prefix, tokens in following.items()}
        self.longest = max(map(len, phrases))
        self.ids = {token for phrase in phrases for token in phrase}

    def advance(self, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The ids that continue a phrase after `prefix`; none if a phrase is complete."""
        return self._following.get(prefix, ())

    def remaining(self, prefix: tuple[int, ...]) -> int:
        """How many ids of the longest phrase are missing; 0 if a phrase is complete."""
        return self.longest - len(prefix) if self.advance(prefix) else 0


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
    """A text's constraints: the `pending` ones, the `active` one with its ids `prefix`, and how many are complete."""

    pending: tuple[Constraint, ...]
    active: Constraint | None = None
    prefix: tuple[int, ...] = ()
    num_complete: int = 0
    longest: int = 0

    @classmethod
    def of(cls, constraints: Sequence[Constraint]) -> ConstraintProgress:
        """The progress of an empty text."""
        return cls(tuple(constraints), longest=max(constraint.longest for constraint in constraints))

    @property
    def fulfilled(self) -> bool:
        """Whether all constraints are complete."""
        return not self.pending and self.active is None

    @property
    def bank(self) -> int:
        """How many steps the text has made; beams compete with beams of the same number."""
        steps = 0 if self.active is None else self.longest - self.active.remaining(self.prefix)
        return self.num_complete * self.longest + steps

    def advance(self) -> list[int]:
        """The ids that would advance a constraint, in order, with repetitions."""
        if self.active is not None:
            return list(self.active.advance(self.prefix))
        return [token for constraint in self.pending for token in constraint.advance()]

    def after(self, tokens: Iterable[int]) -> ConstraintProgress:
        """The progress after `tokens`."""
        return reduce(ConstraintProgress._add, tokens, self)

    def forced(self) -> list[tuple[int, ConstraintProgress]]:
        """Every id that advances a constraint, and the progress after it.

        In transformers 4.49 copies of a disjunction in progress share one list of ids: an id that one copy tries is in
        the list of the next copies, and every copy that its id does not complete ends up with the whole list.
        """
        pairs, shared = [], self
        for token in self.advance():
            pairs.append((token, shared._add(token)))
            if shared.active is not None and token in shared.active.advance(shared.prefix):
                shared = replace(shared, prefix=(*shared.prefix, token))
        if self.active is None:
            return pairs
        return [(token, end if end.active is None else replace(end, prefix=shared.prefix)) for token, end in pairs]

    def _add(self, token: int) -> ConstraintProgress:
        if self.active is not None:
            if token in self.active.advance(self.prefix):
                return self._with(self.active, (*self.prefix, token), self.pending)
            # An id that breaks a phrase does not begin another one.
            return replace(self, pending=(*self.pending, self.active), active=None, prefix=())
        for i, constraint in enumerate(self.pending):
            if token in constraint.advance():
                return self._with(constraint, (token,), self.pending[:i] + self.pending[i + 1 :])
        return self

    def _with(self, active: Constraint, prefix: tuple[int, ...], pending: tuple[Constraint, ...]) -> ConstraintProgress:
        if active.remaining(prefix):
            return replace(self, pending=pending, active=active, prefix=prefix)
        return replace(self, pending=pending, active=None, prefix=(), num_complete=self.num_complete + 1)


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
