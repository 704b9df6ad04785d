"""One thread runs an engine, and tells callers what is new of their requests."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from weakref import WeakSet

import torch

from specdec.engine.engine import Engine
from specdec.engine.openmp import Threads, release_helpers, use_threads
from specdec.engine.request import Request
from specdec.errors import CancelledError, EngineError
from specdec.models import plain_modes

_log = logging.getLogger(__name__)
_IDLE = 0.01  # seconds without a wanted step after which the thread ends; starting one takes 0.1 ms
_PATIENCE = 10.0  # seconds that the interpreter waits at its end for the current step


@dataclass(eq=False)
class _Caller:
    """Who is told of a request, by `notify`: of its end and, with `stream`, of each of its rounds.

    `waits`: whether it wants steps; one that `pulls` wants none from when it was told until it resumes.
    """

    notify: Callable[[], object]
    stream: bool
    pulls: bool
    waits: bool = True


class Driver:
    """Callers start and cancel requests; one thread, "specdec-engine", takes the engine's steps for all of them.

    The thread starts when it is needed, takes steps while any caller wants one, and ends soon afterwards. Code that
    runs inside requests (processors, criteria, drafts, schedules) runs in it, and must not wait for another call of the
    same generator: a direct call raises EngineError; one in a further thread deadlocks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._closed = False
        self._broken: Exception | None = None
        self._begin()
        _drivers.add(self)

    def _begin(self) -> None:
        # Reentrant: garbage collection may close a stream while its thread holds the lock.
        self._lock = threading.RLock()
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()  # what the thread does before its next step
        self._open: dict[Request, _Caller] = {}
        self._thread: threading.Thread | None = None
        self._num_threads = 1  # on which torch computes: as many as in the last caller's thread
        self._used = Threads()

    def start(
        self, request: Request, notify: Callable[[], object], *, stream: bool = False, pulls: bool = False
    ) -> None:
        """Starts a request; `notify` is called in the engine's thread at its end, with `stream` after each round too.

        With `pulls`, each further round waits for `resume`. Raises the error of a request that was cancelled, and
        EngineError for a call from within the engine.
        """
        self._refuse_nested_call()
        if self.engine.memory is not None:
            self.engine.memory.check(request)
        release_helpers()
        with self._lock:
            self.check_open()
            if self._broken is not None:
                raise self._broken
            if request.done:
                notify()
                return
            if request.error is not None:
                raise request.error
            self._start_thread()
            self._open[request], self._num_threads = _Caller(notify, stream, pulls), torch.get_num_threads()
            self._inbox.put(partial(self._submit, request))

    def resume(self, request: Request) -> bool:
        """Says that the caller of a request waits for its next round; False for a request that has ended."""
        self._refuse_nested_call()
        release_helpers()
        with self._lock:
            if (caller := self._open.get(request)) is not None:
                caller.waits = True
                self._start_thread()
                self._inbox.put(_nothing)
            return caller is not None

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """Ends a request before its next round, without waiting; its caller gets the error, else CancelledError.

        A request that is done stays as it is; one that is not started will not begin.
        """
        with self._lock:
            if request.done or request.error is not None:
                return
            request.error = error or CancelledError("the call was cancelled")
            if request in self._open:
                self._start_thread()
                self._inbox.put(partial(self.engine.cancel, request))
            else:
                request.done = True

    def close(self, why: str = "the generator was closed", patience: float | None = None) -> None:
        """Cancels all calls, ends the thread that runs them, and frees all keys and values.

        Waits for the pass under way, so many seconds at most; later calls raise EngineError. Inside a call (in a
        processor, say) this raises it.
        """
        self._refuse_nested_call()
        with self._lock:
            self._closed = True
            for request in list(self._open):
                self.cancel(request, CancelledError(why))
            self._inbox.put(_nothing)
            thread = self._thread
        if thread is not None:
            thread.join(patience)
        if patience is None:
            self.engine.abort(CancelledError(why))
            self.engine.scheduler.prefix_cache.clear()
            gc.collect()  # sessions are parts of reference cycles

    def check_open(self) -> None:
        """Raises EngineError after `close`."""
        if self._closed:
            raise EngineError("this SpecGenerator is closed: make another one")

    def forget(self) -> None:
        """In a forked process, which has no thread of its parent: ends the requests that were open."""
        was_open = list(self._open)
        self._begin()
        if was_open:
            self._abort(CancelledError("the process was forked, and the call is its parent's"), was_open)

    def _abort(self, error: BaseException, requests: Iterable[Request]) -> None:
        """Ends all requests, also unknown ones; an engine that cannot begin anew stays broken."""
        for request in requests:
            request.error, request.done = request.error or error, True
        try:
            self.engine.abort(error)
        except Exception as broken:
            self._broken = broken

    def _refuse_nested_call(self) -> None:
        """Raises EngineError in the engine's thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise EngineError(
                "a processor, criterion, draft or schedule called the generator that it runs in: use another "
                "SpecGenerator there (models can be shared)"
            )

    def _start_thread(self) -> None:
        """Starts the engine's thread, unless it runs; with the lock held."""
        if self._thread is None:
            atexit.unregister(_close_all)  # before all handlers that are registered by now
            atexit.register(_close_all)
            self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
            _threads.add(self._thread)
            try:
                self._thread.start()
            except BaseException as error:  # an interrupt: the thread, if it has started, ends
                self._thread = None
                if isinstance(error, RuntimeError):
                    raise EngineError(f"the thread that runs the engine could not start ({error})") from error
                raise

    def _run(self) -> None:
        """Takes steps until none is wanted; an error here is a defect, as what runs for a request is guarded."""
        with self._lock:  # until then, an interrupt of whoever starts it may reset `_thread`
            pass
        with plain_modes():
            while True:
                try:
                    while self._is_wanted():
                        self._used.use(self._num_threads)
                        self.engine.step()
                        self._tell()
                    return
                except BaseException as error:
                    _log.exception("the engine failed, and all its calls end")
                    self._abort(error, list(self._open))
                    self._tell()

    def _is_wanted(self) -> bool:
        """Whether a caller wants a step, after what all want done before it; False when the thread shall end."""
        while threading.current_thread() is self._thread:
            caller_waits = any(caller.waits for caller in list(self._open.values()))
            if not self._open:
                use_threads(self._num_threads)
                release_helpers()
            try:
                self._inbox.get(not caller_waits, 0.0 if self._closed else _IDLE)()
                self._tell()
            except Empty:
                if caller_waits:
                    return True
                with self._lock:
                    if self._inbox.empty():
                        self._thread = None
        return False

    def _submit(self, request: Request) -> None:
        if not request.done:
            self.engine.submit(request)

    def _tell(self) -> None:
        """Tells callers what is new of their requests; one that cannot be told loses its request."""
        for request, caller in list(self._open.items()):
            if request.done:
                del self._open[request]
            elif not (caller.stream and caller.waits and request.rounds):
                continue
            caller.waits = not caller.pulls
            try:
                caller.notify()
            except Exception as error:
                _log.exception("a caller could not be told, and its call ends")
                self.cancel(request, error)


def _nothing() -> None:
    """Wakes the thread."""


_drivers: WeakSet[Driver] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()  # one that ends may still free a model, whose last owner it is


def _close_all() -> None:
    """At exit: a daemon thread that frees a tensor while the interpreter ends is killed there, by SIGABRT."""
    for driver in list(_drivers):
        driver.close("the program is ending", _PATIENCE)
    for thread in [thread for thread in _threads if thread.is_alive()]:
        thread.join(_PATIENCE)


def _forget_all() -> None:
    for driver in list(_drivers):
        driver.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
