"""The places of sequences in the target's cache: whose keys and values a new sequence continues, and what stays of one
that left.

A prompt is read once: sequences of one request that continue the same prompt wait for the first of them, and a prompt
that begins like the text of another sequence, or of one that has left, continues from a copy of its keys and values, as
far as its draft can do the same. It is not read while another sequence is reading what both have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from specdec.core.drafts import BatchDrafter, DraftSession, SavedState
from specdec.core.rounds import Context
from specdec.core.sequence import RunningSequence
from specdec.engine.prefix_cache import LEAST, DrafterRef, PrefixCache, PrefixKey
from specdec.engine.request import Request
from specdec.models import LanguageModel, prefix_bytes
from specdec.options.checks import common_length

_WORTH_WAITING = 64  # tokens in common: computing them takes about as long as the pass more that waiting costs


class OpenDraft(NamedTuple):
    """A drafter and its session."""

    drafter: BatchDrafter
    session: DraftSession


class Scheduler:
    """Gives the sequences of a running set their places in the `target`'s session, and takes them back.

    `prefix_cache` keeps texts whose sequences have left; None where every prompt is read anew. Only models whose keys
    and values can be cut anywhere, and mean the same in any text, can share them between requests. `drafts` are those
    that are open, by the identity of the drafter: nobody tells those that read hidden states of what a sequence
    continues, so they must continue it, too.
    """

    def __init__(self, model: LanguageModel, prefix_cache: PrefixCache | None, drafts: Mapping[int, OpenDraft]) -> None:
        self.target = model.session()
        self._shares = self.target.keeps_prefixes and model.capability.boundary is None
        self._keeps = self._shares and not model.is_encoder_decoder
        self.prefix_cache = prefix_cache if self._keeps else None
        self._model, self._drafts = model, drafts
        # whose reading of the same prompt a sequence waits for
        self._leaders: dict[RunningSequence, RunningSequence] = {}
        # by key: sequences that have no place yet, and wait for nobody's prompt
        self._arrived: dict[int, RunningSequence] = {}
        self._open: dict[int, RunningSequence] = {}  # by key: sequences whose texts others may continue

    def add(self, request: Request) -> None:
        """Takes in the sequences of a request, which get their places when they are read (`follow`)."""
        self._part(request)
        first: dict[object, RunningSequence] = {}
        for seq in request.seqs:
            alone = request.traced or seq.embeds is not None or seq.unconditional is not None or len(seq.tokens) < 2
            leader = seq if alone else first.setdefault((seq.task.source, tuple(seq.tokens)), seq)
            if leader is not seq:
                self._leaders[seq] = leader
                continue
            if request.encoding is not None:
                seq.encoding = request.encoding.select([seq.task.place])
            self._arrived[seq.id] = seq

    def _part(self, request: Request) -> None:
        """Sequences that read on under another state of the model than they began with share with nobody any more."""
        for seq in [*self._open.values(), *self._arrived.values(), *self._leaders]:
            if seq.context is not None and seq.context.model != request.model_state:
                for one in seq.batch_seqs:
                    one.context = None

    def follow(self, seq: RunningSequence, request: Request) -> bool:
        """Whether a sequence has its place by now: it gets one once what it continues was read."""
        if seq.id in self._arrived:
            if self._awaits(seq):
                return False
            request.cached_prompt_tokens += self._continue(seq, self._draft_of(request))
            del self._arrived[seq.id]
            for beside in seq.batch_seqs[1:]:
                self._continue(beside)
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
        """Whether others wait for this sequence."""
        return seq in self._leaders.values()

    def unread(self, seq: RunningSequence) -> int:
        """Positions of the sequence's text that are not in the cache."""
        assert seq.cache_row is not None
        return seq.length - self.target.length(seq.cache_row)

    def remove(self, seqs: Sequence[RunningSequence], request_of: dict[int, Request]) -> None:
        """Takes the places of sequences back; their texts may stay, and who waited for one of them reads for itself."""
        now = cache(lambda: self._model.look()[0].digest)  # of several sequences it is read once
        for seq in seqs:
            self._leaders.pop(seq, None)
            self._arrived.pop(seq.id, None)
            kept, request = seq.context, request_of[seq.id]
            if self.prefix_cache is None or kept is None or seq.cache_row is None:
                continue
            if request.waited or kept.model == now():  # not changed while the sequence ran
                self._retain(seq, kept, self.prefix_cache, self._draft_of(request))
        cache_rows = [one.cache_row for seq in seqs for one in seq.batch_seqs if one.cache_row is not None]
        if cache_rows:
            self.target.remove(cache_rows)
        for seq in seqs:
            self._open.pop(seq.id, None)
            for one in seq.batch_seqs:
                one.cache_row = None
        self._promote({seq.id for seq in seqs})

    def _promote(self, gone: Collection[int]) -> None:
        """Of the sequences that waited for one that has left, the first is read for the others."""
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
        """The draft of a request, where it reads hidden states."""
        draft = self._drafts.get(id(request.drafter))
        return draft if draft is not None and draft.drafter.hidden_layers else None

    def _set(self, seq: RunningSequence, cache_row: int) -> None:
        seq.cache_row, seq.cache_reset_length = cache_row, self.target.cache_reset_length
        if seq.id >= 0:
            self._open[seq.id] = seq

    def _awaits(self, seq: RunningSequence) -> bool:
        """Whether a sequence that is being read will have more in common with this one than could be continued now."""
        now = self._nearest(seq)[1]
        return any(
            _shared(seq, other, other.length - 1) >= now + _WORTH_WAITING
            for other in self._open.values()
            if not other.prefilled and other.max_length - len(other.tokens) > 1  # it stays for a round at least
        )

    def _nearest(self, seq: RunningSequence) -> tuple[RunningSequence | SavedState | None, int]:
        """What the sequence's text has most in common with, another sequence or else a kept text, and how much
        that is.
        """
        if seq.context is None or not self._shares:
            return None, 0
        lengths = {key: _shared(seq, one, self.target.length(_slot(one))) for key, one in self._open.items()}
        key = max(lengths, key=lambda key: lengths[key], default=None)
        kept, length = (
            (None, 0)
            if self.prefix_cache is None
            else self.prefix_cache.find(_prefix_key(seq, seq.context, seq.length - 1))
        )
        if key is not None and lengths[key] >= max(LEAST, length):
            return self._open[key], lengths[key]
        return kept, length

    def _continue(self, seq: RunningSequence, draft: OpenDraft | None = None) -> int:
        """Gives a sequence a place, where it continues what was read for another one, if there is such; how
        much that is.
        """
        source, length = self._nearest(seq)
        length = self._joined(seq, source, length, draft)
        if not length:
            self._set(seq, self.target.add(1, seq.encoding)[0])
        elif isinstance(source, RunningSequence):
            self._set(seq, self.target.fork(_slot(source), length))
        elif source is not None:
            self._set(seq, self.target.read_from(source.state, length))
        return length

    def _joined(
        self, seq: RunningSequence, source: RunningSequence | SavedState | None, length: int, draft: OpenDraft | None
    ) -> int:
        """How many of the first `length` positions of `source` the sequence may continue, as far as its draft goes."""
        if draft is None or not length:
            return length
        if seq.num_embeds_only:
            return 0
        joined = draft.session.join(seq, source.id, length) if isinstance(source, RunningSequence) else 0
        if joined or self.prefix_cache is None or seq.context is None:
            return joined
        kept, length = self.prefix_cache.find(_prefix_key(seq, seq.context, length, DrafterRef(draft.drafter)))
        return 0 if kept is None else draft.session.join(seq, kept, length)

    def _retain(
        self, seq: RunningSequence, context: Context, prefix_cache: PrefixCache, draft: OpenDraft | None
    ) -> None:
        """Keeps the text of a sequence that leaves, where there is room for it, and what its draft has read of it."""
        length = self.target.length(_slot(seq))
        if length * self._model.kv_bytes > min(prefix_cache.limit, prefix_cache.room):
            return
        if draft is not None and not seq.num_embeds_only:
            with suppress(Exception):  # of a draft that cannot, which is no reason for anything else to fail
                _retain_draft(seq, context, prefix_cache, draft, length)
        text = _prefix_key(seq, context, length)
        if prefix_cache.wants(text):
            with suppress(RuntimeError, MemoryError, OSError):  # what cannot be copied is not kept
                prefix = self.target.keep_prefix(_slot(seq), length)
                prefix_cache.keep(text, SavedState(length, prefix, prefix_bytes(prefix)))


def _retain_draft(
    seq: RunningSequence, context: Context, prefix_cache: PrefixCache, draft: OpenDraft, length: int
) -> None:
    """Keeps what a sequence's draft has read; before the target's, so that where room is short it goes first."""
    kept = draft.session.keep(seq, length)
    if kept is not None and prefix_cache.wants(
        text := _prefix_key(seq, context, kept.length, DrafterRef(draft.drafter))
    ):
        prefix_cache.keep(text, kept)


def _slot(seq: RunningSequence) -> int:
    assert seq.cache_row is not None
    return seq.cache_row


def _shared(seq: RunningSequence, other: RunningSequence, most: int) -> int:
    """How many of the first `most` positions of another sequence this one begins with, its last position left out."""
    if seq.context is None or seq.context != other.context:
        return 0
    same = min(seq.num_embeds_only, other.num_embeds_only)
    if seq.num_embeds_only == other.num_embeds_only:
        same += common_length(seq.tokens, other.tokens)
    return min(same, most, seq.length - 1)


def _prefix_key(seq: RunningSequence, context: Context, length: int, drafter: DrafterRef | None = None) -> PrefixKey:
    """The first `length` positions of a sequence."""
    num_embeds_only = min(seq.num_embeds_only, length)
    return PrefixKey(tuple(seq.tokens[: length - num_embeds_only]), context, num_embeds_only, drafter)
