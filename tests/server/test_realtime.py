"""`/v1/realtime`: sound that is transcribed as it comes, over a WebSocket."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import WebSocketDenialResponse
from websockets.asyncio.client import connect

from specdec.pipelines.speech.live import Heard
from specdec.server.routes.realtime import _Item, _words
from tests.server.process import KEY
from tests.server.served import app, asking, facts_of, idle, listening, model_of, speech_model, turns_of
from tests.speech import RATE, speech

HEARD = "conversation.item.input_audio_transcription."
SOUND = (speech(2.6, 1) * 2**15).astype("<i2")
EN = {"audio": {"input": {"format": {"rate": RATE}, "transcription": {"language": "en"}}}}
PATH = "/v1/realtime?intent=transcription"
HERE = "ws://127.0.0.1:8000"


@pytest.fixture(scope="module")
def model() -> Any:
    """Its words are short."""
    made = speech_model()
    tokens = made.generator.tokenizer.convert_ids_to_tokens(range(len(made.generator.tokenizer)))
    spaced = torch.tensor([5.0 * token.startswith("Ġ") for token in tokens])
    made.generator.target.model.proj_out.register_forward_hook(lambda module, args, output: output + spaced)
    return made


def whole(model: Any, sound: np.ndarray) -> str:
    """What is heard in a file."""
    return model.transcriber(sound.astype(np.float32) / 2**15, language="en")["text"].strip()


def append(sound: np.ndarray) -> dict[str, Any]:
    return {"type": "input_audio_buffer.append", "audio": base64.b64encode(sound.tobytes()).decode()}


COMMIT = {"type": "input_audio_buffer.commit"}


class Talking:
    """A session whose events are told apart."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        assert self.until("session.created")[-1]["session"]["type"] == "transcription"

    def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            self._socket.send_json(event)

    def until(self, kind: str) -> list[Any]:
        """All events up to one of a kind."""
        events = [self._socket.receive_json()]
        while events[-1]["type"] != kind:
            events.append(self._socket.receive_json())
        return events

    def error(self, event: dict[str, Any]) -> Any:
        self.send(event)
        return self.until("error")[-1]["error"]


@contextmanager
def talking(model: Any, **fields: Any) -> Iterator[Talking]:
    with asking(app(model, **fields)) as http, http.websocket_connect(HERE + PATH) as socket:
        yield Talking(socket)


def test_the_text_is_a_files(model: Any) -> None:
    """Of each stretch between commits; the deltas join to it, and come before all sound is there."""
    with talking(model) as session:
        session.send({"type": "session.update", "session": EN})
        assert session.until("session.updated")[-1]["session"]["audio"]["input"]["format"]["rate"] == RATE
        before = None
        for sound in (SOUND, SOUND[RATE // 2 : RATE]):
            session.send(*(append(block) for block in np.array_split(sound, 5)))
            early = session.until(HEARD + "delta") if before is None else []
            session.send(COMMIT)
            events = early + session.until(HEARD + "completed")
            text, item = whole(model, sound), events[-1]["item_id"]
            assert events[-1]["transcript"] == text
            assert "".join(event["delta"] for event in events if event["type"] == HEARD + "delta") == text
            assert {event["item_id"] for event in events} == {item}
            [committed] = [event for event in events if event["type"] == "input_audio_buffer.committed"]
            assert committed["previous_item_id"] == before
            before = item
        assert events[-1]["usage"] == {"type": "duration", "seconds": 1}


def test_words_that_two_passes_heard() -> None:
    """They are sent once, though marks change; so are final ones, and all letters of languages without spaces."""
    none: Any = None
    item = _Item("item", none, none, none, none, 0.0)
    heard = [Heard("", text) for text in (" printing.", " Printing, in the", " Printing, in the only")]
    assert [item.delta(one) for one in (*heard, Heard(" Print,", " in"))] == ["", "Printing,", " in the", ""]
    item.words = _words(" Print, in the only sense ")
    assert item.rest(len(item.words)) == " only sense"
    item = _Item("item", none, none, none, none, 0.0)
    assert [item.delta(Heard("", text)) for text in ("印刷", "印刷術の")] == ["", "印刷"]


def test_sound_that_is_cleared(model: Any) -> None:
    """It is not heard, and what comes then is."""
    with talking(model) as session:
        clear = {"type": "input_audio_buffer.clear"}
        session.send({"type": "session.update", "session": EN}, append(SOUND), clear, append(SOUND[:RATE]), COMMIT)
        assert session.until("input_audio_buffer.cleared")
        assert session.until(HEARD + "completed")[-1]["transcript"] == whole(model, SOUND[:RATE])


ERRORS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"type": "response.create"}, "an event is a JSON object whose `type` is one of session.update", "type"),
    ({**append(SOUND), "audio": "!"}, "`audio` must be 16-bit samples in base64: encode them so", "audio"),
    ({"type": "input_audio_buffer.append"}, "`audio` must be 16-bit samples in base64", "audio"),
    ({**append(SOUND), "audio": "AAAA"}, "ends with 1 of a sample's 2 bytes: send whole 16-bit samples", None),
    (append(np.zeros(21 * RATE * 2, "<i2")), "above 20 s: send `input_audio_buffer.commit`", "audio"),
    ({"type": "session.update", "session": 3}, "`session` must be an object", "session"),
    ({"type": "session.update", "session": {"tools": []}}, "`tools` is not known here", "tools"),
    (
        {"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 10}}}}},
        "`audio.input.format.rate` must be at least 1,000, got 10",
        "audio.input.format.rate",
    ),
    (
        {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
        "this server finds no turns and no noise: pass null",
        "audio.input.turn_detection",
    ),
    (
        {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "g711_ulaw"}}}}},
        "must be 'audio/pcm', got \"g711_ulaw\"",
        "audio.input.format.type",
    ),
    (
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "whisper-1"}}}}},
        "there is no model 'whisper-1' here; models for speech are 'speech'",
        "model",
    ),
]


def test_errors_are_events(model: Any) -> None:
    """They name the client's event and the way out, and the session goes on."""
    with talking(model) as session:
        assert session.error(COMMIT)["code"] == "input_audio_buffer_commit_empty"
        for event, message, param in ERRORS:
            error = session.error({**event, "event_id": "mine"})
            assert message in error["message"]
            assert (error["param"], error["event_id"], error["type"]) == (param, "mine", error["type"])
        session._socket.send_bytes(b"sound")
        assert "an event is a JSON object" in session.until("error")[-1]["error"]["message"]
        language = {"audio": {"input": {"transcription": {"language": "klingon"}}}}
        session.send({"type": "session.update", "session": language})
        assert "`language` must be one that the model knows" in session.error(append(SOUND))["message"]
        session.send({"type": "session.update", "session": EN}, append(SOUND[:RATE]), COMMIT)
        assert session.until(HEARD + "completed")[-1]["transcript"] == whole(model, SOUND[:RATE])


def test_an_error_of_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its stretch of sound, not the session."""
    with talking(model) as session, monkeypatch.context() as patch:
        patch.setattr(model.transcriber.generator.target, "encode", lambda *_: 1 / 0)
        session.send(append(SOUND), COMMIT)
        assert session.until(HEARD + "failed")[-1]["error"]["code"] == "internal_error"
        patch.undo()
        session.send(append(SOUND), COMMIT)
        assert session.until(HEARD + "completed")


def test_refused_before_it_begins(model: Any, key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the status and the message of any request, and its line in the log."""
    caplog.set_level("INFO")
    own = {"Authorization": f"Bearer {KEY}"}
    cases: list[tuple[str, dict[str, str], int]] = [
        (PATH, {}, 401),
        ("/v1/realtime?model=speech", own, 400),
        (f"{PATH}&model=other", own, 404),
        (PATH, {**own, "Origin": "https://elsewhere.example"}, 403),
        (PATH, {**own, "Host": "elsewhere.example"}, 421),
    ]
    with asking(app(model, api_key_file=key_file)) as http:
        for path, headers, status in cases:
            with (
                pytest.raises(WebSocketDenialResponse) as refused,
                http.websocket_connect(HERE + path, headers=headers),
            ):
                pass
            assert refused.value.status_code == status
            assert refused.value.json()["error"]["message"]
        with http.websocket_connect(HERE + PATH, headers=own, subprotocols=["realtime"]) as socket:
            assert socket.accepted_subprotocol == "realtime"
    assert [fact["status"] for fact in facts_of(caplog)] == [401, 400, 404, 403, 421, 101]
    with asking(app(model_of("suffix"))) as http, pytest.raises(WebSocketDenialResponse) as refused:
        http.websocket_connect(HERE + PATH).__enter__()
    assert "no model of this server is for speech" in refused.value.json()["error"]["message"]


async def test_openais_client_on_a_socket(model: Any) -> None:
    """It names the events; a connection may be idle longer than a request's head."""
    from openai import AsyncOpenAI  # which takes a second

    async with listening(model, limits={"head_seconds": 0.2}) as (_, http):
        client = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        how: dict[str, Any] = {"model": "speech", "extra_query": {"intent": "transcription"}}
        async with client.realtime.connect(**how) as session:
            assert (await session.recv()).type == "session.created"
            await asyncio.sleep(0.3)
            await session.send({"type": "session.update", "session": EN})  # type: ignore[arg-type]
            await session.input_audio_buffer.append(audio=base64.b64encode(SOUND.tobytes()).decode())
            await session.input_audio_buffer.commit()
            while (event := await session.recv()).type != HEARD + "completed":
                pass
            assert event.transcript == whole(model, SOUND)


async def test_a_client_that_leaves_ends_the_work(model: Any) -> None:
    """At once, though it sent more than could be heard."""
    async with listening(model, limits={"audio_seconds": 600}) as (server, http):
        address = str(http.base_url).replace("http", "ws") + PATH
        async with connect(address) as socket:
            for _ in range(20):
                await socket.send(json.dumps(append(np.tile(SOUND, 5))))
            while json.loads(await socket.recv())["type"] != HEARD + "delta":
                pass
        await idle(model)
        while turns_of(server, "speech").running or server.server_state.connections:
            await asyncio.sleep(0.01)


async def test_the_server_ends(model: Any) -> None:
    """And closes its sessions, as services do that restart."""
    async with listening(model) as (server, http), connect(str(http.base_url).replace("http", "ws") + PATH) as socket:
        server.should_exit = True
        await socket.wait_closed()
        assert socket.close_code == 1012
