"""Generators that run in threads, followed and cancelled from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any, Generic, TypeVar

from specdec.errors import CancelledError
from specdec.server.errors import ApiError

T = TypeVar("T")
_END: Any = object()


class Cancel(Future[None]):
    """Cancels work from any thread: `cancel()` runs what `add_done_callback` was given, at once if it came later."""

    def check(self) -> None:
        """Raises CancelledError once the work is cancelled."""
        if self.cancelled():
            raise CancelledError("the request was cancelled")


class ThreadStream(Generic[T]):
    """A generator that runs in a thread of `pool`, as an async iterator.

    Its items are never lost, and its error is raised after them.
    """

    def __init__(self, pool: ThreadPoolExecutor, make: Callable[[Cancel], Generator[T]]) -> None:
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
        """Cancels the generator and waits until its thread is free."""
        self._cancel.cancel()
        await asyncio.shield(self._done)

    def _run(self, make: Callable[[Cancel], Generator[T]]) -> None:
        try:
            self._cancel.check()
            with closing(make(self._cancel)) as items:
                for item in items:
                    self._put(item)
                    self._cancel.check()
            self._put(_END)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the loop is closed
            self._cancel.cancel()


async def ahead(
    sources: Sequence[AsyncGenerator[T, None]], room: int, size: Callable[[T], int]
) -> AsyncGenerator[T, None]:
    """The items of all sources as they come; a slow reader delays no source and holds no turn.

    Once more than `room` bytes wait, by their `size`, a source ends, and raises a 408 after the items that wait.
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
