"""A draft that is the user's own function from the text to the tokens that may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from operator import index

from specdec.core.budget import Budget
from specdec.core.drafts import Draft, Drafter, Proposer, SequenceView, path_limit
from specdec.core.tree import Tree
from specdec.errors import DraftError, OptionError
from specdec.proposers.chains import chain_per_leaf

Propose = Callable[[list[int], int], Iterable[int]]


class FunctionDraft(Draft):
    """Drafts with a `Drafter`, or with a plain callable `(tokens, k) -> tokens`.

    It returns a list, or a one-dimensional tensor or array; tokens beyond `k` are cut off.
    """

    instant = True

    def __init__(self, draft: Drafter | Propose) -> None:
        refuse_class("draft", draft)
        propose = draft.propose if isinstance(draft, Drafter) else draft
        if not callable(propose):
            raise OptionError.of("draft", "a Drafter or a callable (tokens, k) -> tokens", draft)
        self._propose: Propose = propose
        self._name = getattr(draft, "__name__", type(draft).__name__)

    def __repr__(self) -> str:
        return f"FunctionDraft({self._name})"

    def start(self, vocab_size: int) -> FunctionProposer:
        return FunctionProposer(self._propose, self._name, vocab_size)


class FunctionProposer(Proposer):
    """Calls the user's function once per leaf."""

    def __init__(self, propose: Propose, name: str, vocab_size: int) -> None:
        self._propose, self._name, self._vocab_size = propose, name, vocab_size

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        """One chain per leaf; raises DraftError unless the function returns token ids."""
        return [
            chain_per_leaf(seq, budget, self._name, partial(self._guess, seq, path_limit(seq, budget)))
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _guess(self, seq: SequenceView, limit: int, beyond: list[int]) -> tuple[list[int], list[float]]:
        # The function gets a list of its own, which it may change.
        proposal = self._propose(seq.tokens + beyond, limit) if limit else []
        tokens = token_ids(proposal, limit, self._vocab_size, f"draft {self._name}")
        return tokens, [1.0] * len(tokens)


def token_ids(proposal: object, limit: int, vocab_size: int, name: str) -> list[int]:
    """The first `limit` tokens that the function `name` returned, as ids; raises DraftError for anything else."""
    if hasattr(proposal, "tolist"):
        proposal = proposal.tolist()
    if not isinstance(proposal, Iterable) or isinstance(proposal, str | bytes | dict):
        raise DraftError(f"{name} must return a list of token ids, got {proposal!r}")
    tokens = []
    for token in islice(proposal, limit):  # it may be endless
        try:
            tokens.append(index(token))
        except (TypeError, ValueError, RuntimeError):
            tokens.append(-1)
        if isinstance(token, bool) or not 0 <= tokens[-1] < vocab_size:
            raise DraftError(f"{name} must return token ids from 0 to {vocab_size - 1}, got {token!r} among them")
    return tokens


def refuse_class(name: str, draft: object) -> None:
    """Raises OptionError if the caller's argument `name` is a class, which is callable but returns no tokens."""
    if isinstance(draft, type):
        raise OptionError.of(name, "an instance", f"the class {draft.__name__}", f"pass {draft.__name__}(...)")
