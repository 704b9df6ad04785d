"""Who reads how much of which text in the next pass, of the target and of drafts, and what is kept when a text leaves.

A text is read once. A text that begins like another sequence's, running or not, continues from a copy of that
sequence's keys and values; while the other sequence is reading the common part, it waits. Drafts that run a model share
texts likewise, in their caches. Copies of a prompt within one request are shared by every model, also short ones.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache

from specdec.core.drafts import SavedState
from specdec.core.sequence import RunningSequence
from specdec.core.work import CHUNKS, CPU_CHUNKS, READ_ALONG
from specdec.engine.drafts import OpenDraft, OpenDrafts
from specdec.engine.prefix_cache import LEAST, Key, PrefixCache, SharedTexts
from specdec.engine.request import Request
from specdec.errors import DraftError
from specdec.models import LanguageModel, prefix_bytes

_log = logging.getLogger(__name__)
Parts = Mapping[RunningSequence, int | None]
"""Of the prompts of one pass, how many tokens it reads; None: to the end."""
_WORTH_WAITING = 64  # common tokens whose computation takes about as long as the extra pass that waiting costs


class Scheduler:
    """Chooses the prompts of the next pass, and gives sequences their rows in the target's `session`.

    `prefilling`: the sequences whose prompts are not read yet. `prefix_cache` keeps texts of sequences that have left.
    Sequences share keys and values only where the model's can be cut at any position and do not depend on the text
    around them. An open draft that reads hidden states gets none for positions that a sequence continues, so it must
    continue them as well.
    """

    def __init__(self, model: LanguageModel, prefix_cache: PrefixCache | None, drafts: OpenDrafts) -> None:
        self.session = model.session()
        self._shares = self.session.keeps_prefixes and model.capability.boundary is None
        keeps = self._shares and not model.is_encoder_decoder
        self.prefix_cache = prefix_cache if prefix_cache is not None and keeps else PrefixCache(0)
        self._model, self._drafts, self._kv_bytes, self._epoch = model, drafts, model.kv_bytes, model.epoch
        self._requests, self._guard = drafts.requests, drafts.guard
        self.prefilling: list[RunningSequence] = []
        in_cpu_memory = model.device.type == "cpu" and not model.is_offloaded
        self._chunk, self._shared_chunk = CPU_CHUNKS if in_cpu_memory else CHUNKS
        self._others_first = False
        # by source: the sequences without a row whose prompts are copies
        self._copies: dict[Hashable, set[RunningSequence]] = defaultdict(set)
        self._texts = SharedTexts()
        # tokens of saved texts that drafts continue, until they read on
        self._continued: dict[RunningSequence, int] = {}

    def add(self, request: Request) -> None:
        """Takes in a request's sequences, whose prompts are to be read."""
        if self._model.epoch != self._epoch:
            self._epoch = self._model.epoch
            self.prefix_cache.clear()
        select = cache(lambda row: request.encoding and request.encoding.select([row]))
        for seq in request.seqs:
            seq.encoding = select(seq.task.encoder_row)
            for row_seq in seq.batch_seqs:
                if row_seq.context is not None and row_seq.context.epoch != self._epoch:
                    row_seq.context = None  # made before the model changed
                row_seq.sharing_key = row_seq.context if self._shares else None
            if not request.traced and seq.embeds is None and seq.unconditional is None:
                self._copies[seq.task.source].add(seq)
                seq.sharing_key = seq.sharing_key or seq.task.source
        self.prefilling += request.seqs

    def next_prompts(self, running: Sequence[RunningSequence]) -> Parts:
        """The sequences whose prompts the next pass reads, first come, first served, and how much of each.

        Every second time, other requests' prompts (shortest first) precede the first request's, so that a long prompt
        does not hold them up. While sequences of others are `running`, chunks are small.
        """
        order, first = list(self.prefilling), self._requests[self.prefilling[0].id]
        if self._others_first:
            order.sort(key=lambda seq: (0, seq.length) if self._requests[seq.id] is not first else (1, 0))
        self._others_first = not self._others_first
        ready: list[RunningSequence] = []
        unread = 0
        for seq in order:
            if unread >= self._chunk:
                break  # later, a sequence may continue what is read until then
            with self._guard([seq]):  # where no cache row can be made
                if self._give_row(seq):
                    ready.append(seq)
                    unread += self.unread(seq)
        if not ready:
            return {}
        request = self._requests[ready[0].id]
        if request.traced:  # in one pass
            chunk = max(row_seq.length for seq in request.seqs for row_seq in seq.batch_seqs)
        else:
            others_wait = any(self._requests[seq.id] is not request for seq in running)
            limit = self._shared_chunk if others_wait else self._chunk
            chunk = min(request.prefill_chunk or limit, limit)
        together = self._together(ready, request, chunk) if len(ready) > 1 else ready
        return {seq: None if self._ends(seq, chunk) else chunk for seq in together}

    def _together(self, seqs: Sequence[RunningSequence], request: Request, chunk: int) -> list[RunningSequence]:
        """The first of `seqs` that can share a pass, up to `chunk` tokens, of which half may be padding."""
        how, pairs = (request.traced, request.prefill_chunk), [(seq, self._requests[seq.id]) for seq in seqs]
        alike = [seq for seq, other in pairs if (other.traced, other.prefill_chunk) == how]
        seeing = next((i for i, seq in enumerate(alike) if self.has_unread_pictures(seq)), len(alike))
        if not seeing:
            return alike[:1]  # an error in a pass over pictures is one of its request alone
        return _batch([(seq, max(map(self.unread, seq.batch_seqs))) for seq in alike[:seeing]], chunk)

    def _ends(self, seq: RunningSequence, chunk: int) -> bool:
        """Whether a pass of `chunk` tokens reads the prompt to its end.

        Where copies wait for this prompt, its last token is left for a later pass, which they share.
        """
        unread = max(map(self.unread, seq.batch_seqs))
        if seq.pictures is not None and self.has_unread_pictures(seq):
            return seq.pictures.length == unread
        return unread <= chunk and (unread <= 1 or not self._copies[seq.task.source])

    def _give_row(self, seq: RunningSequence) -> bool:
        """Gives a sequence its row, unless a prompt that it will continue is still being read.

        Returns whether it has one.
        """
        if seq.cache_row is not None:
            return True
        ids = seq.text_ids[:-1]
        source, length = self._nearest(seq, self._texts, (seq.context, ()), ids)
        other = self._awaited(seq, self._texts, ids, length)
        # Nobody waits for a sequence that leaves after one more token.
        if other is not None and (self._are_copies(seq, other) or other.max_length - len(other.tokens) > 1):
            return False
        opened = self._drafts.of(seq)
        if length and opened is not None and opened.draft.hidden_layers:
            length = self._joined(seq, source, length, opened)
            if seq.pictures is not None and length < seq.pictures.length:
                opened.proposer.drop([seq.id])  # it begins anew
        if seq.pictures is not None and length < seq.pictures.length:
            length = 0  # pictures are read together
        self._place(seq, source, length)
        seq.cached_prompt_tokens = length
        for row_seq in seq.batch_seqs[1:]:
            self._place(row_seq, *self._nearest(row_seq, self._texts, (row_seq.context, ()), row_seq.text_ids[:-1]))
        self._texts.begin(seq, ids)
        return True

    def unread(self, seq: RunningSequence) -> int:
        """Positions of the sequence's text that are not in the cache."""
        return seq.length - self.session.length(seq.cache_row)

    def has_unread_pictures(self, seq: RunningSequence) -> bool:
        """Whether the next pass over the sequence reads its pictures."""
        return seq.pictures is not None and not self.session.length(seq.cache_row)

    def update(self, seqs: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Lets others continue what these sequences have read of their prompts; returns the prefilled ones."""
        for seq in seqs:
            if seq.cache_row is not None:
                self._texts.hold(seq, seq.text_ids[: self.session.length(seq.cache_row)], done=seq.prefilled)
        done = [seq for seq in self.prefilling if seq.prefilled]
        self.prefilling = [seq for seq in self.prefilling if not seq.prefilled]
        for seq in done:
            with self._guard([seq]):
                self._continue_saved(seq)
        return done

    def _continue_saved(self, seq: RunningSequence) -> None:
        """Lets the draft continue what it read of a text that has left, as the target does.

        A draft that chooses whether to read a text so knows what is left to read.
        """
        opened = self._drafts.of(seq)
        if opened is not None and seq.cached_prompt_tokens and not (opened.draft.hidden_layers or seq.num_embeds_only):
            self._continued[seq] = self._resumed(opened, seq, seq.tokens[:-1])

    def _resumed(self, opened: OpenDraft, seq: RunningSequence, ids: Sequence[int]) -> int:
        """How many of `ids` a draft has copied from saved states of texts that have left."""
        saved, length = self.prefix_cache.find(self.prefix_cache.key_of(opened.draft, seq.context), ids)
        return 0 if saved is None else _forked(opened, seq, saved, length)

    def catch_up(self, opened: OpenDraft, seqs: Sequence[RunningSequence]) -> dict[RunningSequence, int]:
        """Reads a chunk of the texts that a draft lacks; returns the sequences for which it can guess.

        Each is returned with the number of its unread tokens. While the draft can guess for some sequences, it reads
        the other texts in separate passes, with small chunks.
        """
        proposer, texts = opened.proposer, opened.texts
        leaders = self._begin(opened, seqs)
        unread = {seq: proposer.unread(seq) for seq in seqs if seq in texts}
        if any(count <= READ_ALONG for count in unread.values()):
            most, chunk = READ_ALONG, self._shared_chunk
        else:
            most, chunk = max(READ_ALONG, self._chunk // max(len(unread), 1)), self._chunk
        behind = [(seq, count - 1) for seq, count in unread.items() if count > (1 if seq in leaders else most)]
        if behind:
            batch = _batch(behind, chunk)
            proposer.read(batch, chunk)
            for seq in batch:
                before, unread[seq] = unread[seq], proposer.unread(seq)
                self._drafts.count(seq, before, unread[seq])
                texts.hold(seq, seq.tokens[: max(len(seq.tokens) - unread[seq], 0)], done=unread[seq] <= 1)
            self._begin(opened, seqs)
            unread |= {seq: proposer.unread(seq) for seq in seqs if seq in texts and seq not in unread}
        ready = {seq: count for seq, count in unread.items() if count <= most}
        for seq in ready:
            if texts.is_reading(seq):
                texts.hold(seq, seq.tokens[:-1], done=True)
        return ready

    def _begin(self, opened: OpenDraft, seqs: Sequence[RunningSequence]) -> set[RunningSequence]:
        """Lets a draft begin with these texts, as far as others have read them; returns those that others wait for."""
        leaders = set()
        for seq in seqs:
            if seq in opened.texts:
                continue
            ids, shares = seq.tokens[:-1], not (opened.draft.hidden_layers or seq.num_embeds_only)
            if shares:
                key = self.prefix_cache.key_of(opened.draft, seq.context)
                source, length = self._nearest(seq, opened.texts, key, ids)
                leader = self._awaited(seq, opened.texts, ids, length)
                if leader is not None and leader in seqs:
                    leaders.add(leader)
                    continue
                if source is not None and length > self._continued.pop(seq, 0):
                    _forked(opened, seq, source if isinstance(source, SavedState) else source.id, length)
            opened.texts.begin(seq, ids)
        return leaders

    def remove(self, seqs: Sequence[RunningSequence]) -> None:
        """Takes rows back, and keeps their texts where that pays; sequences that waited for them go on without."""
        for seq in seqs:
            self._retain(seq)
            self._continued.pop(seq, None)
            if (opened := self._drafts.of(seq)) is not None:
                opened.texts.drop(seq)
        leaving = {*seqs}
        self.prefilling = [seq for seq in self.prefilling if seq not in leaving]
        row_seqs = [row_seq for seq in seqs for row_seq in seq.batch_seqs]
        if rows := [row_seq.cache_row for row_seq in row_seqs if row_seq.cache_row is not None]:
            self.session.remove(rows)
        for row_seq in row_seqs:
            row_seq.cache_row = None
            self._texts.drop(row_seq)
            self._copies[row_seq.task.source].discard(row_seq)
            if not self._copies[row_seq.task.source]:
                del self._copies[row_seq.task.source]

    def _nearest(
        self, seq: RunningSequence, texts: SharedTexts, key: Key, ids: Sequence[int]
    ) -> tuple[RunningSequence | SavedState | None, int]:
        """The running sequence or saved state that begins most like `ids`, and how many positions they share."""
        saved, saved_length = self.prefix_cache.find(key, ids)
        running, length = texts.read_by_others(seq, ids)
        if running is not None:
            opened = None if texts is self._texts else self._drafts.of(seq)
            unread = self.unread(running) if opened is None else opened.proposer.unread(running)
            length = min(length, max(running.length - unread, 0))
            if length >= max(saved_length, 1 if self._are_copies(seq, running) else LEAST):
                return running, length
        return saved, saved_length

    def _awaited(
        self, seq: RunningSequence, texts: SharedTexts, ids: Sequence[int], length: int
    ) -> RunningSequence | None:
        """The sequence that reads so much more of `ids` than the first `length` that waiting for it pays."""
        other, common = texts.being_read(seq, ids)
        if other is None or common < length + (1 if self._are_copies(seq, other) else _WORTH_WAITING):
            return None
        return other

    def _are_copies(self, seq: RunningSequence, other: RunningSequence) -> bool:
        """Whether two sequences began with the same ids of one request."""
        return seq.task.source == other.task.source and seq.embeds is None and seq.unconditional is None

    def _place(self, seq: RunningSequence, source: RunningSequence | SavedState | None, length: int) -> None:
        """Gives a sequence a row, with the first `length` positions of `source`."""
        if source is None or not length:
            seq.cache_row = self.session.add(seq.encoding)
        elif isinstance(source, SavedState):
            shift = 0 if seq.pictures is None else seq.pictures.shift
            seq.cache_row = self.session.read_from(source.state, length, shift)
        else:
            seq.cache_row = self.session.fork(source.cache_row, length)
        seq.cache_reset_length = self.session.cache_reset_length
        self._copies[seq.task.source].discard(seq)

    def _joined(
        self, seq: RunningSequence, source: RunningSequence | SavedState | None, length: int, opened: OpenDraft
    ) -> int:
        """How many of the first `length` positions of `source` a draft that reads hidden states can continue too."""
        if seq.num_embeds_only:
            return 0
        if isinstance(source, RunningSequence) and (joined := _forked(opened, seq, source.id, length)):
            return joined
        return self._resumed(opened, seq, seq.text_ids[:length])

    def _retain(self, seq: RunningSequence) -> None:
        """Saves the text of a sequence that leaves, if later calls may continue it and there is room.

        First its draft's state, then its keys and values.
        """
        store, context = self.prefix_cache, seq.context
        if not store.limit or context is None or seq.cache_row is None:
            return
        if context.call is not None or context.epoch != self._model.epoch:
            return
        ids = seq.text_ids[: self.session.length(seq.cache_row)]
        if len(ids) * self._kv_bytes > min(store.limit, store.room):
            return
        opened = self._drafts.of(seq)
        if opened is not None and not seq.num_embeds_only:
            try:
                saved, key = opened.proposer.save(seq, len(ids)), store.key_of(opened.draft, context)
                if saved is not None and store.wants(key, ids[: saved.length]):
                    store.keep(key, ids[: saved.length], saved)
            except Exception:  # it ends no request
                _log.warning("a draft could not save its state, which later texts cannot continue", exc_info=True)
        if store.wants(key := (context, ()), ids):
            with suppress(RuntimeError, MemoryError, OSError):  # no memory for the copy
                prefix = self.session.keep_prefix(seq.cache_row, len(ids))
                store.keep(key, ids, SavedState(len(ids), prefix, prefix_bytes(prefix)))


def _batch(sizes: Iterable[tuple[RunningSequence, int]], chunk: int) -> list[RunningSequence]:
    """The first sequences whose unread tokens share a pass of `chunk` tokens, of which half may be padding."""
    batch: list[RunningSequence] = []
    widest = tokens = 0
    for seq, unread in sizes:
        size = min(unread, chunk)
        widest, tokens = max(widest, size), tokens + size
        if batch and (len(batch) + 1) * widest > min(chunk, 2 * tokens):
            break
        batch.append(seq)
    return batch


def _forked(opened: OpenDraft, seq: RunningSequence, source: int | SavedState, length: int) -> int:
    """How many of the first `length` tokens of `source` the draft has copied; raises DraftError for what cannot be."""
    count = opened.proposer.fork(seq, source, length)
    if not 0 <= count <= length:
        kind = type(opened.proposer).__name__
        raise DraftError(f"`{kind}.fork` must return a number of tokens from 0 to {length}, got {count!r}")
    return count
