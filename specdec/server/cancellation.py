"""Generators that run in threads, followed and cancelled from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, closing
from functools import partial
from typing import Any, TypeVar

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


async def in_threads(
    pool: ThreadPoolExecutor,
    turn: Callable[[], AbstractAsyncContextManager[None]],
    jobs: Sequence[Callable[[Cancel], Generator[T]]],
    room: int,
    size: Callable[[T], int],
) -> AsyncGenerator[T, None]:
    """The items of all jobs as they come; each runs in a thread of `pool` and holds a turn until it ends.

    A slow reader delays no job. Once more than `room` bytes wait, by their `size`, a job ends, and a 408 is raised
    after the items that wait. The first error, or closing this, cancels all jobs and waits for their threads.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
    soon: Any = loop.call_soon_threadsafe
    waiting = 0

    def put(cancel: Cancel, item: T) -> None:
        nonlocal waiting
        if (waiting := waiting + size(item)) <= room:
            queue.put_nowait(item)
        elif not cancel.cancelled():
            cancel.cancel()
            message = f"the client reads too slowly: over {room:,} bytes wait"
            queue.put_nowait(ApiError(408, message, code="slow_reader"))

    async def run(job: Callable[[Cancel], Generator[T]]) -> None:
        cancel = Cancel()
        try:
            async with turn():
                done = loop.run_in_executor(pool, _run, job, cancel, partial(soon, put, cancel))
                try:
                    await asyncio.wait({done})
                finally:
                    cancel.cancel()
                    await asyncio.wait({done})
                    error = done.exception()
            queue.put_nowait(_END if error is None else error)
        except Exception as refused:  # of the turn
            queue.put_nowait(refused)

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                waiting -= size(item)
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run(job: Callable[[Cancel], Generator[T]], cancel: Cancel, put: Callable[[T], object]) -> None:
    cancel.check()
    with closing(job(cancel)) as items:
        for item in items:
            put(item)
            cancel.check()


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
