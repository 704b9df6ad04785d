"""The processes of a job that share a model: rank 0 runs the program, the others do what it tells them.

What is told are functions with their arguments, which every process applies to its own part of what they share: models,
sessions, kept texts. In a message such a thing is a number. So whatever depends on clocks, seeds, arrivals or callers
is decided once, and the others never see it.
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
from abc import ABC, abstractmethod
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
"""How long a process waits for another one that says nothing but has not ended; some load far longer than others."""
_LET_GO = 0.1  # seconds in which gloo frees the last tensors: while the interpreter ends, that would abort it
_BEAT = 60.0  # seconds without a message until rank 0 gives a sign of life
_FIRST = 2048  # bytes that a message takes at least
_LENGTH = 8  # bytes in front that say how long it is
_OTHERS = "start the job again, and look at what the other processes said"


class Shared:
    """Something of which every process has its own part; `number` says which, `own` is the part of this process."""

    number: int

    @property
    def own(self) -> Any:
        """What functions are applied to here."""
        return self


class Channel(ABC):
    """What rank 0 tells the others through, in the order in which it does."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Tells all others; raises RuntimeError where one of them is gone."""

    @abstractmethod
    def gather(self, outcome: str | None) -> Sequence[str | None]:
        """What every process, this one included, says of what it did; None where it went well."""


class _Command(NamedTuple):
    """One thing to do, the number of what comes of it, and what nobody needs any more.

    `reports`: everybody says how it went.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any]
    number: int | None
    gone: Sequence[int]
    reports: bool


class Ranks:
    """Rank 0's say over the other processes: what it does to something shared, all do.

    Threads may call; one thing is done at a time. Whatever goes wrong in the middle of a pass leaves the processes out
    of step, and then nothing more can be done with them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count()
        self._gone: deque[int] = deque()  # of things that nobody here holds any more
        self._unsent = bytearray()
        self._turn, self._sending = threading.RLock(), threading.RLock()
        self._thread: int | None = None
        self._last_sent = time.monotonic()
        self._broken: str | None = None

    @property
    def in_command(self) -> bool:
        """Whether this thread does something that all do."""
        return self._thread == threading.get_ident()

    def do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Applies a function on every process at once, as a pass must be; returns what comes of it here.

        Raises what the function raises of specdec's own errors, before anything is begun, and EngineError for what
        leaves the processes out of step.
        """
        with self._commanding():
            self._note(function, arguments, options)
            self._send()
            return self._done(function, arguments, options)

    def note(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The same for what needs nobody else: the others do it before the next thing that all do at once."""
        with self._commanding():
            self._note(function, arguments, options)
            return self._done(function, arguments, options)

    def make(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[int, Any]:
        """`note`; everybody keeps what comes of it, under the number that is returned, until it is dropped."""
        number = next(self._numbers)
        with self._commanding():
            self._note(function, arguments, options, number)
            return number, self._done(function, arguments, options)

    def load(self, function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
        """`make` at once, and waits until all have it; raises LoadError where one of them does not."""
        number = next(self._numbers)
        with self._commanding(), self._sending:  # no sign of life between what is told and the reports
            self._note(function, arguments, {}, number, reports=True)
            self._send()
            try:
                found = self._done(function, arguments, {})
            except Exception as error:
                self._gather(str(error))
                raise
            for rank, outcomes in enumerate(self._gather(None)):
                if outcomes is not None:
                    raise LoadError(f"process {rank}: {outcomes}")
            return number, found

    def drop_with(self, thing: Any, number: int) -> None:
        """Lets the others forget what they have under a number some time after `thing` is gone."""
        weakref.finalize(thing, self._gone.append, number)

    def end(self, patience: float = 60.0) -> bool:
        """Lets the others go, after what is under way, for which it waits so many seconds; whether that went well."""
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
        """Gives a sign of life after so many seconds without a message; where nobody is there, nothing can be done."""
        with self._sending:
            if self._broken is None and time.monotonic() - self._last_sent >= quiet:
                try:
                    self._send_bytes(b"")
                except RuntimeError as error:
                    self._broken = _lost(error)

    @contextmanager
    def _commanding(self) -> Iterator[None]:
        """This thread's turn; raises EngineError where the processes are out of step, now or afterwards."""
        with self._turn:
            if self._broken is not None:
                raise EngineError(self._broken)
            assert self._thread is None, "what all do tells nothing by itself"
            self._thread = threading.get_ident()
            try:
                yield
            except SpecdecError:
                raise
            except BaseException as error:
                self._broken = _lost(error)
                if isinstance(error, Exception):
                    raise EngineError(self._broken) from error
                raise
            finally:
                self._thread = None

    def _note(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: dict[str, Any],
        number: int | None = None,
        *,
        reports: bool = False,
    ) -> None:
        """Writes down what the others are to do; as it is now, for whatever holds the arguments may change them."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        self._unsent += _packed(_Command(function, arguments, options, number, gone, reports))

    def _done(self, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        first, *rest = arguments
        return function(first.own if isinstance(first, Shared) else first, *rest, **options)

    def _gather(self, own: str | None) -> Sequence[str | None]:
        with self._sending:
            return self._channel.gather(own)

    def _send(self) -> None:
        message, self._unsent = bytes(self._unsent), bytearray()
        with self._sending:
            self._send_bytes(message)

    def _send_bytes(self, message: bytes) -> None:
        self._channel.send(message)
        self._last_sent = time.monotonic()


class Follower:
    """A process that does what rank 0 tells it; `report` is called with how it went, where that is asked for."""

    def __init__(self, report: Callable[[str | None], Any]) -> None:
        self._things: dict[int, Any] = {}
        self._report = report

    def run(self, message: bytes) -> bool:
        """Does what a message says; whether there is more to come.

        Raises EngineError for what leaves the processes out of step.
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
            made = command.function(*command.arguments, **command.options)
        except Exception as error:
            if command.reports:
                self._report(str(error))
            elif not isinstance(error, SpecdecError):  # rank 0 raises those too
                raise EngineError(f"a pass failed here, and the job cannot go on ({_brief(error)})") from error
            return
        if command.number is not None:
            self._things[command.number] = made
        if command.reports:
            self._report(None)


class _Pickler(pickle.Pickler):
    """Shared things are numbers in a message, and tensors come from the host's memory."""

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
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _lost(error: BaseException) -> str:
    return f"a process of this job ended, or failed in a pass that all take part in ({_brief(error)}): {_OTHERS}"


class _Job(Channel):
    """The processes that torchrun, or another launcher, started together."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, message: bytes) -> None:
        length = len(message).to_bytes(_LENGTH, "little")
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        head = length + message[: _FIRST - _LENGTH]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._group)
        if rest := message[_FIRST - _LENGTH :]:
            dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> bytes:
        """The next message of rank 0."""
        first = torch.empty(_FIRST, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._group)
        head = first.numpy().tobytes()
        length, message = int.from_bytes(head[:_LENGTH], "little"), head[_LENGTH:]
        if length <= len(message):
            return message[:length]
        rest = torch.empty(length - len(message), dtype=torch.uint8)
        dist.broadcast(rest, 0, group=self._group)
        return message + rest.numpy().tobytes()

    def gather(self, outcome: str | None) -> Sequence[str | None]:
        outcomes: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group=self._group)
        return outcomes


_own: list[Ranks] = []  # of this process, where it leads


def join(option: str) -> Ranks | None:
    """Rank 0's say over the others of its job; None for a job of one process.

    All others stay in here and do what they are told; when rank 0 ends they leave the program (SystemExit). `option` is
    what the caller calls the argument that asks for it. Raises OptionError where no job was started, and EngineError in
    processes that lose rank 0.
    """
    if _own:
        return _own[0]
    _start(option)
    if dist.get_world_size() == 1:
        return None
    job = _Job()
    if dist.get_rank():
        _follow(job)
        raise SystemExit(0)
    ranks = Ranks(job)
    _own.append(ranks)
    atexit.register(_leave, ranks)
    threading.Thread(target=_keep_alive, args=(ranks,), name="specdec-ranks", daemon=True).start()
    return ranks


def _start(option: str) -> None:
    """The process group of the job, and the device of this process."""
    if dist.is_initialized():
        return
    if missing := [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]:
        raise OptionError(
            f"`{option}` shares a model among the processes of a job, and this one was started alone ({missing[0]} is "
            "not set): start it with torchrun --nproc-per-node N"
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


def _follow(job: _Job) -> None:
    """Does what rank 0 says until it ends; it alone hears Ctrl-C and has something to print."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    follower = Follower(job.gather)
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        while follower.run(_received(job)):
            pass
    dist.destroy_process_group()


def _received(job: _Job) -> bytes:
    try:
        return job.receive()
    except RuntimeError as error:
        raise EngineError(f"process 0, which leads this job, is gone ({_brief(error)}): start the job again") from error


def _keep_alive(ranks: Ranks) -> None:
    while True:
        time.sleep(_BEAT / 4)
        ranks.beat(_BEAT)


def leave(code: int) -> None:
    """Ends the job and this process, if it leads one, with an exit code.

    Nothing is taken apart at the end: threads of torch that still run then have ended programs by a signal.
    """
    if _own:
        _leave(_own[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave(ranks: Ranks) -> None:
    """At the end of the program; of a job that is broken nothing can be put in order."""
    if ranks.end() and dist.is_initialized():
        time.sleep(_LET_GO)
        dist.destroy_process_group()
