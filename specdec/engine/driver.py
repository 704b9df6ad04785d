"""Shares one engine among threads: a lone caller runs it itself, overlapping callers have one thread run it for all."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from weakref import WeakSet

import torch

from specdec.core.outcome import Round
from specdec.engine.engine import Engine
from specdec.engine.openmp import release_helpers, share_cores
from specdec.engine.request import Request
from specdec.errors import CancelledError, EngineError
from specdec.models import plain_modes

_SOON, _IDLE = 0.01, 1.0  # seconds without work after which helper threads end, and after which the thread ends
_PATIENCE = 10.0  # seconds that the interpreter waits at its end for the current step


class Driver:
    """Callers wait for their requests while one thread at a time runs `Engine.step` (it *drives*).

    A lone caller drives in its own thread. Overlapping callers share one further thread, since the OpenMP helpers of
    several computing threads would slow one another down. Code that runs inside a request (a processor, say) must not
    wait for another call of the same generator: a direct call raises EngineError; one in another thread deadlocks.

    Only the driving thread touches the engine, and never while it holds the lock: dropping a request may copy all its
    keys and values, and a caller that cancels it (an event loop, say) must not wait for that.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Reentrant: garbage collection may close a stream while its thread holds the lock.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._open: set[Request] = set()  # whose rounds a caller reads
        self._waiting: dict[Request, tuple[threading.Condition, Callable[[], bool]]] = {}
        self._driving_thread: int | None = None
        self._thread: threading.Thread | None = None  # the last one that was started to drive
        self._ended = False
        self._closed = False

    def rounds(self, request: Request, *, stream: bool = False) -> Generator[Round]:
        """Yields a request's rounds: with `stream` as they come, otherwise all at its end.

        Raises the error that ended the request early, and EngineError for a call from within the engine and for a
        request that is being read. Closing the generator cancels the request.
        """
        self._refuse_nested_call()
        if self.engine.memory is not None:
            self.engine.memory.check(request)
        with self._lock:
            self.check_open()
            if request in self._open:
                raise EngineError("this job is being followed: read its deltas there, or submit another")
            self._open.add(request)
            if not request.done:
                self._arrived.append(request)
        try:
            while not request.done or request.rounds:
                if request.rounds:
                    yield request.rounds.popleft()
                else:
                    self._wait(request, stream)
        finally:
            with self._lock:
                self._open.discard(request)
            if not request.done:
                request.error = request.error or CancelledError("its caller left before its end")
                self._drop(request)
            release_helpers()
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request, why: str = "the call was cancelled") -> None:
        """Ends a request before its next round, without waiting; its caller gets CancelledError.

        A request that is done stays as it is; one without a caller yet will not begin.
        """
        with self._lock:
            if request.done:
                return
            request.error = CancelledError(why)
            if request in self._open:
                self._cancelled.append(request)
                self._work.notify_all()
            else:
                request.done = True

    def close(self) -> None:
        """Cancels all calls, ends the thread that runs them, and frees all keys and values.

        Waits for the pass under way; later calls raise EngineError. Inside a call (in a processor, say) this raises it.
        """
        self._refuse_nested_call()
        with self._lock:
            self._closed = True
            for request in list(self._open):
                self.cancel(request, "the generator was closed")
            self._work.notify_all()
            self._work.wait_for(lambda: self._driving_thread is None)
            self._driving_thread = threading.get_ident()
        try:
            self.engine.abort(CancelledError("the generator was closed"))
            self.engine.scheduler.prefix_cache.clear()
        finally:
            self._stop_driving()
        gc.collect()  # sessions are parts of reference cycles
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def check_open(self) -> None:
        """Raises EngineError after `close`."""
        if self._closed:
            raise EngineError("this SpecGenerator is closed: make another one")

    def end(self) -> None:
        """Ends the shared thread, if one is alive, and its requests, whose callers get CancelledError."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._lock:
            self._ended = True
            for request in list(self._waiting):
                self.cancel(request)
            self._work.notify_all()
        self._thread.join(_PATIENCE)

    def _wait(self, request: Request, stream: bool) -> None:
        """Returns when the request is done or, with `stream`, has rounds; drives the engine if no other thread does."""

        def ready() -> bool:
            return request.done or (stream and bool(request.rounds))

        self._refuse_nested_call()
        with self._lock:
            if self._ended and threading.current_thread() is not threading.main_thread():
                raise CancelledError("the program is ending")  # a computing daemon thread would abort it
            news = threading.Condition(self._lock)
            self._waiting[request] = (news, ready)
            self._work.notify_all()
            try:
                while not ready():
                    if self._driving_thread is None and len(self._open) == 1:
                        self._driving_thread = threading.get_ident()
                        break
                    if self._driving_thread is None:
                        self._thread = threading.Thread(target=self._drive_all, name="specdec-engine", daemon=True)
                        self._driving_thread = -1  # until it has started
                        _end_at_exit(self)
                        try:
                            self._thread.start()
                        except BaseException:
                            self._driving_thread = None
                            raise
                    release_helpers()
                    news.wait()
                else:
                    return
            finally:
                del self._waiting[request]
        self._drive(lambda: not ready())

    def _drive(self, wanted: Callable[[], bool]) -> None:
        """Takes steps while `wanted()`; an exception ends all requests."""
        threads = torch.get_num_threads()
        try:
            with plain_modes():
                while wanted():
                    share_cores(threads)
                    if self.engine.idle and not (self._arrived or self._cancelled):
                        raise EngineError("a request was lost: this is a defect of specdec, please report it")
                    while self._arrived:
                        if not self._arrived[0].done:  # cancelled before it arrived
                            self.engine.submit(self._arrived[0])
                        self._arrived.pop(0)
                    if self._cancelled:
                        self._drop_cancelled()
                    self.engine.step()
                    if self._waiting:
                        with self._lock:
                            self._wake()
        except BaseException as error:
            why = f"the thread that decoded for several calls was ended by {type(error).__name__}: call again"
            self.engine.abort(error if isinstance(error, Exception) else EngineError(why))
            raise
        finally:
            torch.set_num_threads(threads)
            self._stop_driving()

    @plain_modes()  # a draft that saves its state runs passes
    def _stop_driving(self) -> None:
        """Drops what was cancelled, and lets another thread drive."""
        try:
            while not self._hand_over():
                self._drop_cancelled()
        except BaseException:  # an interrupt
            self._hand_over(anyway=True)
            raise

    def _hand_over(self, *, anyway: bool = False) -> bool:
        """Stops driving, and returns True; False if cancelled requests are left, unless it stops `anyway`."""
        with self._lock:
            # a stream closed from here on drops its own request
            me, self._driving_thread = self._driving_thread, None
            if self._cancelled and not anyway:
                self._driving_thread = me
                return False
            self._wake()
            self._work.notify_all()
            return True

    def _drive_all(self) -> None:
        """Drives the engine for overlapping callers, until none has come for `_IDLE` seconds."""
        self._driving_thread = threading.get_ident()

        def wanted() -> bool:
            with self._lock:
                while not self._cancelled and all(ready() for _, ready in self._waiting.values()):
                    if self._ended or self._closed:
                        return False
                    came = self._work.wait(_SOON)
                    if not came:
                        release_helpers()
                        came = self._work.wait(_IDLE)
                    if not (came or self._open):
                        return False
                return True

        with suppress(BaseException):  # its callers raise it
            self._drive(wanted)

    def _refuse_nested_call(self) -> None:
        """Raises EngineError in the driving thread, which would wait for itself."""
        if self._driving_thread == threading.get_ident():
            raise EngineError(
                "a processor, criterion, draft or schedule called the generator that it runs in: use another "
                "SpecGenerator there (models can be shared)"
            )

    def _wake(self) -> None:
        """Wakes callers that can return, and all of them when no thread drives."""
        for news, ready in self._waiting.values():
            if self._driving_thread is None or ready():
                news.notify_all()

    def _drop(self, request: Request) -> None:
        """Cancels a request whose caller left: at once if no thread drives, else before the next step."""
        with self._lock:
            self._cancelled.append(request)
            self._work.notify_all()
            if self._driving_thread is not None:
                return
            self._driving_thread = threading.get_ident()
        self._stop_driving()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            gone = self._cancelled.pop()
            if gone in self._arrived:
                self._arrived.remove(gone)
            self.engine.cancel(gone)


_shared: WeakSet[Driver] = WeakSet()  # drivers that had a thread


def _end_at_exit(driver: Driver) -> None:
    """Ends a driver's thread at exit, before all handlers that are registered by now.

    A daemon thread that frees a tensor while the interpreter ends is killed there, and the program ends by SIGABRT.
    """
    _shared.add(driver)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    for driver in list(_shared):
        driver.end()
