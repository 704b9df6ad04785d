"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specdec.pipelines import Transcription
from specdec.pipelines.speech.subtitles import srt, vtt
from specdec.server.answers import event
from specdec.server.cancellation import Cancel, in_threads, side_by_side
from specdec.server.errors import ApiError
from specdec.server.guards import RecordingRoute
from specdec.server.messages import Text
from specdec.server.responses import EventStream, watched
from specdec.server.speech import SpeechModel
from specdec.server.state import client_of, state_of

router = APIRouter(route_class=RecordingRoute, tags=["audio"])


class Translation(BaseModel):
    """The form with a recording to translate."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    model: Annotated[Text | None, Field(max_length=256)] = None
    prompt: Annotated[Text | None, Field(max_length=4096)] = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def options(self) -> dict[str, Any]:
        """The transcriber's options."""
        stamps = None if self.response_format in ("json", "text") else True
        how = {"temperature": self.temperature or None, "seed": self.seed}
        return {"task": "translate", "return_timestamps": stamps, **how}


class Transcribing(Translation):
    """The form with a recording to transcribe."""

    language: Annotated[Text | None, Field(max_length=32)] = None
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]], Field(alias="timestamp_granularities[]", max_length=2)
    ] = []
    stream: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The transcriber's options."""
        words = {"return_timestamps": "word"} if "word" in self.timestamp_granularities else {}
        return {**super().options, "task": "transcribe", "language": self.language, **words}


@router.post("/v1/audio/transcriptions")
async def transcriptions(
    request: Request, fields: Annotated[Transcribing, Form(media_type=RecordingRoute.media)]
) -> Response:
    """Transcribes a recording."""
    granularities = fields.timestamp_granularities
    if fields.stream and fields.response_format != "json":
        raise ApiError(400, "`stream` returns plain text: it needs `response_format` json", param="response_format")
    if granularities and fields.response_format != "verbose_json":
        raise ApiError(400, "`timestamp_granularities[]` needs `response_format` verbose_json", param="response_format")
    if fields.stream:
        return await EventStream.begin(request, _events(_transcribe(request, fields)))
    return await _answer(request, fields, segments="word" not in granularities or "segment" in granularities)


@router.post("/v1/audio/translations")
async def translations(
    request: Request, fields: Annotated[Translation, Form(media_type=RecordingRoute.media)]
) -> Response:
    """Translates a recording into English."""
    return await _answer(request, fields, segments=True)


def _transcribe(request: Request, fields: Translation) -> AsyncGenerator[str | Transcription, None]:
    """The text window by window, then the `Transcription`; the file is read once the request has its turn."""
    state, began = state_of(request), time.monotonic()
    (host, model), metrics = state.host(fields.model, SpeechModel), state.metrics

    def decode(cancel: Cancel) -> Generator[str | Transcription]:
        metrics.queued.labels(model.name).observe(time.monotonic() - began)
        with fields.file.file as file:
            content = file.read()
        with closing(model.transcribe(content, fields.prompt, fields.options, cancel)) as items:
            for item in items:
                host.note_token()
                if isinstance(item, Transcription):
                    metrics.whole.labels(model.name).observe(time.monotonic() - began)
                    metrics.audio_seconds.labels(model.name).inc(item.duration)
                    metrics.count(model.name, item.stats)
                yield item

    def size(item: str | Transcription) -> int:
        return len(item.encode()) if isinstance(item, str) else 0  # the recording bounds the whole

    turn = partial(host.turns.turn, client_of(request))
    return side_by_side(turn, [partial(in_threads, host.pool, decode)], state.settings.limits.unread_bytes, size)


async def _whole(transcribing: AsyncGenerator[str | Transcription, None]) -> Transcription:
    async with aclosing(transcribing):
        [transcription] = [item async for item in transcribing if isinstance(item, Transcription)]
    return transcription


async def _events(transcribing: AsyncGenerator[str | Transcription, None]) -> AsyncGenerator[bytes, None]:
    """OpenAI's events of a transcription: new text after every window, then the whole text."""
    text = sent = ""
    async with aclosing(transcribing):
        async for item in transcribing:
            if isinstance(item, Transcription):
                whole = item["text"].strip()
                yield event({"type": "transcript.text.done", "text": whole, "usage": _usage(item)})
            else:
                text += item
                new = text.strip()[len(sent) :]
                sent += new
                if new:
                    yield event({"type": "transcript.text.delta", "delta": new})


def _usage(transcription: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcription.duration)}


async def _answer(request: Request, fields: Translation, *, segments: bool) -> Response:
    transcription, form = await watched(request, _whole(_transcribe(request, fields))), fields.response_format
    text = transcription["text"].strip()
    if form == "json":
        return JSONResponse({"text": text, "usage": _usage(transcription)})
    if form == "text":
        return PlainTextResponse(text + "\n")
    if form in ("srt", "vtt"):
        return PlainTextResponse((srt if form == "srt" else vtt)(transcription.cues))
    body: dict[str, Any] = {
        "task": fields.options["task"],
        "language": transcription.language,
        "duration": round(transcription.duration, 3),
        "text": text,
        "usage": _usage(transcription),
    }
    if fields.options["return_timestamps"] == "word":
        spans = [(chunk["text"].strip(), *chunk["timestamp"]) for chunk in transcription["chunks"]]
        body["words"] = [
            {"word": word, "start": start or 0.0, "end": (start or 0.0) if end is None else end}
            for word, start, end in spans
        ]
    if segments:  # between timestamps; OpenAI's scores of segments are null
        tokenizer = state_of(request).host(fields.model, SpeechModel)[1].generator.tokenizer
        unknown = dict.fromkeys(("avg_logprob", "compression_ratio", "no_speech_prob", "temperature"))
        body["segments"] = [
            {
                "id": number,
                "seek": 0,
                "start": round(segment.start, 3),
                "end": round(segment.end, 3),
                "text": tokenizer.decode(segment.tokens, skip_special_tokens=True),
                "tokens": segment.tokens,
                **unknown,
            }
            for number, segment in enumerate(chain.from_iterable(transcription.segments))
        ]
    return JSONResponse(body)
