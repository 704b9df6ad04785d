"""Lets threads share one engine: a caller alone runs it itself, those that overlap have one thread run it for all."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from weakref import WeakSet

from specdec.core.rounds import Round
from specdec.engine.engine import Engine
from specdec.engine.openmp import release_helpers
from specdec.engine.request import Request
from specdec.errors import CancelledError, EngineError
from specdec.models import plain_modes

_SOON, _IDLE = 0.01, 1.0  # seconds without anything to do until helper threads end, and until the thread itself does
_PATIENCE = 10.0  # seconds that a program which ends waits for the step that is under way


class Dispatcher:
    """Callers wait for their requests, and one thread at a time drives `Engine.step`.

    That is the caller's own while it is alone. Callers that overlap get a thread for all of them: every thread that
    computes has helper threads of its own in the libraries below, which are in one another's way. So whatever runs
    inside a request (a processor, say) must not wait for another call of the same generator: called directly it raises
    EngineError, but one that waits for another thread's call waits for itself.

    Only the thread that drives touches the engine, and never under the lock: dropping a request may copy all its keys
    and values, and whoever cancels one (an event loop, say) must not wait for that.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Reentrant: a stream may be collected, and so closed, while its thread is in here.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._open: set[Request] = set()  # those that callers follow
        self._waiting: dict[Request, tuple[threading.Condition, Callable[[], bool]]] = {}
        self._driver: int | None = None
        self._thread: threading.Thread | None = None  # the latest that was started to drive
        self._ended = False
        self._closed = False

    def rounds(self, request: Request, *, stream: bool = False) -> Generator[Round]:
        """Every round of a request, one after the other as they come with `stream`, otherwise all at its end.

        Raises what ended the request early, and EngineError for a call from within the engine. Closing the generator
        cancels the request.
        """
        self._check()
        self.engine.budget.check(request)
        with self._lock:
            self.check_open()
            self._open.add(request)
            self._arrived.append(request)
        try:
            while not request.done:
                self._wait(request, stream)
                while request.rounds:
                    yield request.rounds.popleft()
            yield from request.rounds
        finally:
            with self._lock:
                self._open.discard(request)
            if not request.done:
                self._drop(request)
            release_helpers()
        if request.error is not None:
            raise request.error

    def cancel(self, request: Request, why: str = "the call was cancelled") -> None:
        """Ends a request before the next round, from any thread and at once; whoever follows it gets CancelledError.

        One that is over stays as it is, and one that nobody follows yet will not begin.
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
        """Cancels all calls, ends the thread that runs them, and frees keys and values; later calls raise EngineError.

        Waits for the pass under way. Raises EngineError inside a call's own processor, criterion, draft or schedule.
        """
        self._check()
        with self._lock:
            self._closed = True
            for request in list(self._open):
                self.cancel(request, "the generator was closed")
            self._work.notify_all()
            self._work.wait_for(lambda: self._driver is None)
            self._driver = threading.get_ident()
        try:
            self.engine.abort(CancelledError("the generator was closed"))
        finally:
            self._stop_driving()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def check_open(self) -> None:
        """Raises EngineError after `close`."""
        if self._closed:
            raise EngineError("this SpecGenerator is closed: make another one")

    def end(self) -> None:
        """Ends the thread that runs requests, where there is one, and those that others wait for: CancelledError."""
        if self._thread is None or not self._thread.is_alive():
            return
        with self._lock:
            self._ended = True
            for request in list(self._waiting):
                self.cancel(request)
            self._work.notify_all()
        self._thread.join(_PATIENCE)

    def _wait(self, request: Request, stream: bool) -> None:
        """Returns when the request is done or, of a stream, has news; drives the engine where nobody else would."""

        def ready() -> bool:
            return request.done or (stream and bool(request.rounds))

        self._check()
        with self._lock:
            if self._ended and threading.current_thread() is not threading.main_thread():
                raise CancelledError("the program is ending")  # a thread that computes then would abort it
            news = threading.Condition(self._lock)
            self._waiting[request] = (news, ready)
            self._work.notify_all()
            try:
                while not ready():
                    if self._driver is None and len(self._open) == 1:
                        self._driver = threading.get_ident()
                        break
                    if self._driver is None:
                        self._thread = threading.Thread(target=self._drive_all, name="specdec-engine", daemon=True)
                        self._driver = -1  # until it has begun
                        _end_at_exit(self)
                        try:
                            self._thread.start()
                        except BaseException:
                            self._driver = None
                            raise
                    release_helpers()
                    news.wait()
                else:
                    return
            finally:
                del self._waiting[request]
        self._drive(lambda: not ready())

    def _drive(self, wanted: Callable[[], bool]) -> None:
        """Takes steps while they are `wanted`; whatever interrupts that ends all requests."""
        try:
            with plain_modes():
                while wanted():
                    if self.engine.idle and not (self._arrived or self._cancelled):
                        raise EngineError("a request was lost: this is a defect of specdec, please report it")
                    self._step()
        except BaseException as error:
            why = f"the thread that decoded for several calls was ended by {type(error).__name__}: call again"
            self.engine.abort(error if isinstance(error, Exception) else EngineError(why))
            raise
        finally:
            self._stop_driving()

    def _stop_driving(self) -> None:
        """Lets others drive, once everything that was given up is dropped."""
        try:
            while not self._let_go():
                self._drop_cancelled()
        except BaseException:  # an interrupt
            self._let_go(anyway=True)
            raise

    def _let_go(self, *, anyway: bool = False) -> bool:
        """Whether this thread drives no more; it still does where something given up is left, unless it must stop."""
        with self._lock:
            me, self._driver = self._driver, None  # a stream that is collected from here on is dropped at once
            if self._cancelled and not anyway:
                self._driver = me
                return False
            self._wake()
            self._work.notify_all()
            return True

    def _drive_all(self) -> None:
        """Drives the engine for callers that overlap, until none has come for a while."""
        self._driver = threading.get_ident()

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

        with suppress(BaseException):  # its callers are told
            self._drive(wanted)

    def _check(self) -> None:
        """Raises where the thread that runs the engine would wait for itself."""
        if self._driver == threading.get_ident():
            raise EngineError(
                "a processor, criterion, draft or schedule called the generator that it runs in: use another "
                "SpecGenerator there (models can be shared)"
            )

    def _step(self) -> None:
        """Takes in what has come and what was given up, and runs one step."""
        while self._arrived:
            if not self._arrived[0].done:  # it may have been cancelled before it came
                self.engine.submit(self._arrived[0])
            self._arrived.pop(0)
        self._drop_cancelled()
        self.engine.step()
        if self._waiting:
            with self._lock:
                self._wake()

    def _wake(self) -> None:
        """Wakes those whose request has come further, and everyone where nobody drives."""
        for news, ready in self._waiting.values():
            if self._driver is None or ready():
                news.notify_all()

    def _drop(self, request: Request) -> None:
        """Ends a request whose caller goes; at once where nobody drives, else before the next step."""
        with self._lock:
            self._cancelled.append(request)
            self._work.notify_all()
            if self._driver is not None:
                return
            self._driver = threading.get_ident()
        self._stop_driving()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            gone = self._cancelled.pop()
            if gone in self._arrived:
                self._arrived.remove(gone)
            self.engine.cancel(gone)


_shared: WeakSet[Dispatcher] = WeakSet()  # those that had a thread


def _end_at_exit(dispatcher: Dispatcher) -> None:
    """Lets a dispatcher's thread end before the interpreter does, and before what was registered until now.

    A thread that frees a tensor while the interpreter ends is ended in there, and that ends the program by SIGABRT.
    """
    _shared.add(dispatcher)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    for dispatcher in list(_shared):
        dispatcher.end()
