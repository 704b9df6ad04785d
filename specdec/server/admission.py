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
        self.free, self._running, self._most_waiting = running, running, waiting
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # no queue is empty

    @property
    def running(self) -> int:
        return self._running - self.free

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it; raises a 429 when the queue is full."""
        if self.free and not self._queues:
            self.free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, client: str) -> None:
        if self.waiting >= self._most_waiting:
            self._displace(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn in (queue := self._queues.get(client, deque())):
                queue.remove(turn)
                if not queue:
                    del self._queues[client]
            elif not turn.cancelled() and turn.exception() is None:
                self._give_back()  # the turn had just been granted
            raise

    def _displace(self, client: str) -> None:
        """Makes room for a client; raises a 429 unless another has more requests waiting than it would have."""
        full = busy(f"{self.waiting} requests wait already: try again later", 1 + self.waiting // 8)
        most = max(self._queues.values(), key=len, default=deque())
        if len(most) <= len(self._queues.get(client, ())) + 1:
            raise full
        if not (last := most.pop()).done():
            last.set_exception(full)

    def _give_back(self) -> None:
        """Grants the turn to the client served least recently."""
        while self._queues:
            client, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


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
