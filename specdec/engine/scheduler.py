"""The rows of the target's cache: which sequence gets one, what it continues, and what is kept when it leaves.

A prompt is read once. Sequences of one request with equal prompts wait for the first of them, and fork its row. A
prompt that begins like the text of another sequence, or of one that has left, continues from a copy of its keys and
values, as far as its draft can continue too; while another sequence is reading what both have in common, it waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from specdec.core.drafts import Draft, Proposer, SavedState
from specdec.core.rounds import Context
from specdec.core.sequence import RunningSequence
from specdec.engine.prefix_cache import LEAST, DrafterRef, PrefixCache, PrefixKey
from specdec.engine.request import Request
from specdec.models import LanguageModel, prefix_bytes
from specdec.options.checks import common_length

_WORTH_WAITING = 64  # common tokens whose computation takes about as long as the extra pass that waiting costs


class OpenDraft(NamedTuple):
    """A draft and its proposer."""

    drafter: Draft
    proposer: Proposer


class Scheduler:
    """Gives running sequences their rows of the cache of `target`, and takes them back.

    `prefix_cache` keeps texts of sequences that have left; None: every prompt is read anew. Sequences share keys and
    values only where the model's can be cut at any position and do not depend on the text around them. `drafts`: the
    open drafts by the drafter's identity. One that reads hidden states gets none of positions that a sequence
    continues, so it must continue them as well.
    """

    def __init__(self, model: LanguageModel, prefix_cache: PrefixCache | None, drafts: Mapping[int, OpenDraft]) -> None:
        self.target = model.session()
        self._shares = self.target.keeps_prefixes and model.capability.boundary is None
        self.prefix_cache = prefix_cache if self._shares and not model.is_encoder_decoder else None
        self._model, self._drafts = model, drafts
        self._leaders: dict[RunningSequence, RunningSequence] = {}  # by sequence, the one whose equal prompt it awaits
        self._arrived: dict[int, RunningSequence] = {}  # by id: without a row, and without a leader
        self._open: dict[int, RunningSequence] = {}  # by id: with a row that others may continue

    def add(self, request: Request) -> None:
        """Takes in a request's sequences; `follow` gives each its row when it is to be read."""
        self._stop_sharing(request)
        first: dict[object, RunningSequence] = {}
        for seq in request.seqs:
            alone = request.traced or seq.embeds is not None or seq.unconditional is not None or len(seq.tokens) < 2
            leader = seq if alone else first.setdefault((seq.task.source, tuple(seq.tokens)), seq)
            if leader is not seq:
                self._leaders[seq] = leader
                continue
            if request.encoding is not None:
                seq.encoding = request.encoding.select([seq.task.encoder_row])
            self._arrived[seq.id] = seq

    def _stop_sharing(self, request: Request) -> None:
        """Sequences that began under another state of the model than the request's no longer share anything."""
        for seq in [*self._open.values(), *self._arrived.values(), *self._leaders]:
            if seq.context is not None and seq.context.model != request.model_state:
                for one in seq.batch_seqs:
                    one.context = None

    def follow(self, seq: RunningSequence, request: Request) -> bool:
        """Gives a sequence its row, unless a prompt that it will continue is still being read.

        Returns whether it has one.
        """
        if seq.id in self._arrived:
            if self._awaits(seq):
                return False
            request.cached_prompt_tokens += self._continue(seq, self._draft_of(request))
            del self._arrived[seq.id]
            for other in seq.batch_seqs[1:]:
                self._continue(other)
            return True
        leader = self._leaders.get(seq)
        if leader is None:
            return True
        if leader.cache_row is None or self.target.length(leader.cache_row) < len(seq.tokens) - 1:
            return False
        seq.encoding = leader.encoding
        length = self._joined(seq, leader, len(seq.tokens) - 1, self._draft_of(request))
        self._set(seq, self.target.fork(leader.cache_row, length))
        request.cached_prompt_tokens += length
        del self._leaders[seq]
        return True

    def leads(self, seq: RunningSequence) -> bool:
        """Whether other sequences wait for this one."""
        return seq in self._leaders.values()

    def unread(self, seq: RunningSequence) -> int:
        """Positions of the sequence's text that are not in the cache."""
        return seq.length - self.target.length(_row(seq))

    def remove(self, seqs: Sequence[RunningSequence], request_of: dict[int, Request]) -> None:
        """Takes rows back, and keeps their texts where that pays; sequences that waited for them go on without."""
        state = cache(lambda: self._model.look()[0].digest)  # read once for all sequences
        for seq in seqs:
            self._leaders.pop(seq, None)
            self._arrived.pop(seq.id, None)
            context, request = seq.context, request_of[seq.id]
            if self.prefix_cache is None or context is None or seq.cache_row is None:
                continue
            if request.caller_blocks or context.model == state():  # the model did not change while the sequence ran
                self._retain(seq, context, self.prefix_cache, self._draft_of(request))
        rows = [one.cache_row for seq in seqs for one in seq.batch_seqs if one.cache_row is not None]
        if rows:
            self.target.remove(rows)
        for seq in seqs:
            self._open.pop(seq.id, None)
            for one in seq.batch_seqs:
                one.cache_row = None
        self._promote({seq.id for seq in seqs})

    def _promote(self, gone: Collection[int]) -> None:
        """Of the sequences that waited for one that is gone, the first becomes the others' leader."""
        heirs: dict[int, RunningSequence] = {}
        for seq, leader in list(self._leaders.items()):
            if leader.id not in gone:
                continue
            if leader.id in heirs:
                self._leaders[seq] = heirs[leader.id]
            else:
                heirs[leader.id], seq.encoding = seq, leader.encoding
                del self._leaders[seq]
                self._arrived[seq.id] = seq

    def _draft_of(self, request: Request) -> OpenDraft | None:
        """The request's draft, if it reads hidden states."""
        draft = self._drafts.get(id(request.drafter))
        return draft if draft is not None and draft.drafter.hidden_layers else None

    def _set(self, seq: RunningSequence, row: int) -> None:
        seq.cache_row, seq.cache_reset_length = row, self.target.cache_reset_length
        if seq.id >= 0:
            self._open[seq.id] = seq

    def _awaits(self, seq: RunningSequence) -> bool:
        """Whether another sequence is reading a prompt that `seq` could continue much further than what exists now."""
        now = self._nearest(seq)[1]
        return any(
            _shared(seq, other, other.length - 1) >= now + _WORTH_WAITING
            for other in self._open.values()
            if not other.prefilled and other.max_length - len(other.tokens) > 1  # it outlives the round of its prompt
        )

    def _nearest(self, seq: RunningSequence) -> tuple[RunningSequence | SavedState | None, int]:
        """The running sequence or saved text with the longest common beginning, and its length in positions."""
        if seq.context is None or not self._shares:
            return None, 0
        lengths = {id_: _shared(seq, one, self.target.length(_row(one))) for id_, one in self._open.items()}
        best = max(lengths, key=lambda id_: lengths[id_], default=None)
        saved, length = None, 0
        if self.prefix_cache is not None:
            saved, length = self.prefix_cache.find(_prefix_key(seq, seq.context, seq.length - 1))
        if best is not None and lengths[best] >= max(LEAST, length):
            return self._open[best], lengths[best]
        return saved, length

    def _continue(self, seq: RunningSequence, draft: OpenDraft | None = None) -> int:
        """Gives a sequence a row, with what it can continue; returns how many positions these are."""
        source, length = self._nearest(seq)
        length = self._joined(seq, source, length, draft)
        if not length:
            self._set(seq, self.target.add(1, seq.encoding)[0])
        elif isinstance(source, RunningSequence):
            self._set(seq, self.target.fork(_row(source), length))
        elif source is not None:
            self._set(seq, self.target.read_from(source.state, length))
        return length

    def _joined(
        self, seq: RunningSequence, source: RunningSequence | SavedState | None, length: int, draft: OpenDraft | None
    ) -> int:
        """How many of the first `length` positions of `source` the sequence's draft can continue as well."""
        if draft is None or not length:
            return length
        if seq.num_embeds_only:
            return 0
        joined = draft.proposer.fork(seq, source.id, length) if isinstance(source, RunningSequence) else 0
        if joined or self.prefix_cache is None or seq.context is None:
            return joined
        saved, length = self.prefix_cache.find(_prefix_key(seq, seq.context, length, DrafterRef(draft.drafter)))
        return 0 if saved is None else draft.proposer.fork(seq, saved, length)

    def _retain(
        self, seq: RunningSequence, context: Context, prefix_cache: PrefixCache, draft: OpenDraft | None
    ) -> None:
        """Saves the text of a sequence that leaves, if there is room: its draft's state, then its keys and values."""
        length = self.target.length(_row(seq))
        if length * self._model.kv_bytes > min(prefix_cache.limit, prefix_cache.room):
            return
        if draft is not None and not seq.num_embeds_only:
            with suppress(Exception):  # a draft that cannot save its state ends no request
                saved = draft.proposer.save(seq, length)
                if saved is not None:
                    key = _prefix_key(seq, context, saved.length, DrafterRef(draft.drafter))
                    if prefix_cache.wants(key):
                        prefix_cache.keep(key, saved)
        key = _prefix_key(seq, context, length)
        if prefix_cache.wants(key):
            with suppress(RuntimeError, MemoryError, OSError):  # no memory for the copy
                prefix = self.target.keep_prefix(_row(seq), length)
                prefix_cache.keep(key, SavedState(length, prefix, prefix_bytes(prefix)))


def _row(seq: RunningSequence) -> int:
    assert seq.cache_row is not None
    return seq.cache_row


def _shared(seq: RunningSequence, other: RunningSequence, most: int) -> int:
    """How many of the first `most` positions of `other` `seq` begins with; never its last, whose pass needs logits."""
    if seq.context is None or seq.context != other.context:
        return 0
    same = min(seq.num_embeds_only, other.num_embeds_only)
    if seq.num_embeds_only == other.num_embeds_only:
        same += common_length(seq.tokens, other.tokens)
    return min(same, most, seq.length - 1)


def _prefix_key(seq: RunningSequence, context: Context, length: int, drafter: DrafterRef | None = None) -> PrefixKey:
    """The first `length` positions of a sequence."""
    embeds_only = min(seq.num_embeds_only, length)
    return PrefixKey(tuple(seq.tokens[: length - embeds_only]), context, embeds_only, drafter)
