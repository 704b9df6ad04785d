"""The processes of a job that share a model: rank 0 runs the program, the others run its commands.

A command is a function with arguments, which every process applies to its own part of shared things (models, sessions,
kept prefixes). In a message a shared thing is a number. So rank 0 alone decides whatever depends on clocks, seeds,
arrivals or callers.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging

from specdec.errors import EngineError, LoadError, OptionError, SpecdecError

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for a silent one that has not ended; some load far longer than others."""
_LET_GO = 0.1  # seconds for gloo to free the last tensors, which aborts an interpreter that is ending
_BEAT = 60.0  # seconds without a message until rank 0 sends an empty one
_OTHERS = "start the job again, and look at the output of the other processes"


class Shared:
    """Something of which every process has a part, under the same `number`: its `own`, or else the thing itself."""

    number: int


class RankGroup:
    """Carries rank 0's messages, in order, to the processes that torchrun, or another launcher, started together."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, message: bytes) -> None:
        """Sends a message to all others; raises RuntimeError if one of them has ended."""
        dist.broadcast_object_list([message], 0, group=self._group)

    def receive(self) -> bytes:
        """The next message of rank 0."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, 0, group=self._group)
        return bytes(received[0])

    def gather(self, outcome: str | None) -> Sequence[str | None]:
        """The outcomes of all processes, by rank: an error's message, None for success."""
        outcomes: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group=self._group)
        return outcomes


class _Command(NamedTuple):
    """A function to run; its result is kept under `number`, and the things `gone` are dropped before.

    `reports`: every process reports the outcome.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any]
    number: int | None = None
    reports: bool = False
    gone: Sequence[int] = ()

    def run(self) -> Any:
        """Applies the function to this process's part of the first argument."""
        first, *others = self.arguments
        return self.function(getattr(first, "own", first), *others, **self.options)


class Ranks:
    """Rank 0's control of the other processes: what it does to something shared, all do.

    Thread-safe; one command runs at a time. An error in the middle of a pass leaves the processes out of step; every
    later command raises EngineError.
    """

    def __init__(self, job: RankGroup) -> None:
        self._job = job
        self._numbers = count()
        self._gone: deque[int] = deque()  # numbers of things that rank 0 has dropped
        self._unsent = bytearray()
        self._turn, self._sending = threading.RLock(), threading.RLock()
        self._thread: int | None = None
        self._last_sent = time.monotonic()
        self._broken: str | None = None

    @property
    def in_command(self) -> bool:
        return self._thread == threading.get_ident()

    def do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Runs a function on every process at once, as a pass requires; returns this process's result.

        Raises the function's SpecdecError, which it must raise before it begins, and EngineError for any other.
        """
        with self._commanding(_Command(function, arguments, options)) as command:
            self._send()
            return command.run()

    def note(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The same without waiting: the others run it before the next `do`."""
        with self._commanding(_Command(function, arguments, options)) as command:
            return command.run()

    def make(self, function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
        """`note`, with a result that all keep until `drop_with`; returns its number and this process's result."""
        number = next(self._numbers)
        with self._commanding(_Command(function, arguments, {}, number)) as command:
            return number, command.run()

    def load(self, function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
        """`make` at once, waiting until all processes have succeeded; raises LoadError if one has not."""
        number = next(self._numbers)
        given = _Command(function, arguments, {}, number, reports=True)
        with self._commanding(given) as command, self._sending:  # no `beat` between the command and the reports
            self._send()
            try:
                found = command.run()
            except Exception as error:
                self._job.gather(str(error))
                raise
            for rank, outcome in enumerate(self._job.gather(None)):
                if outcome is not None:
                    raise LoadError(f"process {rank}: {outcome}")
            return number, found

    def drop_with(self, thing: Any, number: int) -> None:
        """Lets the others drop what they keep under `number` once `thing` is collected."""
        weakref.finalize(thing, self._gone.append, number)

    def end(self, patience: float = 60.0) -> bool:
        """Ends the others once the running command is done, within `patience` seconds; returns whether it did."""
        if not self._turn.acquire(timeout=patience):
            return False
        try:
            if self._broken is not None:
                return False
            self._broken = "the job was ended"
            self._unsent += _packed(None)
            self._send()
            return True
        except RuntimeError:
            return False
        finally:
            self._turn.release()

    def beat(self, quiet: float) -> None:
        """Sends an empty message after `quiet` seconds without one; if a process has ended, the job is broken."""
        with self._sending:
            if self._broken is None and time.monotonic() - self._last_sent >= quiet:
                try:
                    self._send(b"")
                except RuntimeError as error:
                    self._broken = _lost(error)

    @contextmanager
    def _commanding(self, command: _Command) -> Iterator[_Command]:
        """Gives this thread the turn, with the command in the next message: packed now, as its arguments may change.

        Raises EngineError if the processes are out of step, now or afterwards.
        """
        with self._turn:
            if self._broken is not None:
                raise EngineError(self._broken)
            assert self._thread is None, "a command issued a command"
            self._thread = threading.get_ident()
            try:
                gone = [self._gone.popleft() for _ in range(len(self._gone))]
                self._unsent += _packed(command._replace(gone=gone))
                yield command
            except SpecdecError:
                raise
            except BaseException as error:
                self._broken = _lost(error)
                if isinstance(error, Exception):
                    raise EngineError(self._broken) from error
                raise
            finally:
                self._thread = None

    def _send(self, message: bytes | None = None) -> None:
        """Sends the commands that were written, or a message."""
        if message is None:
            message, self._unsent = bytes(self._unsent), bytearray()
        with self._sending:
            self._job.send(message)
            self._last_sent = time.monotonic()


class Follower:
    """Runs rank 0's commands in another process; `report` gets the outcome of those with `reports`."""

    def __init__(self, report: Callable[[str | None], Any]) -> None:
        self._things: dict[int, Any] = {}
        self._report = report

    def run(self, message: bytes) -> bool:
        """Runs a message's commands; returns False after the last message.

        Raises EngineError for an error that leaves the processes out of step.
        """
        file = io.BytesIO(message)
        while file.tell() < len(message):
            command = _Unpickler(file, self._things).load()
            if command is None:
                return False
            self._do(command)
        return True

    def _do(self, command: _Command) -> None:
        for number in command.gone:
            self._things.pop(number, None)
        try:
            made = command.run()
        except Exception as error:
            if command.reports:
                self._report(str(error))
            elif not isinstance(error, SpecdecError):  # these are raised by rank 0 as well
                raise EngineError(f"a pass failed here, and the job cannot go on ({_brief(error)})") from error
            return
        if command.number is not None:
            self._things[command.number] = made
        if command.reports:
            self._report(None)


class _Pickler(pickle.Pickler):
    """Writes shared things as numbers, and tensors from the host's memory."""

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, Shared):
            return thing.number
        return thing.cpu() if isinstance(thing, Tensor) and thing.device.type != "cpu" else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, things: dict[int, Any]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, found: Any) -> Any:
        return self._things[found] if isinstance(found, int) else found


def _packed(command: _Command | None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(command)
    return file.getvalue()


def _brief(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _lost(error: BaseException) -> str:
    return f"a process of this job ended, or failed in a pass that all take part in ({_brief(error)}): {_OTHERS}"


_own: list[Ranks] = []  # this process's, if it is rank 0


def join_ranks() -> Ranks | None:
    """Rank 0's control of the other processes; None for a job of one process.

    The others never return: they run rank 0's commands, and raise SystemExit when it ends. Raises OptionError if no job
    was started, and EngineError in processes that lose rank 0.
    """
    if _own:
        return _own[0]
    _start()
    if dist.get_world_size() == 1:
        return None
    job = RankGroup()
    if dist.get_rank():
        _follow(job)
        raise SystemExit(0)
    ranks = Ranks(job)
    _own.append(ranks)
    atexit.register(_leave, ranks)
    threading.Thread(target=_keep_alive, args=(ranks,), name="specdec-ranks", daemon=True).start()
    return ranks


def _start() -> None:
    """Starts the job's process group, and selects this process's device."""
    if dist.is_initialized():
        return
    if missing := [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]:
        raise OptionError(
            f"`tp_plan` shares a model among the processes of a job, and this process was started alone ({missing[0]} "
            "is not set): start it with torchrun --nproc-per-node N"
        )
    device, place = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"), None
    if device.type != "cpu":
        own, here = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if own >= here:
            raise OptionError(f"process {own} of this machine finds {here} devices: start no more processes than that")
        torch.accelerator.set_device_index(own)
        place = torch.device(device.type, own)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=_PATIENCE, device_id=place if backend == "nccl" else None)


def _follow(job: RankGroup) -> None:
    """Runs rank 0's commands until it ends; ignores Ctrl-C and prints nothing, which are rank 0's part."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    follower, goes_on = Follower(job.gather), True
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        while goes_on:
            try:
                message = job.receive()
            except RuntimeError as error:
                gone = f"process 0, which leads this job, is gone ({_brief(error)}): start the job again"
                raise EngineError(gone) from error
            goes_on = follower.run(message)
    dist.destroy_process_group()


def _keep_alive(ranks: Ranks) -> None:
    while True:
        time.sleep(_BEAT / 4)
        ranks.beat(_BEAT)


def leave(code: int) -> None:
    """Ends the job and this process with an exit code, if it is rank 0.

    Skips the interpreter's clean-up, in which torch threads that still run have ended programs by a signal.
    """
    if _own:
        _leave(_own[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave(ranks: Ranks) -> None:
    """Ends the job, unless it is broken, and its process group."""
    if ranks.end() and dist.is_initialized():
        time.sleep(_LET_GO)
        dist.destroy_process_group()
