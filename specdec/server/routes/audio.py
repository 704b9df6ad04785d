"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Request, UploadFile
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specdec.pipelines import Transcription
from specdec.pipelines.speech.subtitles import srt, vtt
from specdec.server.answers import event
from specdec.server.cancellation import Cancel, in_threads, primed
from specdec.server.errors import ApiError
from specdec.server.guards import RecordingRoute
from specdec.server.messages import Text
from specdec.server.models import Host
from specdec.server.responses import EventStream, watched
from specdec.server.speech import SpeechModel
from specdec.server.state import client_of, state_of

router = APIRouter(route_class=RecordingRoute, tags=["audio"])

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["segment", "word"]
_COMMON = {"file", "model", "prompt", "response_format", "temperature", "seed", "stream", "timestamp_granularities[]"}

Model = Annotated[Text | None, Form(max_length=256)]
Prompt = Annotated[Text | None, Form(max_length=4096)]
Language = Annotated[Text | None, Form(max_length=32)]
Temperature = Annotated[float, Form(ge=0, le=1, allow_inf_nan=False)]
Seed = Annotated[int, Form(ge=0, lt=2**63)]
Granularities = Annotated[list[Granularity], Form(alias="timestamp_granularities[]"), Field(max_length=2)]


@router.post("/v1/audio/transcriptions")
async def transcriptions(
    request: Request,
    file: Annotated[UploadFile, File()],
    model: Model = None,
    language: Language = None,
    prompt: Prompt = None,
    response_format: Annotated[Format, Form()] = "json",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    timestamp_granularities: Granularities = [],  # noqa: B006
    stream: Annotated[bool, Form()] = False,
) -> Response:
    """Transcribes a recording."""
    await _check_fields(request, _COMMON | {"language"})
    if stream and response_format != "json":
        raise ApiError(400, "`stream` returns plain text: it needs `response_format` json", param="response_format")
    if timestamp_granularities and response_format != "verbose_json":
        raise ApiError(400, "`timestamp_granularities[]` needs `response_format` verbose_json", param="response_format")
    words = "word" in timestamp_granularities
    stamps = None if response_format in ("json", "text") else "word" if words else True
    options = {"task": "transcribe", "return_timestamps": stamps, "temperature": temperature or None, "seed": seed}
    options["language"] = language
    host = state_of(request).host(model, "speech")
    heard = _heard(request, host, file, prompt, options)
    if stream:
        return EventStream(await watched(request, primed(_events(heard))))
    segments = not words or "segment" in timestamp_granularities
    return _answer(host, await watched(request, _whole(heard)), options, response_format, segments=segments)


@router.post("/v1/audio/translations")
async def translations(
    request: Request,
    file: Annotated[UploadFile, File()],
    model: Model = None,
    prompt: Prompt = None,
    response_format: Annotated[Format, Form()] = "json",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
) -> Response:
    """Translates a recording into English."""
    await _check_fields(request, _COMMON - {"stream", "timestamp_granularities[]"})
    stamps = None if response_format in ("json", "text") else True
    options = {"task": "translate", "return_timestamps": stamps, "temperature": temperature or None, "seed": seed}
    host = state_of(request).host(model, "speech")
    found = await watched(request, _whole(_heard(request, host, file, prompt, options)))
    return _answer(host, found, options, response_format, segments=True)


async def _check_fields(request: Request, known: set[str]) -> None:
    if unknown := [name for name in await request.form() if name not in known]:
        raise ApiError(400, f"`{unknown[0][:64]}` is not supported: leave it out", param=unknown[0][:64])


def _heard(
    request: Request, host: Host, file: UploadFile, prompt: str | None, options: dict[str, Any]
) -> AsyncGenerator[str | Transcription, None]:
    """The text window by window, then the `Transcription`; the file is read once the request has its turn."""
    state, model, began = state_of(request), host.model, time.monotonic()
    metrics = state.metrics
    assert isinstance(model, SpeechModel)

    def hear(cancel: Cancel) -> Generator[str | Transcription]:
        metrics.queued.labels(model.name).observe(time.monotonic() - began)
        with file.file:
            content = file.file.read()
        with closing(model.hear(content, prompt, options, cancel)) as items:
            for item in items:
                host.beat()
                if isinstance(item, Transcription):
                    metrics.whole.labels(model.name).observe(time.monotonic() - began)
                    metrics.audio_seconds.labels(model.name).inc(item.duration)
                    metrics.count(model.name, item.stats)
                yield item

    turn = partial(host.turns.turn, client_of(request))
    return in_threads(host.pool, turn, [hear], state.settings.limits.unread_bytes, _size)


async def _whole(heard: AsyncGenerator[str | Transcription, None]) -> Transcription:
    async with aclosing(heard):
        async for item in heard:
            if isinstance(item, Transcription):
                return item
    raise AssertionError("a recording was lost")


async def _events(heard: AsyncGenerator[str | Transcription, None]) -> AsyncGenerator[bytes, None]:
    """OpenAI's events of a transcription: new text after every window, then the whole text."""
    text = sent = ""
    async with aclosing(heard):
        async for item in heard:
            if isinstance(item, Transcription):
                whole = item["text"].strip()
                yield event({"type": "transcript.text.done", "text": whole, "usage": _usage(item)})
            else:
                text += item
                new = text.strip()[len(sent) :]
                sent += new
                if new:
                    yield event({"type": "transcript.text.delta", "delta": new})


def _size(item: str | Transcription) -> int:
    """The bytes of new text; 0 for the whole, which the recording bounds."""
    return len(item.encode()) if isinstance(item, str) else 0


def _usage(found: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(found.duration)}


def _answer(host: Host, found: Transcription, options: dict[str, Any], form: Format, *, segments: bool) -> Response:
    text = found["text"].strip()
    if form == "json":
        return JSONResponse({"text": text, "usage": _usage(found)})
    if form == "text":
        return PlainTextResponse(text + "\n")
    if form in ("srt", "vtt"):
        return PlainTextResponse((srt if form == "srt" else vtt)(found["chunks"]))
    body: dict[str, Any] = {
        "task": options["task"],
        "language": found.language,
        "duration": round(found.duration, 3),
        "text": text,
        "usage": _usage(found),
    }
    if options["return_timestamps"] == "word":
        spans = [(chunk["text"].strip(), *chunk["timestamp"]) for chunk in found["chunks"]]
        body["words"] = [
            {"word": word, "start": start or 0.0, "end": (start or 0.0) if end is None else end}
            for word, start, end in spans
        ]
    if segments:  # between timestamps; OpenAI's scores of segments are null
        unknown = dict.fromkeys(("avg_logprob", "compression_ratio", "no_speech_prob"))
        body["segments"] = [
            {
                "id": number,
                "seek": 0,
                "start": round(segment.start, 3),
                "end": round(segment.end, 3),
                "text": host.model.generator.tokenizer.decode(segment.tokens, skip_special_tokens=True),
                "tokens": segment.tokens,
                **unknown,
            }
            for number, segment in enumerate(chain.from_iterable(found.segments))
        ]
    return JSONResponse(body)
