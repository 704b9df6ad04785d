"""Admission: a bounded number of requests runs, clients take turns, the rest is refused."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from specdec.server.errors import busy


class Admission:
    """Grants `running` turns at a time, round robin over clients; `waiting` more requests wait.

    When the queue is full, the client with the most waiting requests loses its last one to a client with fewer. For
    one event loop.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.free, self._most_waiting = running, waiting
        self._running, self.waiting = running, 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def running(self) -> int:
        return self._running - self.free

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it; raises a 429 when the queue is full."""
        await self._take(client)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, client: str) -> None:
        if self.free and not self.waiting:
            self.free -= 1
            return
        if self.waiting >= self._most_waiting:
            self._displace(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        self.waiting += 1
        try:
            await turn
        except BaseException:
            if turn in self._queues.get(client, ()):
                self._queues[client].remove(turn)
                self._drop_empty(client)
                self.waiting -= 1
            elif not turn.cancelled() and turn.exception() is None:
                self._give_back()  # the turn had just been granted
            raise

    def _displace(self, client: str) -> None:
        """Makes room for a client; raises a 429 unless another has more requests waiting than it would have."""
        full = busy(f"{self.waiting} requests wait already: try again later", 1 + self.waiting // 8)
        most = max(self._queues, key=lambda other: len(self._queues[other]), default=client)
        if len(self._queues.get(most, ())) <= len(self._queues.get(client, ())) + 1:
            raise full
        last = self._queues[most].pop()
        self.waiting -= 1
        if not last.done():
            last.set_exception(full)

    def _give_back(self) -> None:
        """Grants the turn to the client served least recently."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            self._queues.move_to_end(client)
            self._drop_empty(client)
            self.waiting -= 1
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1

    def _drop_empty(self, client: str) -> None:
        if client in self._queues and not self._queues[client]:
            del self._queues[client]


class Clients:
    """Limits each client to `most` requests in flight; None is no limit. For one event loop."""

    def __init__(self, most: int | None) -> None:
        self._most, self._in_flight = most, Counter[str]()

    @contextmanager
    def request(self, client: str) -> Iterator[None]:
        """Counts a client's request while it runs; raises a 429 at the limit."""
        if self._most is not None and self._in_flight[client] >= self._most:
            raise busy(f"this client has {self._most} requests in flight already: wait for one to end", 1)
        self._in_flight[client] += 1
        try:
            yield
        finally:
            self._in_flight[client] -= 1
            if not self._in_flight[client]:
                del self._in_flight[client]
