"""`/v1/realtime`: OpenAI's transcription session, over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specdec.pipelines import Transcription
from specdec.pipelines.speech.audio import Resampler
from specdec.pipelines.speech.live import Heard, Live
from specdec.pipelines.speech.sources import pcm_samples
from specdec.server.cancellation import END, Cancel, step
from specdec.server.errors import ApiError, FieldError, invalid, reported
from specdec.server.guards import authorise
from specdec.server.messages import Text
from specdec.server.models import Host
from specdec.server.speech import SpeechModel
from specdec.server.state import ERROR, State, client_of

router = APIRouter()
_BEHIND = 30.0  # seconds of sound that may wait; then the client has to
_WORD = re.compile(r"\s*(?:[\u0e00-\u0eff\u3040-\u9fff]|[^\s\u0e00-\u0eff\u3040-\u9fff]+)")  # letters, without spaces
_HEARD = "conversation.item.input_audio_transcription."


def _null(value: Any) -> None:
    if value is not None:
        raise FieldError("this server finds no turns and no noise: pass null, and send `input_audio_buffer.commit`")


Null = Annotated[Any, AfterValidator(_null)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Format(_Part):
    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Annotated[int, Field(ge=1000, le=384_000)] = 24_000


class _Hearing(_Part):
    model: Annotated[Text | None, Field(max_length=256)] = None
    language: Annotated[Text | None, Field(max_length=32)] = None
    prompt: Annotated[Text | None, Field(max_length=4096)] = None


class _Input(_Part):
    format: _Format = _Format()
    transcription: _Hearing = _Hearing()
    turn_detection: Null = None
    noise_reduction: Null = None


class _Audio(_Part):
    input: _Input = _Input()


class TranscriptionSession(_Part):
    """The settings of a session, with OpenAI's names."""

    type: Literal["transcription"] = "transcription"
    audio: _Audio = _Audio()

    def updated(self, changes: Any) -> TranscriptionSession:
        """With other values for some fields; raises a 400 for wrong values."""
        if not isinstance(changes, Mapping):
            raise ApiError(400, "`session` must be an object: pass the fields to change", param="session")
        whole = _merged(self.model_dump(), changes)
        try:
            return TranscriptionSession.model_validate(whole)
        except ValidationError as error:
            raise invalid(error.errors(), whole) from None


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields with the new values of some."""
    parts = {name: value for name, value in new.items() if isinstance(value, dict) and isinstance(old.get(name), dict)}
    return {**old, **new, **{name: _merged(old[name], value) for name, value in parts.items()}}


def _words(text: str) -> list[str]:
    """The words of a text with the spaces before them; they join to the text, stripped."""
    return _WORD.findall(text.strip())


def _bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()


@dataclass
class _Item:
    """A stretch of sound up to a commit, its `final` text, the `words` of the last pass, and how many were `sent`."""

    id: str
    host: Host
    model: SpeechModel
    live: Live[Transcription]
    resample: Resampler
    began: float
    final: str = ""
    words: list[str] = field(default_factory=list)
    sent: int = 0

    def delta(self, heard: Heard) -> str:
        """New words that are final, or that two passes in turn heard, but for case and marks; not the last word."""
        self.final += heard.final
        before, self.words = self.words, _words(self.final + heard.partial)
        are_equal = [_bare(old) == _bare(new) for old, new in zip(before, self.words, strict=False)]
        agreed = max([*are_equal, False].index(False), len(_words(self.final)))
        return self.rest(min(agreed, len(self.words) - 1))

    def rest(self, count: int) -> str:
        """The words, up to this number, that were not sent."""
        first, self.sent = self.sent, max(self.sent, count)
        return "".join(self.words[first:count])


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket) -> None:
    """Transcribes sound as it comes; refuses, before the connection is made, what is no such session."""
    state: State = socket.app.state.server
    with ExitStack() as ends:
        try:
            authorise(socket, state)
            state.admit()
            ends.enter_context(state.clients.request(client_of(socket)))
            if socket.query_params.get("intent") != "transcription":
                raise ApiError(400, "only sessions of transcription exist: add ?intent=transcription", param="intent")
            session = _Session(socket, state)
        except Exception as error:
            fault = reported(error)
            socket.scope[ERROR] = fault.code
            return await socket.send_denial_response(fault.response)
        await socket.accept(subprotocol="realtime" if "realtime" in socket.scope["subprotocols"] else None)
        await session.run()


class _Session:
    """One connection: takes a client's events, while a task decodes what they bring."""

    def __init__(self, socket: WebSocket, state: State) -> None:
        self._socket, self._state, self._settings = socket, state, TranscriptionSession()
        self._choose(socket.query_params.get("model"))
        self._items, self._current, self._before = list[_Item](), None, None
        self._wakes, self._rests, self._cancel = asyncio.Event(), asyncio.Event(), Cancel()
        self._handlers = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
        }

    _current: _Item | None
    _before: str | None  # the id of the last committed item

    def _choose(self, name: str | None) -> None:
        """Takes this model for what comes next; raises a 404 or 400 where there is none."""
        self._host, self._model = self._state.host(name, SpeechModel)

    async def run(self) -> None:
        """Ends, with all work, when the client leaves."""
        await self._send("session.created", session=self._settings.model_dump())
        tasks = [asyncio.ensure_future(part) for part in (self._listen(), self._work())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for error in (task.exception() for task in tasks if not task.cancelled()):
                if isinstance(error, Exception) and not isinstance(error, WebSocketDisconnect):
                    reported(error)

    async def _listen(self) -> None:
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            await self._take(message.get("text") or "")

    async def _take(self, text: str) -> None:
        """Handles a client's event; an error becomes an event that names it."""
        event: Any = None
        try:
            try:
                event = json.loads(text)
                handle = self._handlers[event["type"]]
            except (ValueError, TypeError, KeyError, RecursionError):
                kinds = ", ".join(self._handlers)
                raise ApiError(400, f"an event is a JSON object whose `type` is one of {kinds}", param="type") from None
            await handle(event)
        except Exception as error:
            number = event.get("event_id") if isinstance(event, dict) else None
            await self._send("error", error={**reported(error).body["error"], "event_id": number})

    async def _update(self, event: Mapping[str, Any]) -> None:
        settings = self._settings.updated(event.get("session"))
        if (model := settings.audio.input.transcription.model) is not None:
            self._choose(model)
        self._settings = settings
        await self._send("session.updated", session=settings.model_dump())

    async def _append(self, event: Mapping[str, Any]) -> None:
        try:
            content = base64.b64decode(event.get("audio", None), validate=True)
        except (TypeError, ValueError):
            message = "`audio` must be 16-bit samples in base64: encode them so"
            raise ApiError(400, message, param="audio", code="invalid_audio") from None
        samples, item, most = pcm_samples(content), self._current, self._model.seconds
        seconds = len(samples) / self._settings.audio.input.format.rate
        if seconds + (0.0 if item is None else item.live.duration) > most:
            raise ApiError(400, f"the sound is above {most:g} s: send `input_audio_buffer.commit`", param="audio")
        item = item or self._begin()
        item.live.hear(item.resample(samples))
        self._wakes.set()
        while sum(item.live.behind for item in self._items) > _BEHIND:
            self._rests.clear()
            await self._rests.wait()

    def _begin(self) -> _Item:
        """A new item, which takes sound."""
        hearing, source = self._settings.audio.input.transcription, self._settings.audio.input.format.rate
        live = self._model.live(hearing.prompt, {"language": hearing.language}, self._cancel)
        resample, number = Resampler(source, live.rate), secrets.token_hex(8)
        item = _Item(f"item_{number}", self._host, self._model, live, resample, time.monotonic())
        self._items.append(item)
        self._current = item
        return item

    async def _commit(self, event: Mapping[str, Any]) -> None:
        item, before = self._current, self._before
        if item is None:
            message = "no sound came since the last commit: send `input_audio_buffer.append` first"
            raise ApiError(400, message, code="input_audio_buffer_commit_empty")
        self._current, self._before = None, item.id
        item.live.hear(item.resample.rest())
        item.live.end()
        self._wakes.set()
        await self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=before)

    async def _clear(self, event: Mapping[str, Any]) -> None:
        self._drop(self._current)
        await self._send("input_audio_buffer.cleared")

    def _drop(self, item: _Item | None) -> None:
        self._items = [other for other in self._items if other is not item]
        self._current = None if item is self._current else self._current

    async def _work(self) -> None:
        """Decodes the first item until its end, then the next, whenever there is enough of it."""
        while True:
            self._wakes.clear()
            while self._items and self._items[0].live.is_due:
                await self._pass(self._items[0])
                self._rests.set()
            await self._wakes.wait()

    async def _pass(self, item: _Item) -> None:
        host = item.host
        try:
            async with host.turns.turn(client_of(self._socket)):
                heard = await step(host.pool, item.live, self._cancel)
        except Exception as error:
            if item in self._items:
                self._drop(item)
                await self._tell(item, "failed", error=reported(error).body["error"])
            return
        host.note_token()
        if item not in self._items:
            return
        if heard is END:
            await self._complete(item)
        elif delta := item.delta(heard):
            await self._tell(item, "delta", delta=delta)

    async def _complete(self, item: _Item) -> None:
        result, metrics, name = item.live.result(), self._state.metrics, item.model.name
        self._drop(item)
        metrics.whole.labels(name).observe(time.monotonic() - item.began)
        metrics.audio_seconds.labels(name).inc(result.duration)
        metrics.count(name, result.stats)
        item.words = _words(result["text"])
        if delta := item.rest(len(item.words)):
            await self._tell(item, "delta", delta=delta)
        usage = {"type": "duration", "seconds": math.ceil(result.duration)}
        await self._tell(item, "completed", transcript=result["text"].strip(), usage=usage)

    async def _tell(self, item: _Item, kind: str, **fields: Any) -> None:
        await self._send(_HEARD + kind, item_id=item.id, content_index=0, **fields)

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send_json({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields})
