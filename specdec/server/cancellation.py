"""The work of requests as seen from the event loop: side by side, cancelled with whoever waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, closing
from typing import Any, TypeVar

from specdec.errors import CancelledError
from specdec.server.errors import ApiError

T = TypeVar("T")
END: Any = object()


class Cancel(threading.Event):
    """Tells work in a thread that nobody waits for it any longer."""

    def check(self) -> None:
        """Raises CancelledError once the work is cancelled."""
        if self.is_set():
            raise CancelledError("the request was cancelled")


async def step(pool: ThreadPoolExecutor, items: Generator[T], cancel: Cancel) -> T:
    """The next item of a generator, or `END`, computed in a thread; a caller that is cancelled waits for it as well."""
    done = asyncio.get_running_loop().run_in_executor(pool, next, items, END)
    try:
        await asyncio.wait({done})
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.wait({done})
        done.exception()  # nobody else looks at it
        raise
    return done.result()


async def threaded(pool: ThreadPoolExecutor, make: Callable[[Cancel], Generator[T]]) -> AsyncGenerator[T, None]:
    """The items of a generator whose steps run in threads of `pool`."""
    cancel = Cancel()
    with closing(make(cancel)) as items:
        while (item := await step(pool, items, cancel)) is not END:
            yield item


async def side_by_side(
    turn: Callable[[], AbstractAsyncContextManager[None]],
    sources: Sequence[AsyncGenerator[T, None]],
    room: int,
    size: Callable[[T], int],
) -> AsyncGenerator[T, None]:
    """The items of all sources as they come; each source holds a turn while it runs.

    A slow reader delays no source. Once more than `room` bytes wait, by their `size`, a source is closed, and a 408 is
    raised after the items that wait. The first error, or closing this, closes all sources.
    """
    queue, waiting = asyncio.Queue[Any](), 0

    async def run(source: AsyncGenerator[T, None]) -> None:
        nonlocal waiting
        try:
            async with turn(), aclosing(source):
                async for item in source:
                    if (waiting := waiting + size(item)) > room:
                        message = f"the client reads too slowly: over {room:,} bytes wait"
                        raise ApiError(408, message, code="slow_reader")
                    queue.put_nowait(item)
            queue.put_nowait(END)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(run(source)) for source in sources]
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
