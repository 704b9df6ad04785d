"""The places of rows in the target's cache: whose keys and values a new row continues, and what stays of one that left.

A prompt is read once: rows of one request that continue the same prompt wait for the first of them, and a prompt that
begins like the text of another row, or of one that has left, continues from a copy of its keys and values, as far as
its draft can do the same. It is not read while another row is reading what both have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from specdec.core.drafts import BatchDrafter, DraftSession, Kept
from specdec.core.rounds import Context
from specdec.core.sequence import RunningSequence
from specdec.engine.prefix_cache import LEAST, Prefixes, Reader, Text
from specdec.engine.request import Request
from specdec.models import LanguageModel, prefix_bytes
from specdec.options.checks import common_length

_WORTH_WAITING = 64  # tokens in common: computing them takes about as long as the pass more that waiting costs


class OpenDraft(NamedTuple):
    """A drafter and its session."""

    drafter: BatchDrafter
    session: DraftSession


class Places:
    """Gives the rows of a running set their places in the `target`'s session, and takes them back.

    `prefixes` keeps texts whose rows have left; None where every prompt is read anew. Only models whose keys and values
    can be cut anywhere, and mean the same in any text, can share them between requests. `drafts` are those that
    are open, by the identity of the drafter: nobody tells those that read hidden states of what a row continues, so
    they must continue it, too.
    """

    def __init__(self, model: LanguageModel, prefixes: Prefixes | None, drafts: Mapping[int, OpenDraft]) -> None:
        self.target = model.session()
        self._shares = self.target.keeps_prefixes and model.capability.boundary is None
        self._keeps = self._shares and not model.is_encoder_decoder
        self.prefixes = prefixes if self._keeps else None
        self._model, self._drafts = model, drafts
        self._leaders: dict[RunningSequence, RunningSequence] = {}  # whose reading of the same prompt a row waits for
        # by key: rows that have no place yet, and wait for nobody's prompt
        self._arrived: dict[int, RunningSequence] = {}
        self._open: dict[int, RunningSequence] = {}  # by key: rows whose texts others may continue

    def add(self, request: Request) -> None:
        """Takes in the rows of a request, which get their places when they are read (`follow`)."""
        self._part(request)
        first: dict[object, RunningSequence] = {}
        for row in request.rows:
            alone = request.traced or row.embeds is not None or row.unconditional is not None or len(row.tokens) < 2
            leader = row if alone else first.setdefault((row.task.source, tuple(row.tokens)), row)
            if leader is not row:
                self._leaders[row] = leader
                continue
            if request.encoding is not None:
                row.encoding = request.encoding.select([row.task.place])
            self._arrived[row.key] = row

    def _part(self, request: Request) -> None:
        """Rows that read on under another state of the model than they began with share with nobody any more."""
        for row in [*self._open.values(), *self._arrived.values(), *self._leaders]:
            if row.context is not None and row.context.model != request.model_state:
                for one in row.batch_rows:
                    one.context = None

    def follow(self, row: RunningSequence, request: Request) -> bool:
        """Whether a row has its place by now: it gets one once what it continues was read."""
        if row.key in self._arrived:
            if self._awaits(row):
                return False
            request.cached_prompt_tokens += self._continue(row, self._draft_of(request))
            del self._arrived[row.key]
            for beside in row.batch_rows[1:]:
                self._continue(beside)
            return True
        leader = self._leaders.get(row)
        if leader is None:
            return True
        if leader.slot is None or self.target.length(leader.slot) < len(row.tokens) - 1:
            return False
        row.encoding = leader.encoding
        length = self._joined(row, leader, len(row.tokens) - 1, self._draft_of(request))
        self._set(row, self.target.fork(leader.slot, length))
        request.cached_prompt_tokens += length
        del self._leaders[row]
        return True

    def leads(self, row: RunningSequence) -> bool:
        """Whether others wait for this row."""
        return row in self._leaders.values()

    def unread(self, row: RunningSequence) -> int:
        """Positions of the row's text that are not in the cache."""
        assert row.slot is not None
        return row.length - self.target.length(row.slot)

    def remove(self, rows: Sequence[RunningSequence], request_of: dict[int, Request]) -> None:
        """Takes the places of rows back; their texts may stay, and who waited for one of them reads for itself."""
        now = cache(lambda: self._model.look()[0].digest)  # of several rows it is read once
        for row in rows:
            self._leaders.pop(row, None)
            self._arrived.pop(row.key, None)
            kept, request = row.context, request_of[row.key]
            if self.prefixes is None or kept is None or row.slot is None:
                continue
            if request.waited or kept.model == now():  # not changed while the row ran
                self._retain(row, kept, self.prefixes, self._draft_of(request))
        slots = [one.slot for row in rows for one in row.batch_rows if one.slot is not None]
        if slots:
            self.target.remove(slots)
        for row in rows:
            self._open.pop(row.key, None)
            for one in row.batch_rows:
                one.slot = None
        self._promote({row.key for row in rows})

    def _promote(self, gone: Collection[int]) -> None:
        """Of the rows that waited for one that has left, the first is read for the others."""
        heirs: dict[int, RunningSequence] = {}
        for row, leader in list(self._leaders.items()):
            if leader.key not in gone:
                continue
            if leader.key in heirs:
                self._leaders[row] = heirs[leader.key]
            else:
                heirs[leader.key], row.encoding = row, leader.encoding
                del self._leaders[row]
                self._arrived[row.key] = row

    def _draft_of(self, request: Request) -> OpenDraft | None:
        """The draft of a request, where it reads hidden states."""
        draft = self._drafts.get(id(request.drafter))
        return draft if draft is not None and draft.drafter.hidden_layers else None

    def _set(self, row: RunningSequence, slot: int) -> None:
        row.slot, row.cache_reset_length = slot, self.target.cache_reset_length
        if row.key >= 0:
            self._open[row.key] = row

    def _awaits(self, row: RunningSequence) -> bool:
        """Whether a row that is being read will have more in common with this one than could be continued now."""
        now = self._nearest(row)[1]
        return any(
            _shared(row, other, other.length - 1) >= now + _WORTH_WAITING
            for other in self._open.values()
            if not other.begun and other.max_length - len(other.tokens) > 1  # it stays for a round at least
        )

    def _nearest(self, row: RunningSequence) -> tuple[RunningSequence | Kept | None, int]:
        """What the row's text has most in common with, another row or else a kept text, and how much that is."""
        if row.context is None or not self._shares:
            return None, 0
        lengths = {key: _shared(row, one, self.target.length(_slot(one))) for key, one in self._open.items()}
        key = max(lengths, key=lambda key: lengths[key], default=None)
        kept, length = (
            (None, 0) if self.prefixes is None else self.prefixes.find(_text(row, row.context, row.length - 1))
        )
        if key is not None and lengths[key] >= max(LEAST, length):
            return self._open[key], lengths[key]
        return kept, length

    def _continue(self, row: RunningSequence, draft: OpenDraft | None = None) -> int:
        """Gives a row a place, where it continues what was read for another one, if there is such; how much that is."""
        source, length = self._nearest(row)
        length = self._joined(row, source, length, draft)
        if not length:
            self._set(row, self.target.add(1, row.encoding)[0])
        elif isinstance(source, RunningSequence):
            self._set(row, self.target.fork(_slot(source), length))
        elif source is not None:
            self._set(row, self.target.read_from(source.state, length))
        return length

    def _joined(
        self, row: RunningSequence, source: RunningSequence | Kept | None, length: int, draft: OpenDraft | None
    ) -> int:
        """How many of the first `length` positions of `source` the row may continue, as far as its draft goes."""
        if draft is None or not length:
            return length
        if row.unseen:
            return 0
        joined = draft.session.join(row, source.key, length) if isinstance(source, RunningSequence) else 0
        if joined or self.prefixes is None or row.context is None:
            return joined
        kept, length = self.prefixes.find(_text(row, row.context, length, Reader(draft.drafter)))
        return 0 if kept is None else draft.session.join(row, kept, length)

    def _retain(self, row: RunningSequence, context: Context, prefixes: Prefixes, draft: OpenDraft | None) -> None:
        """Keeps the text of a row that leaves, where there is room for it, and what its draft has read of it."""
        length = self.target.length(_slot(row))
        if length * self._model.kv_bytes > min(prefixes.limit, prefixes.room):
            return
        if draft is not None and not row.unseen:
            with suppress(Exception):  # of a draft that cannot, which is no reason for anything else to fail
                _retain_draft(row, context, prefixes, draft, length)
        text = _text(row, context, length)
        if prefixes.wants(text):
            with suppress(RuntimeError, MemoryError, OSError):  # what cannot be copied is not kept
                prefix = self.target.keep_prefix(_slot(row), length)
                prefixes.keep(text, Kept(length, prefix, prefix_bytes(prefix)))


def _retain_draft(row: RunningSequence, context: Context, prefixes: Prefixes, draft: OpenDraft, length: int) -> None:
    """Keeps what a row's draft has read; before the target's, so that where room is short it goes first."""
    kept = draft.session.keep(row, length)
    if kept is not None and prefixes.wants(text := _text(row, context, kept.length, Reader(draft.drafter))):
        prefixes.keep(text, kept)


def _slot(row: RunningSequence) -> int:
    assert row.slot is not None
    return row.slot


def _shared(row: RunningSequence, other: RunningSequence, most: int) -> int:
    """How many of the first `most` positions of another row this one begins with, its last position left out."""
    if row.context is None or row.context != other.context:
        return 0
    same = min(row.unseen, other.unseen)
    if row.unseen == other.unseen:
        same += common_length(row.tokens, other.tokens)
    return min(same, most, row.length - 1)


def _text(row: RunningSequence, context: Context, length: int, reader: Reader | None = None) -> Text:
    """The first `length` positions of a row."""
    unseen = min(row.unseen, length)
    return Text(tuple(row.tokens[: length - unseen]), context, unseen, reader)
