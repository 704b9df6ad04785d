"""One request for text: its prompts are decoded side by side, into one answer or a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any

from specdec.server.answers import Answer
from specdec.server.cancellation import Cancel, ThreadStream, ahead, primed
from specdec.server.direct_socket import Wire
from specdec.server.metrics import Metrics
from specdec.server.models import Host
from specdec.server.protocol import Generate
from specdec.server.settings import ServeSettings
from specdec.server.text import Finished, PromptRequest, Started, TextDelta, TextModel


class TextRequest:
    """A request for text; `prompts` has one entry per prompt, None for a conversation."""

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
        self._request, self._client = request, client
        chunk = settings.stream_chunk if request.stream else None
        self._prompts = [
            PromptRequest(request, prompt, client, chunk, settings.limits.new_tokens) for prompt in prompts
        ]
        self._answer = Answer(request, host.model.name, len(prompts))
        self._wire: Wire | None = None
        self._room = settings.limits.unread_bytes
        self._began = time.monotonic()

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._decode_all()) as events:
            async for _ in events:
                pass
        return self._answer.whole()

    async def stream(self, wire: Wire | None = None) -> AsyncGenerator[bytes, None]:
        """The events that `wire` does not take. Returns once the first prompt's options are valid (`kv_budget` may
        still refuse it); until then errors raise here.
        """
        self._wire = wire
        return self._events(await primed(self._decode_all()))

    async def _events(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                if event:
                    yield event
                    if self._wire is not None:
                        self._wire.passed()
        if (last := self._answer.last_chunk()) is not None:
            yield self._answer.event(last)

    def _decode_all(self) -> AsyncGenerator[bytes, None]:
        """The events of all prompts as they come; a slow reader keeps no prompt's turn."""
        return ahead([self._decode(at) for at in range(len(self._prompts))], self._room, len)

    async def _decode(self, at: int) -> AsyncGenerator[bytes, None]:
        """The events of one prompt, after waiting for its turn."""
        observed = _Observed(self._host, self._metrics, self._began, streamed=self._request.stream)
        async with self._host.turns.turn(self._client):
            observed.turn()
            stream = ThreadStream(self._host.pool, lambda cancel: self._run(at, observed, cancel))
            try:
                async for event in stream:
                    yield event
            finally:
                await stream.close()

    def _run(self, at: int, observed: _Observed, cancel: Cancel) -> Generator[bytes]:
        """Decodes one prompt in a thread: an empty event once the request is valid, then those for the event loop."""
        with closing(self._model.run(self._prompts[at], cancel)) as updates:
            for update in updates:
                self._answer.count(at, update)
                observed.update(update)
                if isinstance(update, Started):
                    yield b""
                elif isinstance(update, TextDelta) and not self._request.stream:
                    self._answer.add(at, update)
                elif isinstance(update, TextDelta) and (update.text or update.finish or update.scores):
                    event = self._answer.event(self._answer.chunk(at, update))
                    if self._wire is None or not self._wire.send(event):
                        yield event


class _Observed:
    """Metrics of one prompt; times between tokens only where its text is `streamed`."""

    def __init__(self, host: Host, metrics: Metrics, began: float, *, streamed: bool) -> None:
        self._host, self._metrics, self._model = host, metrics, host.model.name
        self._began, self._streamed = began, streamed
        self._new_tokens = metrics.new_tokens.labels(self._model)
        self._first_token, self._between = (one.labels(self._model) for one in (metrics.first_token, metrics.between))
        self._last: float | None = None

    def turn(self) -> None:
        self._metrics.queued.labels(self._model).observe(time.monotonic() - self._began)

    def update(self, update: Started | TextDelta | Finished) -> None:
        now = time.monotonic()
        if isinstance(update, Started):
            self._metrics.prompt_tokens.labels(self._model).inc(update.prompt_tokens)
        elif isinstance(update, Finished):
            self._metrics.count(self._model, update.stats)
            self._metrics.whole.labels(self._model).observe(now - self._began)
        else:
            self._host.beat()
            self._new_tokens.inc(update.tokens)
            if self._streamed and self._last is None:
                self._first_token.observe(now - self._began)
            elif self._streamed and self._last is not None:
                for _ in range(update.tokens):
                    self._between.observe((now - self._last) / update.tokens)
            self._last = now
