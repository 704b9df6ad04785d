"""Between the event loop and the threads that decode: work that is followed from afar, and given up from afar."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from specdec.errors import CancelledError
from specdec.server.errors import ApiError

T = TypeVar("T")


class Cancel:
    """Says that nobody wants the work any more, and calls whoever asked to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self.asked = False

    def ask(self) -> None:
        """Gives the work up; from any thread, and more than once."""
        with self._lock:
            calls = [] if self.asked else self._calls
            self.asked = True
        for call in calls:
            call()

    def tell(self, call: Callable[[], None]) -> None:
        """Has `call` called when the work is given up, at once if it was already."""
        with self._lock:
            self._calls.append(call)
            asked = self.asked
        if asked:
            call()

    def check(self) -> None:
        """Raises CancelledError where the work was given up."""
        if self.asked:
            raise CancelledError("the request was cancelled")


_END: Any = object()


class ThreadStream(Generic[T]):
    """A generator that runs in a thread of `pool`, as an async iterator; `close` gives it up and waits for its end.

    What it yields is never lost, and an error that it raises is raised here after that.
    """

    def __init__(self, pool: ThreadPoolExecutor, make: Callable[[Cancel], Iterator[T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T | BaseException] = asyncio.Queue()
        self._cancel = Cancel()
        self._done = self._loop.run_in_executor(pool, self._run, make)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (item := await self._queue.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item

    async def close(self) -> None:
        """Ends the work if it is not over; its thread is free afterwards."""
        self._cancel.ask()
        await asyncio.shield(self._done)

    def _run(self, make: Callable[[Cancel], Iterator[T]]) -> None:
        try:
            self._cancel.check()
            items = make(self._cancel)
            for item in items:
                self._tell(item)
                self._cancel.check()
            self._tell(_END)
        except BaseException as error:
            self._tell(error)
        finally:
            if "items" in locals() and isinstance(items, Generator):
                items.close()

    def _tell(self, item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody listens
            self._cancel.ask()


async def ahead(
    sources: Sequence[AsyncGenerator[T, None]], room: int, size: Callable[[T], int] = lambda item: 0
) -> AsyncGenerator[T, None]:
    """What all sources yield, as it comes: none of them waits for whoever takes it, and holds its turn meanwhile.

    Once more than `room` bytes wait, by their `size`, the source ends, and a 408 follows what waits.
    """
    queue: asyncio.Queue[T | Exception] = asyncio.Queue()
    waiting = 0

    async def forward(source: AsyncGenerator[T, None]) -> None:
        nonlocal waiting
        try:
            async with aclosing(source):
                async for item in source:
                    if (waiting := waiting + size(item)) > room:
                        raise ApiError(408, f"the client reads too slowly: over {room:,} bytes wait", code="timeout")
                    queue.put_nowait(item)
            queue.put_nowait(_END)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(source)) for source in sources]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not _END:
                if isinstance(item, Exception):
                    raise item
                waiting -= size(item)
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def primed(source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items. Returns once the first exists; an error before it is raised here."""
    try:
        first = await anext(source)
    except BaseException:
        await source.aclose()
        raise

    async def items() -> AsyncGenerator[T, None]:
        async with aclosing(source):
            yield first
            async for item in source:
                yield item

    return items()


async def call(pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    """What a function returns that takes too long for the event loop."""
    return await asyncio.get_running_loop().run_in_executor(pool, function)
