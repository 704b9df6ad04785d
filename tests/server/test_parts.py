"""Turns among clients, work in threads, grammars, recordings: the parts of a server."""

import asyncio
import re
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, partial
from typing import Any

import pytest

from specdec.decoding.processors.grammar import Grammar
from specdec.options.generate import Form
from specdec.server.admission import Admission
from specdec.server.cancellation import Cancel, in_threads, side_by_side
from specdec.server.errors import ApiError
from tests.folders import WIDTH
from tests.generator import test_forms
from tests.generator.test_forms import SCHEMA, is_person
from tests.server.served import (
    PATIENCE,
    TOKENIZER,
    Answered,
    app,
    asking,
    events,
    idle,
    model_of,
    posted,
    recording,
    speech_model,
    turns_of,
    until,
)

VOCABULARY = pytest.importorskip("llguidance.hf").from_tokenizer(TOKENIZER, WIDTH)


async def test_turns_go_round() -> None:
    """One client's hundred requests do not keep another's one waiting for more than a turn."""
    order: list[str] = []

    async def ask(turns: Admission, client: str) -> None:
        async with turns.turn(client):
            order.append(client)
            await asyncio.sleep(0)

    turns = Admission(2, 200)
    many = [asyncio.ensure_future(ask(turns, "many")) for _ in range(100)]
    await asyncio.sleep(0)
    few = [asyncio.ensure_future(ask(turns, "few")) for _ in range(3)]
    await asyncio.gather(*many, *few)
    assert (turns.running, turns.waiting) == (0, 0)
    assert len(order) == 103
    assert max(i for i, name in enumerate(order) if name == "few") < 10


async def test_who_waits_most_makes_room() -> None:
    """One client's many that wait, or have left, locked all others out."""
    turns = Admission(1, 4)
    async with turns.turn("first"):

        async def wait(client: str) -> str:
            async with turns.turn(client):
                return client

        waiting = [asyncio.ensure_future(wait("many")) for _ in range(4)]
        for client in ("few", "few", "few", "other"):
            await asyncio.sleep(0)
            waiting.append(asyncio.ensure_future(wait(client)))
        await asyncio.sleep(0)
        assert turns.waiting == 4
    results = await asyncio.gather(*waiting, return_exceptions=True)
    answers = [result.status_code if isinstance(result, ApiError) else result for result in results]
    assert answers == ["many", 429, 429, 429, "few", "few", 429, "other"]
    assert (turns.running, turns.waiting) == (0, 0)


@pytest.mark.parametrize("early", [True, False])
async def test_turns_given_up(early: bool) -> None:
    """Whoever leaves the queue, also in the moment of being called, costs nobody a turn."""
    turns, ends = Admission(1, 10), [asyncio.Event() for _ in range(3)]

    async def hold(name: str, until: asyncio.Event) -> None:
        async with turns.turn(name):
            await until.wait()

    first, left, right = (asyncio.ensure_future(hold(name, end)) for name, end in zip("abc", ends, strict=True))
    await asyncio.sleep(0)
    if early:
        left.cancel()
    ends[0].set()
    await first
    left.cancel()  # otherwise it has just been called
    ends[2].set()
    await right
    assert (turns.running, turns.waiting, left.cancelled()) == (0, 0, True)


async def in_thread(items: int, log: list[Any]) -> AsyncGenerator[bytes, None]:
    """What comes of a job with so many items, after which an error comes, where nine may wait."""

    def job(cancel: Cancel) -> Generator[bytes]:
        try:
            for _ in range(items):
                assert threading.current_thread().name.startswith("helper")
                yield b"x"
            raise ValueError("no")
        finally:
            log.append("ended")

    with ThreadPoolExecutor(1, thread_name_prefix="helper") as pool:
        turn, work = partial(Admission(1, 0).turn, "a"), partial(in_threads, pool, job)
        async with aclosing(side_by_side(turn, [work], 9, len)) as items_of_job:
            async for item in items_of_job:
                yield item


async def test_a_step_under_way_is_waited_for() -> None:
    """Whoever is cancelled tells the step, and its thread is free when the request is gone."""
    begun, ends = threading.Event(), list[str]()

    def job(cancel: Cancel) -> Generator[bytes]:
        begun.set()
        try:
            assert cancel.wait(PATIENCE)
            cancel.check()
            yield b""
        finally:
            ends.append("ended")

    with ThreadPoolExecutor(1) as pool:
        waiting = asyncio.ensure_future(in_threads(pool, job, print))
        await until(begun.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ends == ["ended"]


async def test_what_runs_in_threads() -> None:
    """All of it comes, in order, and an error after it; jobs end before a slow reader does."""

    async def read(items: int) -> list[Any]:
        log: list[Any] = []
        pieces: list[Any] = []
        try:
            async for item in in_thread(items, log):
                await until(lambda: log)
                pieces.append(item)
        except (ValueError, ApiError) as error:
            pieces.append(str(error))
        assert log == ["ended"]
        return pieces

    assert await read(9) == [b"x"] * 9 + ["no"]
    assert "too slowly" in (await read(10**9))[-1]


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    **{name: test_forms.FORMS[name] for name in ("format", "json", "regex", "lark", "choice")},
    "guided_json": ({"guided_json": SCHEMA}, is_person),
    "nested": ({"structured_outputs": {"choice": ["yes", "no"]}}, re.compile("yes|no").fullmatch),
    "nested schema": ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_person),
    "beams": ({"guided_regex": "[ab]{3}-[0-9]", "num_beams": 3}, re.compile("[ab]{3}-[0-9]").fullmatch),
}


@pytest.mark.parametrize("name", FORMS)
def test_answers_in_a_form(name: str) -> None:
    """They are in it, by each of the fields; two choices, and beams, do not mix up."""
    fields, fits = FORMS[name]
    drawn = {} if name == "beams" else {"seed": 11, "top_k": 3}
    with asking(app(model_of("suffix"))) as c:
        choices = c.complete(prompt="abab", max_tokens=60, n=2, **drawn, **fields)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2
    assert all(fits(choice["text"]) for choice in choices)


def test_every_character_may_be_in_a_choice() -> None:
    """One of them was an error that named the grammar within."""
    points = [*range(0x300), 0x2028, 0xFEFF, 0xFFFD, 0x1F600, 0x10FFFF]
    grammar = Grammar(Form("choice", [f"{chr(point)}x" for point in points], "guided_choice"), VOCABULARY)
    for point in points:
        ids = TOKENIZER(f"{chr(point)}x", add_special_tokens=False)["input_ids"]
        assert grammar.allowed([], ids) == len(ids), hex(point)


def test_the_schema_tells_of_forms() -> None:
    """Clients that are made from the schema can send vLLM's field: it was accepted, and not in there."""
    with asking(app()) as c:
        schemas = c.get("/openapi.json").json()["components"]["schemas"]
    for request in ("CompletionRequest", "ChatRequest"):
        [form, _] = schemas[request]["properties"]["structured_outputs"]["anyOf"]
        assert form == {"$ref": "#/components/schemas/StructuredOutputs"}
    schema = schemas["StructuredOutputs"]
    assert schema["properties"].keys() == {"json", "regex", "grammar", "choice"}
    assert all(field["description"] for field in (schema, *schema["properties"].values()))


hearing = cache(speech_model)


def heard(fields: dict[str, Any], content: bytes, path: str = "transcriptions", **settings: Any) -> Any:
    """The answer about a recording."""
    with asking(app(hearing(), **settings)) as c:
        return c.post(f"/v1/audio/{path}", files={"file": ("a.wav", content)}, data=fields)


def test_transcriptions() -> None:
    """All forms say the same, which is what `Transcriber` says."""
    content = recording(2.5)
    expected = hearing().transcriber(content, language="en", task="transcribe", return_timestamps=True)
    plain = hearing().transcriber(content, language="en", task="transcribe")["text"].strip()
    bodies = {}
    for form in ("json", "text", "srt", "vtt", "verbose_json"):
        answer = heard({"model": "speech", "language": "en", "response_format": form}, content)
        assert answer.status_code == 200, answer.text
        bodies[form] = answer.json() if "json" in form else answer.text
    assert bodies["json"]["text"] == bodies["text"].strip() == plain
    assert bodies["json"]["usage"] == {"type": "duration", "seconds": 3}
    start = f"00:00:{expected['chunks'][0]['timestamp'][0]:06.3f}"
    assert bodies["srt"].startswith(f"1\n{start.replace('.', ',')} --> ")
    assert bodies["vtt"].startswith(f"WEBVTT\n\n{start} --> ")
    verbose = bodies["verbose_json"]
    assert verbose["text"] == expected["text"].strip()
    assert verbose["duration"] == 2.5
    assert [one["start"] for one in verbose["segments"]] == sorted(one["start"] for one in verbose["segments"])
    assert "words" not in verbose


def test_streamed_transcriptions() -> None:
    """Every window's text comes when it is read, and all of it is the text of the whole answer."""
    content = recording(3.5)
    whole, stream = heard({"language": "en"}, content).json(), heard({"language": "en", "stream": "true"}, content)
    assert stream.headers["content-type"].startswith("text/event-stream")
    parts = events(stream.text)
    assert parts.pop() == "[DONE]"
    assert parts.pop() == {"type": "transcript.text.done", **whole}
    assert {event["type"] for event in parts} == {"transcript.text.delta"}
    assert len(parts) > 2
    assert "".join(event["delta"] for event in parts) == whole["text"]
    unread = heard({"language": "en", "stream": "true"}, content, limits={"unread_bytes": 1})
    assert "reads too slowly" in unread.text  # their pieces counted for nothing


def test_words_and_translations() -> None:
    """Words have times where they are asked for; a translation is another text."""
    content = recording(1.5, "FLAC")
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"], "language": "de"}
    words = heard(fields, content).json()
    assert all(one["start"] <= one["end"] for one in words["words"])
    assert "segments" not in words
    assert heard({"language": "de"}, content).json()["text"] != heard({}, content, "translations").json()["text"]


_BOUNDARY = "x" * 20
_FORM = f"multipart/form-data; boundary={_BOUNDARY}"
_PATH = "/v1/audio/transcriptions"


def post_form(application: Any, *chunks: bytes | None, **how: Any) -> asyncio.Task[Answered]:
    """A form that is under way."""
    return posted(application, None, path=_PATH, chunks=chunks, content_type=_FORM, **how)


def form(content: bytes) -> bytes:
    """A body with a recording."""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()


async def test_recordings_wait_on_disk_or_unread() -> None:
    """Of those that wait few have arrived, and none is in memory. (All were, and on disk: 20 took 480 MiB twice.)"""
    body, size = form(b"no sound" * 2**19), 2**22
    application = app(hearing(), limits={"recordings": 1, "per_key": 20})
    turns = turns_of(application, "speech")
    answers = [Answered() for _ in range(20)]
    tracemalloc.start()
    async with turns.turn("somebody"):
        work = [post_form(application, body, answer=answer) for answer in answers]
        await until(lambda: turns.waiting >= 7)
        await asyncio.sleep(0.05)
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(answer.received for answer in answers) == 7
        assert memory < 7 * size / 2
    await asyncio.gather(*work)
    assert {answer.status for answer in answers} == {400}
    application.state.server.draining = True
    late = await post_form(application, body)
    assert (late.status, late.received) == (503, 0)


async def test_waiting_to_arrive_has_an_end() -> None:
    """A recording that is not its turn to arrive is told so after as long as a request may take."""
    application = app(hearing(), limits={"recordings": 1, "request_seconds": 0.1})
    work = [post_form(application, b"--", None) for _ in range(8)]
    done, rest = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    assert [task.result().status for task in done] == [504]


def test_a_full_disk_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A 503 and a line in the log; it was the client's error, and nobody's who keeps the server."""
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    answer = heard({}, b"a" * 2**21)
    assert answer.status_code == 503
    assert "no room" in answer.json()["error"]["message"]
    assert [record.message for record in caplog.records if "/no/such/folder" in record.message]


def test_recordings_come_in_forms() -> None:
    """They are told how a recording is sent, and where no model hears. ("There is no model None here", it said.)"""
    with asking(app()) as c:
        unheard = c.post(_PATH, files={"file": ("a.wav", b"no sound")}).json()["error"]["message"]
    assert unheard == "no model of this server is for speech"
    with asking(app(hearing())) as c:
        kinds = [_FORM, "multipart/form-data", "application/x-www-form-urlencoded"]
        answers = [c.post(_PATH, content=b"a=b", headers={"Content-Type": kind}) for kind in kinds]
    assert [answer.status_code for answer in answers] == [400, 400, 415]
    assert all("curl -F file=@" in answer.json()["error"]["message"] for answer in answers[1:])


async def test_a_recording_nobody_waits_for() -> None:
    """Its decoding ends within two rounds."""
    leave, application = asyncio.Event(), app(hearing())
    work = post_form(application, form(recording(19.0)), leave=leave)
    engine = hearing().generator.engine
    await until(lambda: engine.running)
    leave.set()
    await work
    await idle(hearing())
    assert application.state.server.hosts["speech"].load["running"] == 0
    application.state.server.ends.close()
