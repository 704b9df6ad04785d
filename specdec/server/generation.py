"""One request for text: its prompts run side by side, their pieces become an answer or a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from specdec.server.answers import Answer, Tally
from specdec.server.cancellation import Cancel, ThreadStream, ahead
from specdec.server.direct_socket import Wire
from specdec.server.metrics import Metrics
from specdec.server.models import Host
from specdec.server.protocol import Generate
from specdec.server.settings import ServeSettings
from specdec.server.text import Echo, Finished, PromptRequest, Started, TextDelta, TextModel

Told = Started | TextDelta | Finished | bytes
"""What a thread tells the event loop: of a stream the events that the loop has to send, instead of pieces."""
Item = tuple[int, Told]


class TextRequest:
    """What a request asks of a model, on its way; `prompts` has one entry for each, None for a conversation."""

    def __init__(
        self,
        host: Host,
        metrics: Metrics,
        settings: ServeSettings,
        request: Generate,
        prompts: Sequence[str | list[int] | None],
        *,
        client: str,
    ) -> None:
        assert isinstance(host.model, TextModel)
        self._host, self._model, self._metrics = host, host.model, metrics
        self._request, self._prompts, self._client = request, prompts, client
        chunk = settings.stream_chunk if request.stream else None
        self._requests = [
            PromptRequest(request, prompt, client, chunk, settings.limits.new_tokens) for prompt in prompts
        ]
        self._tallies = [Tally() for _ in prompts]
        self._answer = Answer(request, host.model.name, self._tallies, settings.pad_events)
        self._wire: Wire | None = None
        self._room = settings.limits.unread_bytes
        self._began = time.monotonic()

    async def whole(self) -> dict[str, Any]:
        """The body of the answer."""
        choices: list[list[TextDelta]] = [[] for _ in range(len(self._prompts) * self._request.n)]
        echoes: list[Echo | None] = [None] * len(self._prompts)
        async with aclosing(self._items()) as items:
            async for at, item in items:
                if isinstance(item, Started):
                    echoes[at] = item.echo
                elif isinstance(item, TextDelta):
                    choices[at * self._request.n + item.row].append(item)
        return self._answer.whole(choices, echoes)

    async def stream(self, wire: Wire | None = None) -> AsyncGenerator[bytes, None]:
        """The events of the answer that `wire` does not take, once the request has proved sound; until then errors are
        raised here.
        """
        self._wire = wire
        items = self._items()
        try:
            first = await anext(items)
        except BaseException:
            await items.aclose()
            raise
        return self._events(first, items)

    async def _events(self, first: Item, items: AsyncGenerator[Item, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(items):
            async for _, item in _chained(first, items):
                if isinstance(item, bytes):
                    yield item
                    if self._wire is not None:
                        self._wire.passed()
        if (last := self._answer.last_chunk()) is not None:
            yield self._answer.event(last)

    def _items(self) -> AsyncGenerator[Item, None]:
        """What comes of all prompts, each with its number; their turns end with their work, whoever reads."""
        return ahead([self._one(at) for at in range(len(self._requests))], self._room, _size)

    async def _one(self, at: int) -> AsyncGenerator[Item, None]:
        """What comes of one prompt, when its turn is there."""
        observed = _Observed(self._host, self._metrics, self._began, told=self._request.stream)
        async with self._host.turns.turn(self._client):
            observed.turn()
            work = ThreadStream(self._host.pool, lambda cancel: self._run(at, observed, cancel))
            try:
                async for item in work:
                    yield at, item
            finally:
                await work.close()

    def _run(self, at: int, observed: _Observed, cancel: Cancel) -> Iterator[Told]:
        """What comes of one prompt, in the thread that decodes it."""
        begun: set[int] = set()
        echo: Echo | None = None
        with closing(self._model.run(self._requests[at], cancel)) as items:
            for item in items:
                self._take(self._tallies[at], item)
                observed.item(item)
                if isinstance(item, Started):
                    echo = item.echo
                if not (self._request.stream and isinstance(item, TextDelta)):
                    yield item
                elif item.text or item.finish or item.scores:
                    index = at * self._request.n + item.row
                    first = index not in begun
                    begun.add(index)
                    event = self._answer.event(
                        self._answer.chunk(index, item, first=first, echo=echo if first else None)
                    )
                    if self._wire is None or not self._wire.send(event):
                        yield event

    def _take(self, tally: Tally, item: Started | TextDelta | Finished) -> None:
        if isinstance(item, Started):
            tally.prompt_tokens = item.prompt_tokens
            self._metrics.prompt_tokens.labels(self._model.name).inc(item.prompt_tokens)
        elif isinstance(item, TextDelta):
            tally.new_tokens += item.tokens
        else:
            tally.stats = item.stats
            self._metrics.count(self._model.name, item.stats)


class _Observed:
    """The times of one prompt; those between tokens only where its text was `told` as it came."""

    def __init__(self, host: Host, metrics: Metrics, began: float, *, told: bool) -> None:
        name = host.model.name
        self._host, self._began, self._told = host, began, told
        self._queued, self._whole = metrics.queued.labels(name), metrics.whole.labels(name)
        self._first, self._between = metrics.first_token.labels(name), metrics.between.labels(name)
        self._new = metrics.new_tokens.labels(name)
        self._last: float | None = None

    def turn(self) -> None:
        """Its turn has come."""
        self._queued.observe(time.monotonic() - self._began)

    def item(self, item: Started | TextDelta | Finished) -> None:
        """Something came."""
        now = time.monotonic()
        if isinstance(item, Finished):
            self._whole.observe(now - self._began)
        if not isinstance(item, TextDelta):
            return
        self._host.beat()
        self._new.inc(item.tokens)
        if self._told and self._last is None:
            self._first.observe(now - self._began)
        elif self._told and self._last is not None:
            for _ in range(item.tokens):
                self._between.observe((now - self._last) / item.tokens)
        self._last = now


def _size(item: Item) -> int:
    """Of an event of a stream; whole answers are bounded by their tokens."""
    return len(item[1]) if isinstance(item[1], bytes) else 0


async def _chained(first: Item, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    yield first
    async for item in items:
        yield item
