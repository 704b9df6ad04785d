"""Drafts with another tokenizer than the target's: each sequence is kept in the draft's own tokens as well."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.core.drafts import Draft, DraftTask, Plan, Proposer, SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.proposers.views import ReadSequence, best_branch


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    def __len__(self) -> int: ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text`, without special tokens around them."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`, with special tokens and all spaces."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


class OtherTokenizerDraft(Draft):
    """A draft of another vocabulary than the target's."""

    def __init__(self, drafter: Draft, target_tokenizer: Tokenizer, draft_tokenizer: Tokenizer) -> None:
        self.drafter, self.models, self.needs_encoder_inputs = drafter, drafter.models, drafter.needs_encoder_inputs
        self.target_tokenizer, self.draft_tokenizer = target_tokenizer, draft_tokenizer


@dataclass(slots=True)
class DraftSequence(ReadSequence):
    """A sequence in the draft's tokens, made of the first `seen` tokens of the target's sequence `outer`.

    Its `prompt_length` covers the beginning-of-text token alone: the rest may be encoded anew.
    """

    outer: SequenceView | None = None
    seen: int = 0

    def begins(self, tokens: list[int]) -> bool:
        """Whether the target's `tokens` begin with those that it was made of."""
        before = [] if self.outer is None else self.outer.tokens
        return tokens is before or tokens[: self.seen] == before[: self.seen]

    def write(self, start: int, tokens: list[int]) -> None:
        """Replaces all tokens from `start` on; the list stays the same one if it only grows."""
        known = self.tokens[start:]
        if tokens[: len(known)] == known:
            self.tokens += tokens[len(known) :]
        else:
            self.tokens = self.tokens[:start] + tokens


class OtherTokenizerProposer(Proposer):
    """Runs a draft on sequences in its own tokens, and translates its guesses."""

    def __init__(self, drafter: OtherTokenizerDraft, draft_vocab_size: int, vocab_size: int) -> None:
        self._draft, self._vocab_size = drafter.drafter.start(draft_vocab_size), vocab_size
        self._target_tokenizer, self._draft_tokenizer = drafter.target_tokenizer, drafter.draft_tokenizer
        self._seqs: dict[int, DraftSequence] = {}

    @abstractmethod
    def task(self, seq: SequenceView) -> DraftTask:
        """The draft's task, in place of the sequence's own."""

    @abstractmethod
    def read(self, seq: SequenceView, draft: DraftSequence) -> None:
        """Adds the new tokens of `seq` to `draft`."""

    @abstractmethod
    def translate(self, seq: SequenceView, draft: DraftSequence, guess: Tree, plan: Plan) -> Tree:
        """The draft's guess in the target's tokens."""

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        if not any(plan.limit > 0 for plan in plans):
            return [EMPTY] * len(seqs)
        try:
            seqs = [best_branch(seq) for seq in seqs]
            read = [self._read(seq) for seq in seqs]
            guesses = self._draft.propose(read, plans)
            return [self.translate(*parts) for parts in zip(seqs, read, guesses, plans, strict=True)]
        except BaseException:
            self.drop([seq.id for seq in seqs])
            raise

    @property
    def cache(self) -> Any:
        return self._draft.cache

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._seqs.pop(seq_id, None)
        self._draft.drop(seq_ids)

    def _read(self, seq: SequenceView) -> DraftSequence:
        """The sequence in the draft's tokens, after a BOS token if the draft's tokenizer adds one or `seq` has one."""
        draft = self._seqs.get(seq.id)
        if draft is None or not draft.begins(seq.tokens):
            bos, target_bos = self._draft_tokenizer.bos_token_id, self._target_tokenizer.bos_token_id
            has_bos = target_bos is not None and seq.tokens[:1] == [target_bos]
            opening = [bos] if bos is not None and (has_bos or self._draft_tokenizer.encode("")[:1] == [bos]) else []
            draft = DraftSequence(seq.id, opening, len(opening), self.task(seq), seen=int(has_bos))
            self._seqs[seq.id] = draft
        draft.outer, draft.remaining = seq, seq.remaining
        self.read(seq, draft)
        return draft
