"""A draft with another vocabulary that guesses only shared tokens, with q over the target's ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from specdec.core.drafts import Draft, DraftTask, Plan, Sampler, SequenceView
from specdec.core.tree import Tree
from specdec.errors import VocabularyError
from specdec.proposers.other_tokenizer.base import (
    DraftSequence,
    OtherTokenizerDraft,
    OtherTokenizerProposer,
    Tokenizer,
    decode,
    encode,
)

_UNSHARED = 2**40
"""Added to target tokens that the draft lacks, which makes ids that no draft can read."""


class VocabularyIntersection(OtherTokenizerDraft):
    """Drafts with the shared tokens of both vocabularies (token-level intersection, arXiv 2502.05202, algorithm 4).

    Shared tokens have equal strings, whichever sign stands for a leading space, and are special in both or in neither.
    Raises VocabularyError if there are none.
    """

    def __init__(self, drafter: Draft, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        super().__init__(drafter, target_tokenizer, draft_tokenizer)
        self.to_draft = shared_tokens(target_tokenizer, draft_tokenizer)
        if not self.to_draft:
            raise VocabularyError("target and draft tokenizers have no token in common: use match verification")

    def __repr__(self) -> str:
        return f"VocabularyIntersection({self.drafter!r}, {len(self.to_draft)} tokens)"

    def start(self, vocab_size: int) -> IntersectionProposer:
        """A proposer without sequences; rules get logits over the target's vocabulary."""
        to_draft = {t: d for t, d in self.to_draft.items() if t < vocab_size}
        return IntersectionProposer(self, to_draft, vocab_size)


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Target id -> draft id of every shared token."""
    theirs = _by_meaning(draft)
    return {ours: theirs[meaning] for meaning, ours in _by_meaning(target).items() if meaning in theirs}


def _by_meaning(tokenizer: Tokenizer) -> dict[tuple[str, bool], int]:
    """(string with a plain leading space, special or not) -> id."""
    special = set(tokenizer.all_special_tokens)
    sign = _space_sign(tokenizer)
    return {
        (" " + token[len(sign) :] if sign and token.startswith(sign) else token, token in special): token_id
        for token, token_id in tokenizer.get_vocab().items()
    }


def _space_sign(tokenizer: Tokenizer) -> str:
    """The tokenizer's sign for a leading space: `Ġ`, `▁`, a space or none."""
    ids = encode(tokenizer, " ")
    token: str = tokenizer.convert_ids_to_tokens(ids[:1])[0] if ids else ""
    return token[0] if token and token[0] in "Ġ▁ " else ""


@dataclass(frozen=True)
class _MappedSampler(Sampler):
    """Lets the strategy's rule pick in the target's vocabulary, and returns the draft's id."""

    sampler: Sampler
    proposer: IntersectionProposer

    @property
    def needs_q(self) -> bool:
        return self.sampler.needs_q

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """The rule's pick from the draft's `logits` over the target's ids; tokens that are not shared have -inf."""
        assert isinstance(seq, DraftSequence)
        assert seq.outer is not None
        guessed, wide = self.proposer.in_target(guesses), self.proposer.widened(logits)
        token, confidence, q = self.sampler.pick(seq.outer, guessed, wide, confident=confident)
        return self.proposer.to_draft.get(token, _UNSHARED + token), confidence, q


class IntersectionProposer(OtherTokenizerProposer):
    """Maps texts, guesses and logits through the shared tokens `to_draft`."""

    def __init__(self, drafter: VocabularyIntersection, to_draft: dict[int, int], vocab_size: int) -> None:
        super().__init__(drafter, max(to_draft.values(), default=0) + 1, vocab_size)
        self.to_draft = to_draft
        self._to_target = {d: t for t, d in to_draft.items()}
        self._shared = torch.tensor([list(to_draft), list(to_draft.values())])

    def task(self, seq: SequenceView) -> DraftTask:
        ends = frozenset(self.to_draft[end] for end in seq.task.ends if end in self.to_draft)
        return replace(seq.task, sampler=_MappedSampler(seq.task.sampler, self), ends=ends)

    def read(self, seq: SequenceView, draft: DraftSequence) -> None:
        """Adds shared tokens by id, and the others through their text."""
        for shared, run in groupby(seq.tokens[draft.seen :], key=self.to_draft.__contains__):
            if shared:
                draft.tokens += map(self.to_draft.__getitem__, run)
            else:
                draft.tokens += encode(self._draft_tokenizer, decode(self._target_tokenizer, list(run)))
        draft.seen = len(seq.tokens)

    def translate(self, seq: SequenceView, draft: DraftSequence, guess: Tree, plan: Plan) -> Tree:
        return replace(guess, tokens=self.in_target(guess.tokens))

    def widened(self, logits: Tensor) -> Tensor:
        """The draft's `logits` as `[vocab of the target]`; tokens that are not shared have -inf."""
        self._shared = self._shared.to(logits.device)
        targets, drafts = self._shared
        wide = logits.new_full((self._vocab_size,), float("-inf"))
        wide[targets] = logits[drafts]
        return wide

    def in_target(self, guesses: list[int]) -> list[int]:
        """The target's ids of guessed draft ids."""
        return [guess - _UNSHARED if guess >= _UNSHARED else self._to_target[guess] for guess in guesses]
