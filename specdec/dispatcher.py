"""Lets any number of threads share one engine: whoever waits for its own request drives the engine for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

from specdec.engine import Engine
from specdec.errors import EngineError
from specdec.request import Request
from specdec.types import Round


class Dispatcher:
    """Threads take turns at `Engine.step`; a thread whose request has news hands the engine over to one that waits.

    There is no thread of its own: a caller alone runs the engine itself.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Reentrant: a stream may be collected, and so closed, while its thread is in here.
        self._lock = threading.RLock()
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._waiting: dict[Request, tuple[threading.Condition, Callable[[], bool]]] = {}
        self._driver: int | None = None

    def rounds(self, request: Request, *, stream: bool = False) -> Generator[Round]:
        """Every round of a request, one after the other as they come with `stream`, otherwise all at its end.

        Raises what ended the request early, and EngineError for a call from within the engine. Closing the generator
        cancels the request.
        """
        self._check()
        self.engine.budget.check(request)
        self._arrived.append(request)
        try:
            while not request.done:
                self._wait(request, stream)
                while request.rounds:
                    yield request.rounds.popleft()
            yield from request.rounds
        finally:
            if not request.done:
                self._cancel(request)
        if request.error is not None:
            raise request.error

    def _wait(self, request: Request, stream: bool) -> None:
        """Returns when the request is done or, of a stream, has news; drives the engine while nobody else does."""

        def ready() -> bool:
            return request.done or (stream and bool(request.rounds))

        self._check()
        with self._lock:
            news = threading.Condition(self._lock)
            self._waiting[request] = (news, ready)
            try:
                while not ready() and self._driver is not None:
                    news.wait()
                if ready():
                    return
                self._driver = threading.get_ident()
            finally:
                del self._waiting[request]
        try:
            while not ready():
                self._step()
                if self.engine.idle and not (ready() or self._arrived):
                    raise EngineError("the engine has nothing left to do, but the request is not done")
        except BaseException as error:
            why = f"the thread that decoded for several calls was ended by {type(error).__name__}: call again"
            self.engine.abort(error if isinstance(error, Exception) else EngineError(why))
            raise
        finally:
            with self._lock:
                self._driver = None
                self._drop_cancelled()
                self._wake()

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
            self.engine.submit(self._arrived.pop(0))
        self._drop_cancelled()
        self.engine.step()
        if self._waiting:
            with self._lock:
                self._wake()

    def _wake(self) -> None:
        """Wakes those whose request has come further, and anyone where nobody drives."""
        for news, ready in self._waiting.values():
            if self._driver is None or ready():
                news.notify_all()

    def _cancel(self, request: Request) -> None:
        """Ends a request; at once where nobody drives, else before the next step."""
        self._cancelled.append(request)
        with self._lock:
            if self._driver is None:
                self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            gone = self._cancelled.pop()
            if gone in self._arrived:
                self._arrived.remove(gone)
            self.engine.cancel(gone)
