"""A call under way, which any thread may cancel.

A `Call` has the checked arguments, a `Request` is what the engine runs of it, and a `Job` runs the request and collects
its results.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from time import perf_counter as clock
from time import time
from typing import NamedTuple

import torch

from specdec.core.tree import Step
from specdec.engine.driver import Driver
from specdec.errors import CancelledError
from specdec.generator.build_request import Call
from specdec.generator.generation import Generation
from specdec.generator.result import Recorder, finished, unfinished


class Delta(NamedTuple):
    """What one round added to one row: its steps, the first `accepted` guessed by the draft; why it ended, or None."""

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
        self._driver = driver
        self._recorder = Recorder()
        self._seconds: float | None = None  # that it ran, once it has ended
        self._result: Generation | None = None

    def run(self) -> Generation:
        """Runs the call to its end and returns its result; raises what ended it early."""
        for _ in self.follow(stream=False):
            pass  # it yields nothing
        assert self._result is not None
        return self._result

    def follow(self, *, stream: bool = True) -> Generator[list[Delta], None, Generation]:
        """Runs the call and returns its result; with `stream` yields the deltas of each round.

        Beams and ranked samples, whose texts are chosen at the end, yield nothing. Raises what ended the call early:
        CancelledError after `cancel`. Closing the iterator cancels the call.
        """
        began, call, streamer = clock(), self.call, self.call.extras.streamer
        stream = stream and not call.options.at_the_end
        if call.time_limit is not None:
            call.time_limit.initial_timestamp = time()
        if streamer is not None:
            streamer.put(call.prompts.padded)
        index: dict[int, int] = {}  # rows by the ids of sequences, which the engine gives when it admits them
        rounds = self._driver.rounds(call.request, stream=stream or streamer is not None)
        try:
            with call.in_step, closing(rounds):
                for round_ in rounds:
                    self._recorder.add(round_)
                    index = index or {seq.id: row for row, seq in enumerate(call.seqs)}
                    deltas = [
                        Delta(index[seq.id], seq.steps, seq.accepted, seq.finish) for seq in round_.seqs if seq.steps
                    ]
                    if streamer is not None and deltas:
                        streamer.put(torch.tensor(deltas[0].token_ids))
                    if stream:
                        yield deltas
        finally:
            self._seconds = clock() - began
        if streamer is not None:
            streamer.end()
        self._result = finished(call, self._recorder, self._seconds)
        return self._result

    @property
    def result(self) -> Generation | None:
        """The result once `follow` has ended; after `cancel` or closing, the texts so far.

        Texts so far have no scores and traces, and the finish reason "cancelled" where they were cut off. None while
        it runs, after a failure, and for cancelled beams and ranked samples.
        """
        if self._result is not None or self._seconds is None or self.call.options.at_the_end:
            return self._result
        error = self.call.request.error
        failed = error is not None and not isinstance(error, CancelledError)
        return None if failed else unfinished(self.call, self._recorder, self._seconds)

    def cancel(self) -> None:
        """Ends the call before its next round; does nothing once it has ended."""
        self._driver.cancel(self.call.request)
