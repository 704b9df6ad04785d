"""A call under way, which any thread may cancel, and its result.

A `Call` has the checked arguments, a `Request` is its part that the engine runs, and a `Job` runs the request and makes
a `Generation` of its rounds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from queue import SimpleQueue
from time import perf_counter as clock
from time import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specdec.core.draft_schedules.savings import Savings
from specdec.core.outcome import SequenceRound
from specdec.core.sequence import RunningSequence
from specdec.core.stats import Stats, total
from specdec.core.tree import Step
from specdec.engine.driver import Driver
from specdec.errors import CancelledError, EngineError
from specdec.generator.build_request import Call
from specdec.generator.generation import Generation, PerToken, PerTokenAndLayer
from specdec.generator.inputs.prompts import pad_id
from specdec.models import plain_modes

_PHASES = ("draft_seconds", "verify_seconds", "select_seconds")


class Delta(NamedTuple):
    """New steps of one row, of which the draft guessed the first `accepted`; `finish`: why the row ended, or None."""

    row: int
    steps: list[Step]
    accepted: int
    finish: str | None

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return [step.token for step in self.steps]


class Job:
    """Runs a call and collects its result; one thread follows it, any may cancel it. Made by `SpecGenerator.submit`."""

    def __init__(self, call: Call, driver: Driver) -> None:
        self.call = call
        self._driver, self._request = driver, call.request
        self._turn, self._stream = threading.Lock(), False  # held by a follower; whether deltas are streamed
        self._rounds: dict[int, list[SequenceRound]] = {}  # by sequence
        self._phases: dict[str, Any] = dict.fromkeys(_PHASES, 0.0)
        self._savings = Savings()
        self._began = 0.0
        self._seconds: float | None = None  # the time that it ran, once it has ended
        self._result: Generation | None = None

    def run(self) -> Generation:
        """Runs the call to its end and returns its result; raises the error that ended it early."""
        for _ in self.follow(stream=False):
            pass
        assert self._result is not None
        return self._result

    def follow(self, *, stream: bool = True) -> Generator[list[Delta], None, Generation]:
        """Runs the call and returns its result; with `stream` yields the deltas of each round, which wait to be read.

        Without it, and for beams and ranked samples, whose texts are chosen at the end, yields one delta per row then.
        Raises the error that ended the call early: CancelledError after `cancel`. Closing the iterator cancels it.
        """
        if self._result is not None:
            return self._result
        news, request = SimpleQueue[None](), self._request
        self.start(partial(news.put, None), stream=stream, pulls=True)
        try:
            wants = True  # from its start on: another `resume` would have a round computed ahead
            while self._result is None:
                if wants or self._driver.resume(request):
                    news.get()
                wants = False
                yield from self.take()
        except BaseException as error:
            departure = CancelledError("its caller left before its end")
            self._driver.cancel(request, error if isinstance(error, Exception) else departure)
            if self._turn.locked():
                self._end()
            while isinstance(error, KeyboardInterrupt) and not request.done:
                news.get()
            raise
        return self._result

    def start(self, notify: Callable[[], object], *, stream: bool = True, pulls: bool = False) -> None:
        """Starts the call: `notify()` is called in the engine's thread when `take` has something new, and at the end.

        It must return at once; its error ends the call. With `pulls`, each further round waits until the driver resumes
        the request. Raises EngineError for a job that is being followed, and for a closed generator.
        """
        if not self._turn.acquire(blocking=False):
            raise EngineError("this job is being followed: read its deltas there, or submit another")
        call, streamer = self.call, self.call.extras.streamer
        self._stream = stream and not call.options.at_the_end
        is_new = self._seconds is None  # else it has ended, and raises its error again
        self._began = clock() if is_new else self._began
        try:
            if call.time_limit is not None:
                call.time_limit.initial_timestamp = time()
            if streamer is not None and is_new:
                streamer.put(call.prompts.padded)
            self._driver.start(self._request, notify, stream=self._stream or streamer is not None, pulls=pulls)
        except BaseException:
            self._turn.release()
            raise

    def take(self) -> Generator[list[Delta]]:
        """Yields the deltas that are new, if they are streamed, and has the `result` after the last; for one thread.

        Raises the error that ended the call early. The streamer of the call is called here.
        """
        call, streamer, done = self.call, self.call.extras.streamer, self._request.done
        while self._request.rounds:
            round_ = self._request.rounds.popleft()
            for phase in _PHASES:
                self._phases[phase] += getattr(round_, phase)
            self._savings.add(round_)
            for seq in round_.seqs:
                self._rounds.setdefault(seq.id, []).append(seq)
            if not self._stream and streamer is None:
                continue
            index = {seq.id: row for row, seq in enumerate(call.seqs)}
            deltas = [Delta(index[seq.id], seq.steps, seq.accepted, seq.finish) for seq in round_.seqs if seq.steps]
            if streamer is not None and deltas:
                streamer.put(torch.tensor(deltas[0].token_ids))
            if self._stream:
                yield deltas
        if not done:
            return
        seconds = self._end()
        if self._request.error is not None:
            raise self._request.error
        if streamer is not None:
            streamer.end()
        out = self._result = self._make_result(seconds, complete=True)
        if not self._stream:
            assert out.stats is not None
            ends = enumerate(zip(out.new_tokens(), out.stats.finish_reasons, strict=True))
            yield [Delta(row, [Step(token) for token in ids], 0, reason) for row, (ids, reason) in ends]

    def _end(self) -> float:
        """Lets another thread follow; returns the seconds that the call ran."""
        if self._seconds is None:
            self._seconds = clock() - self._began
        self._turn.release()
        return self._seconds

    @property
    def result(self) -> Generation | None:
        """The result once the call has ended; after `cancel` or closing, the texts so far.

        Texts so far have no scores and traces, and the finish reason "cancelled" where they were cut off. None while
        it runs, after a failure, and for cancelled beams and ranked samples.
        """
        if self._result is not None or self._seconds is None or self.call.options.at_the_end:
            return self._result
        was_cancelled = isinstance(self._request.error, CancelledError)
        return self._make_result(self._seconds, complete=False) if was_cancelled else None

    def cancel(self) -> None:
        """Ends the call before its next round; does nothing once it has ended."""
        self._driver.cancel(self._request)

    @plain_modes()
    def _make_result(self, seconds: float, *, complete: bool) -> Generation:
        """The result of a call that ran for so long: to its end if `complete`, and else its texts so far."""
        call, o, pad = self.call, self.call.options, pad_id(self.call.options)
        seqs, padded = call.seqs, call.prompts.padded
        per_row = tuple(_stats_of(seq, self._rounds.get(seq.id, ())) for seq in seqs)
        if complete:
            seqs = seqs if o.num_samples is None else _best(call)
            new = [text for seq in seqs for text in seq.texts]
            reasons: list[Any] = []
            for seq in seqs:
                reasons += [h.reason for h in seq.state.finished[: seq.returned]] if seq.is_search else [seq.finish]
            if o.at_the_end:
                padded = padded[:: o.copies].repeat_interleave(o.num_return_sequences, 0)
        else:
            new = [[step.token for part in self._rounds.get(seq.id, ()) for step in part.steps] for seq in seqs]
            reasons = [row.finish_reasons[0] for row in per_row]
        longest = max(map(len, new))
        ids = torch.tensor([text + [pad] * (longest - len(text)) for text in new], dtype=torch.long)
        out = Generation(sequences=torch.cat([padded, ids], 1).to(call.target.device))
        if complete:
            _add_outputs(out, call, seqs, pad)
        if not any(seq.is_search for seq in seqs):
            row_rounds = [self._rounds.get(seq.id, ()) for seq in seqs]
            out.drafted = [[i < part.accepted for part in row for i in range(len(part.steps))] for row in row_rounds]
        out.stats = self._stats(per_row, seconds, new, reasons)
        if call.extras.tokenizer is not None:
            out.decode(call.extras.tokenizer, o.cut_before)
        return out

    def _stats(
        self, per_row: Sequence[Stats], seconds: float, new: Sequence[list[int]], reasons: Sequence[str]
    ) -> Stats:
        """The statistics of the call, whose texts are the tokens `new`."""
        call = self.call
        draft, schedule = call.draft, type(call.pacing.schedule).__name__.lower()
        settings = {"strategy": call.seqs[0].strategy.name, "schedule": "none" if draft is None else schedule}
        draft_models = () if draft is None else draft.models
        if draft is not None:
            settings["draft_kind"] = draft.kind
        for name, models in (("", [call.target]), ("draft_", draft_models)):
            for part in ("backend", "weight_kind"):
                if values := ", ".join(dict.fromkeys(getattr(model, part) for model in models)):
                    settings[name + part] = values
        return replace(
            total(per_row),
            num_target_passes=call.request.passes,
            seconds=seconds,
            first_token_seconds=max(call.request.first_token - self._began, 0.0),
            loading_seconds=sum(model.loading_seconds for model in {call.target, *draft_models}),
            finish_reasons=tuple(reasons),
            lengths=list(map(len, new)),
            per_row=per_row,
            settings=settings,
            exactness=call.exactness,
            saved_seconds=0.0 if draft is None else self._savings.by(call.pacing.schedule),
            **self._phases,
        )


def _stats_of(seq: RunningSequence, rounds: Sequence[SequenceRound]) -> Stats:
    """The statistics of one sequence; its finish reason is "cancelled" where it was cut off."""
    drafted = [round.drafted for round in rounds if round.drafted]
    accepted = [round.accepted for round in rounds if round.drafted]
    by_source = Counter[str]()
    for round in rounds:
        if round.source and round.accepted:
            by_source[round.source] += round.accepted
    return Stats(
        num_new_tokens=sum(len(round.steps) for round in rounds),
        cached_prompt_tokens=seq.cached_prompt_tokens,
        num_target_passes=len(rounds),
        num_draft_rounds=len(drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        accepted_by_source=dict(by_source),  # as a field, a Counter comes out of `asdict` broken
        per_round_drafted=tuple(drafted),
        per_round_accepted=tuple(accepted),
        finish_reasons=(next((round.finish for round in rounds if round.finish), "cancelled"),),
    )


def _best(call: Call) -> list[RunningSequence]:
    """The best samples of each prompt by rank, the earlier of equals first."""
    o, seqs = call.options, call.seqs
    groups = [seqs[i : i + o.copies] for i in range(0, len(seqs), o.copies)]
    ranked = [sorted(group, key=lambda seq: _score(call, seq), reverse=True) for group in groups]
    return [seq for group in ranked for seq in group[: o.num_return_sequences]]


def _score(call: Call, seq: RunningSequence) -> float:
    """The log-probability of a sample under the target: the mean over its tokens, or their sum with `ranking="sum"`."""
    total = sum(step.log_prob or 0.0 for step in seq.steps)
    return total if call.options.ranking == "sum" else total / len(seq.steps)


def _add_outputs(out: Generation, call: Call, seqs: list[RunningSequence], pad: int) -> None:
    """Adds the outputs that the options name beside the texts of `seqs`, as transformers does."""
    o, encoding, device = call.options, call.request.encoding, call.target.device
    for name in ("scores", "logits"):
        if getattr(o, f"output_{name}"):
            out[name] = tuple(rows.to(device) for rows in _per_token(seqs, name, pad))
    prefix = "" if encoding is None else "decoder_"
    if o.output_hidden_states:
        out[f"{prefix}hidden_states"] = _traces(seqs, "hidden_states")
    if o.output_attentions:
        out[f"{prefix}attentions"] = _traces(seqs, "attentions")
        if encoding is not None:
            out.cross_attentions = _traces(seqs, "cross_attentions")
    if encoding is not None:
        for name in ("hidden_states", "attentions"):
            if (layers := getattr(encoding, name)) is not None:
                out[f"encoder_{name}"] = layers
    if o.num_beams > 1:
        searches = [seq for seq in seqs if seq.is_search]
        texts = [hypothesis for seq in searches for hypothesis in seq.state.finished[: seq.returned]]
        out.beam_indices = _beam_indices([h.origins for h in texts], o.num_beams, o.num_return_sequences).to(device)
        if o.output_trace:
            out.trace = [seq.history for seq in searches]
        if o.output_scores:
            out.sequences_scores = torch.tensor([h.score for h in texts], device=device)
    if o.num_samples is not None:
        out.sequences_scores = torch.tensor([_score(call, seq) for seq in seqs], device=device)


def _beam_indices(origins: Sequence[Sequence[int]], beams: int, returned: int) -> Tensor:
    """`[rows, longest]` int32: the beam, numbered over the whole batch, that each token continued; -1 after the end."""
    longest = max(map(len, origins))
    offsets = [row // returned * beams for row in range(len(origins))]
    rows = [[beam + offset for beam in row] for row, offset in zip(origins, offsets, strict=True)]
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.int32)


def _per_token(seqs: Sequence[RunningSequence], name: str, pad: int) -> PerToken:
    """One `[rows, vocab]` per new token; a search has one row per beam.

    A finished sequence is certain of its padding: 0 there and -inf elsewhere.
    """
    values = [[_rows_of(getattr(step, name), 2, seq.width) for step in seq.steps] for seq in seqs]
    filler = torch.full_like(values[0][0], -torch.inf)  # sequences of a call have the same number of rows
    filler[:, pad : pad + 1] = 0.0  # some checkpoints pad with an id beyond their vocabulary
    return tuple(
        torch.cat([value[t] if t < len(value) else filler for value in values]) for t in range(max(map(len, values)))
    )


def _rows_of(value: Tensor, dims: int, width: int) -> Tensor:
    """`value` with rows as its first dimension; before the first token all beams share one row."""
    value = value if value.dim() == dims else value[None]
    return value if len(value) == width else value.expand(width, *value.shape[1:])


def _traces(seqs: Sequence[RunningSequence], name: str) -> PerTokenAndLayer | None:
    """One tensor over all rows per new token and layer, aligned on the right and padded with zeros."""
    if getattr(seqs[0].traces[0], name) is None:
        return None
    dims = 3 if name == "hidden_states" else 4
    values = [
        [[_rows_of(layer, dims, seq.width) for layer in getattr(trace, name)] for trace in seq.traces] for seq in seqs
    ]
    longest = max(values, key=len)
    return tuple(
        tuple(
            _stacked([v[t][layer] if t < len(v) else torch.zeros_like(longest[t][layer]) for v in values])
            for layer in range(len(longest[t]))
        )
        for t in range(len(longest))
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Tensors `[rows, ...]` of different sizes one after the other, each aligned on the right in the largest size."""
    sizes = [tensor.shape[:0:-1] for tensor in tensors]  # from the last dimension on, as `functional.pad` takes them
    largest = [max(size) for size in zip(*sizes, strict=True)]
    before = [[(full - part, 0) for full, part in zip(largest, size, strict=True)] for size in sizes]
    return torch.cat([functional.pad(tensor, [*chain(*free)]) for tensor, free in zip(tensors, before, strict=True)])
