"""The work of requests as seen from the event loop: side by side, cancelled with whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, closing
from typing import Any, TypeVar

from specdec.errors import CancelledError
from specdec.server.errors import ApiError

T = TypeVar("T")
Put = Callable[[T], None]
"""Hands an item of a request's work to whoever reads it."""
Work = Callable[[Put[T]], Coroutine[Any, Any, None]]
END: Any = object()


class Cancel(threading.Event):
    """Tells work in a thread that nobody waits for it any longer."""

    def check(self, *_: object, **__: object) -> Any:
        """A stopping criterion, and a callback: raises CancelledError once the work is cancelled."""
        if self.is_set():
            raise CancelledError("the request was cancelled")
        return False


async def step(pool: ThreadPoolExecutor, items: Iterator[T], cancel: Cancel) -> T:
    """The next item, or `END`, computed in a thread; a caller that is cancelled waits for it as well."""
    done = asyncio.get_running_loop().run_in_executor(pool, next, items, END)
    try:
        await asyncio.wait({done})
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.wait({done})
        done.exception()  # nobody else looks at it
        raise
    return done.result()


async def in_threads(pool: ThreadPoolExecutor, make: Callable[[Cancel], Generator[T]], put: Put[T]) -> None:
    """Puts the items of a generator whose steps run in threads of `pool`."""
    cancel = Cancel()
    with closing(make(cancel)) as items:
        while (item := await step(pool, items, cancel)) is not END:
            put(item)


async def side_by_side(
    turn: Callable[[], AbstractAsyncContextManager[None]], works: Sequence[Work[T]], room: int, size: Callable[[T], int]
) -> AsyncGenerator[T, None]:
    """The items that all works put, as they come; each work holds a turn while it runs.

    A slow reader delays no work. Once more than `room` bytes wait, by their `size`, a work ends, and a 408 is raised
    after the items that wait. The first error, or closing this, cancels all works.
    """
    queue, waiting = asyncio.Queue[Any](), 0

    def put(item: T) -> None:
        nonlocal waiting
        if (waiting := waiting + size(item)) > room:
            raise ApiError(408, f"the client reads too slowly: over {room:,} bytes wait", code="slow_reader")
        queue.put_nowait(item)

    async def run(work: Work[T]) -> None:
        try:
            async with turn():
                await work(put)
            queue.put_nowait(END)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(run(work)) for work in works]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not END:
                if isinstance(item, BaseException):
                    raise item
                waiting -= size(item)
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
