"""Servers of tiny models, asked in process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import httpx
import pytest
import soundfile
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from specdec import SpecGenerator, Transcriber
from specdec.server import ServeSettings, create_app, read_settings
from specdec.server.http import server_of
from specdec.server.speech import SpeechModel
from specdec.server.text import TextModel
from tests import speech
from tests.folders import WIDTH, byte_tokenizer
from tests.pipelines.models import CHAT
from tests.tiny import tiny

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = CHAT
PATIENCE = 60.0  # seconds
T = TypeVar("T")
Served = tuple[uvicorn.Server, httpx.AsyncClient]
DRAFTS = {"none": None, "suffix": "suffix", "model": "model", "hybrid": "hybrid"}


@cache
def model_of(draft: str) -> TextModel:
    """The tiny text model with one of `DRAFTS`, the same object in all tests."""
    return text_model(draft=draft)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that takes no longer than it should."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def text_model(name: str = "text", draft: str = "suffix", family: str = "llama", **options: Any) -> TextModel:
    """A tiny model over bytes with one of `DRAFTS`; the draft model is often wrong."""
    small = tiny(family, vocab=WIDTH, seed=1)
    drafts = {"model": small, "hybrid": ("suffix", small)}.get(draft, DRAFTS[draft])
    generator = SpecGenerator(tiny(family, vocab=WIDTH), drafts, tokenizer=TOKENIZER, prefix_cache=True, **options)
    return TextModel(name, generator, context=512)


def speech_model(name: str = "speech") -> SpeechModel:
    """A tiny Whisper with windows of one second."""
    model = speech.whisper(stamps=1.0, end=1.0, max_target_positions=48)
    return SpeechModel(name, Transcriber(model, processor=speech.processor()), 20.0)


def recording(seconds: float = 0.1, kind: str = "WAV") -> bytes:
    """A file of sound."""
    file = io.BytesIO()
    soundfile.write(file, speech.speech(seconds), speech.RATE, format=kind)
    return file.getvalue()


async def until(true: Callable[[], Any]) -> None:
    """Waits until something is so."""
    while not true():
        await asyncio.sleep(0.001)


async def idle(model: TextModel | SpeechModel) -> None:
    """Waits until nothing of any request is left, as the thread that decodes sees to within a round."""
    await until(lambda: model.generator.engine.idle)


def settings(*names: str, **fields: Any) -> ServeSettings:
    """Settings for models of these names."""
    return read_settings({"models": [{"name": name, "target": "tiny"} for name in names or ("text",)], **fields})


def app(*models: TextModel | SpeechModel, **fields: Any) -> FastAPI:
    """An application with these models, one with a suffix draft by default."""
    served = models or (model_of("suffix"),)
    return create_app(settings(*(model.name for model in served), **fields), served)


@asynccontextmanager
async def client(application: FastAPI, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that asks in process."""
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as http:
        yield http
    application.state.server.ends.close()


def state_of(served: Any) -> Any:
    return (served.config.app if isinstance(served, uvicorn.Server) else served).state.server


def turns_of(served: Any, name: str = "text") -> Any:
    """The turns of a model of a server or an application."""
    return state_of(served).hosts[name].turns


class Asking(TestClient):
    """A client for tests that do one thing at a time."""

    def complete(self, **body: Any) -> Any:
        """What a completion is answered, parsed: a whole one, or the events of a stream."""
        answer = self.post("/v1/completions", json=body)
        return events(answer.text) if body.get("stream") else answer.json()


def asking(application: FastAPI, **headers: str) -> Asking:
    """A client that asks in process; the application ends with it."""
    how: dict[str, Any] = {"base_url": "http://127.0.0.1:8000", "client": ("127.0.0.1", 5000)}
    return Asking(application, raise_server_exceptions=False, headers=headers, **how)


def posted(application: FastAPI, body: Any, path: str = "/v1/completions", **how: Any) -> asyncio.Task[Answered]:
    """A request that is under way."""
    return asyncio.ensure_future(asgi(application, "POST", path, body=body, **how))


def facts_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines about requests."""
    return [json.loads(line) for line in caplog.messages if line.startswith("{")]


@asynccontextmanager
async def listening(*models: TextModel | SpeechModel, **fields: Any) -> AsyncIterator[Served]:
    """A server on a socket, of one model with a suffix draft by default, and a client; its log ends with it."""
    served = models or (model_of("suffix"),)
    how = settings(*(model.name for model in served), port=0, **fields)
    server = server_of(create_app(how, served), how)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    [port] = [bound.getsockname()[1] for listener in server.servers for bound in listener.sockets]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
        yield server, client
    server.should_exit = True
    await serving


def events(text: str) -> list[Any]:
    """The events of a stream, the last of them `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Answered:
    """What an application answered, and how many pieces of the body it asked for."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    received: int = 0


async def asgi(
    application: FastAPI,
    method: str,
    path: str,
    *,
    body: Any = None,
    chunks: Sequence[bytes | None] = (),
    length: str | None = None,
    leave: asyncio.Event | None = None,
    root_path: str = "",
    content_type: str = "application/json",
    answer: Answered | None = None,
    **headers: str,
) -> Answered:
    """Asks without a library between: bodies that lie or never end (None), and clients that `leave`.

    `answer` has what has come so far.
    """
    pieces = [json.dumps(body).encode()] if body is not None else list(chunks) or [b""]
    answer, never = answer or Answered(), asyncio.Event()
    head = {"host": "127.0.0.1:8000", "content-type": content_type, **headers}
    head |= {} if length is None else {"content-length": length}

    async def receive() -> dict[str, Any]:
        if answer.received < len(pieces):
            piece = pieces[answer.received]
            if piece is None:
                await never.wait()
            answer.received += 1
            return {"type": "http.request", "body": piece, "more_body": answer.received < len(pieces)}
        await (leave or never).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        answer.body += message.get("body", b"")

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "root_path": root_path, "scheme": "http",
        "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in head.items()],
        "client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    with suppress(Exception):  # a server logs it, after the answer
        await application(scope, receive, send)
    return answer
