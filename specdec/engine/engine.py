"""The loop: every strategy, with any draft or none, runs in the rounds of `Engine.step`.

In a round, the draft proposes nodes for each sequence, the target computes logits for all of them in one pass, each
sequence's strategy takes its ordinary steps as far as these logits reach, and the results are committed. So the draft
only decides which logits are computed early. The sequences of all requests share the rounds; prompts are read between
them, in separate passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from specdec.core.outcome import Outcome, Round, SequenceRound, accept
from specdec.core.sequence import RunningSequence
from specdec.core.tree import EMPTY, Tree
from specdec.engine.drafts import Guarded, OpenDrafts, grouped
from specdec.engine.memory import MemoryLimit
from specdec.engine.prefix_cache import PrefixCache
from specdec.engine.request import Request
from specdec.engine.scheduler import Parts, Scheduler
from specdec.models import LanguageModel

_IDLE = 2  # proposers without sequences that keep their buffers for the next request


class Engine:
    """The running sequences of one target: `submit` adds requests, `step` takes all of them a round further.

    Only one thread at a time may call it, with gradients and autocast off (`Driver`). An error of one request ends that
    request alone; one of a draft model, or in a pass, ends all requests that take part.
    """

    def __init__(
        self, model: LanguageModel, *, kv_budget: int | float | None = None, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.model = model
        self.memory = None if kv_budget is None else MemoryLimit(kv_budget, model)
        self.waiting: deque[Request] = deque()
        self._last_id = 0
        self._begin(prefix_cache)

    def _begin(self, prefix_cache: PrefixCache | None) -> None:
        """Makes the engine empty."""
        self.waiting.clear()
        self.running: list[RunningSequence] = []
        self._requests: dict[int, Request] = {}  # by the ids of their sequences
        self._failed: dict[Request, BaseException] = {}  # requests that end with this round
        # An exception within `self._guard(seqs)` ends their requests: they take no further part in the round.
        self._guard = partial(Guarded, requests=self._requests, failed=self._failed)
        self.drafts = OpenDrafts(self.model, self._requests, self._guard)
        self.scheduler = Scheduler(self.model, prefix_cache, self.drafts)
        self.session = self.scheduler.session

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self.waiting or self.scheduler.prefilling or self.running)

    def submit(self, request: Request) -> None:
        """Adds a request to those that wait for memory."""
        request.pacing.users.add(request)
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request and frees its keys and values."""
        with suppress(ValueError):
            self.waiting.remove(request)
        self._end(request)

    def abort(self, error: BaseException) -> None:
        """Ends every request with `error` and drops all keys and values, since a pass may have been interrupted."""
        for request in dict.fromkeys([*self.waiting, *self._requests.values()]):
            request.error = error
            self._finish(request)
        self._begin(self.scheduler.prefix_cache)

    def step(self) -> None:
        """Admits requests, reads at most one chunk of prompts, and runs a round of the sequences that were running."""
        while self.waiting:
            request = self.waiting[0]
            if self.memory is not None and not self.memory.fits(request, self._requests.values()):
                break
            self._admit(request)
            self.waiting.popleft()
            if request.encode is not None and self.running:
                break  # running sequences wait for one encoder pass at a time
        # A sequence whose prompt ends in this step joins in the next one, after its first token is delivered.
        running = list(self.running)
        if self.scheduler.prefilling:
            self._prefill()
        running = [seq for seq in running if seq.id in self._requests]
        if running:
            self._round(running)

    def _round(self, seqs: Sequence[RunningSequence], parts: Parts | None = None) -> None:
        """One round: propose, run, accept, commit. With `parts`: over so much of these unread prompts."""
        began = perf_counter()
        proposals = self._propose(seqs, parts)
        after_draft = perf_counter()
        outcomes = self._run(seqs, proposals, parts or {})
        after_pass = perf_counter()
        nodes = sum(outcome.out.work.num_new for outcome in outcomes)
        outcomes = self._accept(outcomes)
        after_choice = perf_counter()
        rounds = self._commit(outcomes)
        phases = after_draft - began, after_pass - after_draft, after_choice - after_pass
        self._deliver(outcomes, Round(rounds, nodes, *phases, perf_counter() - began))
        self._end_failed()
        if ended := [outcome.seq for outcome in outcomes if outcome.finish is not None]:
            self._release(ended)

    def _propose(self, seqs: Sequence[RunningSequence], parts: Parts | None) -> dict[int, Tree]:
        """The proposals by sequence id, for texts with a token; of prompts, where this pass reads them to the end."""
        ready = [seq for seq in seqs if seq.tokens]
        if parts is not None:
            ready = [seq for seq in ready if parts[seq] is None and not self.scheduler.has_unread_pictures(seq)]
        return self.drafts.propose(ready, self.scheduler.catch_up, reading=parts is not None)

    def _run(self, seqs: Sequence[RunningSequence], proposals: dict[int, Tree], parts: Parts) -> list[Outcome]:
        """One target pass over the works of all sequences; nothing if it failed."""
        seqs = [seq for seq in seqs if self._requests[seq.id] not in self._failed]
        if not seqs:
            return []
        requests = {self._requests[seq.id] for seq in seqs}
        layers = sorted(
            {layer for request in requests if request.draft is not None for layer in request.draft.hidden_layers}
        )
        every_layer = any(request.output_hidden_states or request.last_hidden for request in requests)
        attentions = any(request.output_attentions for request in requests)
        outcomes: list[Outcome] = []
        with self._guard(seqs):
            works = []
            for seq in seqs:
                rows = [row_seq.cache_row for row_seq in seq.batch_seqs]
                if self.session.cache_reset_length is not None:
                    self.session.refresh(rows)
                lengths = [self.session.length(row) for row in rows]
                works.append(seq.works(lengths, proposals.get(seq.id, EMPTY), chunk=parts.get(seq)))
            together = [work for seq_works in works for work in seq_works]
            outputs = iter(self.session.run(together, hidden=every_layer or layers, attentions=attentions))
            for seq, seq_works in zip(seqs, works, strict=True):
                out, *unconditional = [next(outputs) for _ in seq_works]
                out.logits = out.logits.cpu()  # strategies read values one by one, and each read of a device waits
                for second in unconditional:
                    out = replace(out, unconditional=second.logits.cpu(), passes=[*out.passes, *second.passes])
                outcomes.append(Outcome(seq, seq_works, out))
        return outcomes

    def _accept(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Runs every sequence's strategy as far as the logits reach; returns the outcomes of the sound ones."""
        for outcome in outcomes:
            if outcome.out.work.num_logits:
                out, request = outcome.out, self._requests[outcome.seq.id]
                with self._guard([outcome.seq]):
                    plain = out.hidden_states is None and out.attentions is None
                    accept(outcome, out if plain else request.select(out))
        return [outcome for outcome in outcomes if self._requests[outcome.seq.id] not in self._failed]

    def _commit(self, outcomes: Sequence[Outcome]) -> list[SequenceRound]:
        """Writes the outcomes to the target's cache, the sequences and the drafts."""
        messages = [self.drafts.message(outcome, self.session) for outcome in outcomes]
        passed = [(outcome, work) for outcome in outcomes for work in outcome.works]
        self.session.commit(
            [work.row for _, work in passed],
            [work.path(outcome.path) for outcome, work in passed],
            num_texts=[work.num_text + outcome.num_text for outcome, work in passed],
        )
        rounds = []
        for outcome in outcomes:
            if outcome.states:
                rounds.append(outcome.round(self.drafts.num_read.get(outcome.seq.id, 0)))
                outcome.apply()
        self.drafts.update([message for message in messages if message is not None])
        return rounds

    def _deliver(self, outcomes: Sequence[Outcome], round_: Round) -> None:
        """Gives the round to requests, and to the schedules that learn from it."""
        outcomes = [outcome for outcome in outcomes if self._requests[outcome.seq.id] not in self._failed]
        by_id = {seq.id: seq for seq in round_.seqs}
        for request, together in grouped(outcomes, lambda outcome: self._requests[outcome.seq.id]):
            request.passes += len({number for outcome in together for number in outcome.out.passes})
            seqs = [by_id[outcome.seq.id] for outcome in together if outcome.states]
            request.rounds.append(round_.of(seqs))
            if not request.first_token and any(seq.steps for seq in seqs):
                request.first_token = perf_counter()
        decided = [outcome.seq for outcome in outcomes if outcome.states]
        drafting = [seq for seq in decided if self._requests[seq.id].draft is not None]
        for pacing, group in grouped(drafting, lambda seq: self._requests[seq.id].pacing):
            with self._guard(group):
                pacing.schedule = pacing.schedule.after(round_.of([by_id[seq.id] for seq in group]))

    def _admit(self, request: Request) -> None:
        """Takes in a request: starts its draft, runs its encoder, makes room in the caches."""
        for seq in request.seqs:
            self._last_id += 1
            seq.id = self._last_id
            self._requests[seq.id] = request
        with self._guard(request.seqs):
            if request.draft is not None and id(request.draft) not in self.drafts.open:
                self.drafts.start(request.draft, self.session)
            if request.encode is not None:
                request.encoding = request.encode()
            if self.memory is not None:
                self._make_room(self.memory)
            self.scheduler.add(request)
        self._end_failed()

    def _make_room(self, memory: MemoryLimit) -> None:
        """Bounds the caches of target and drafts, and shrinks the prefix cache to the memory that is left."""
        admitted = list(dict.fromkeys(self._requests.values()))
        ample = memory.ample(admitted)
        self.session.bound(*ample)
        for opened in self.drafts.open.values():
            opened.proposer.bound(*ample)
        prefix_cache = self.scheduler.prefix_cache
        prefix_cache.room = memory.limit - max(memory.bytes(admitted), memory.buffer_bytes)
        prefix_cache.shrink()

    def _prefill(self) -> None:
        """One pass over unread prompts."""
        parts = self.scheduler.next_prompts(self.running)
        self._end_failed()
        if seqs := [seq for seq in parts if seq.id in self._requests]:
            self._round(seqs, parts)
            self.running += self.scheduler.update(seqs)

    def _release(self, seqs: Sequence[RunningSequence]) -> None:
        """Removes sequences with their keys and values; a request without sequences is done."""
        present = [seq for seq in seqs if seq.id in self._requests]
        self.scheduler.remove(present)
        self.drafts.release(present)
        requests = {self._requests.pop(seq.id) for seq in present}
        self.running = [seq for seq in self.running if seq.id in self._requests]
        for request in requests:
            if all(seq.id not in self._requests for seq in request.seqs):
                self._finish(request)
        used = {id(request.draft) for request in self._requests.values()}
        idle = [key for key in self.drafts.open if key not in used]
        for key in idle[:-_IDLE] if self.memory is None else idle:
            self.drafts.open.pop(key).proposer.bound(0, 0)  # frees its buffers, which are part of reference cycles

    def _end_failed(self) -> None:
        while self._failed:
            request, error = self._failed.popitem()
            request.error = error
            self._end(request)

    def _end(self, request: Request) -> None:
        """Ends a request before its sequences have finished."""
        self._release(request.seqs)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        request.pacing.users.discard(request)
        request.done = True
