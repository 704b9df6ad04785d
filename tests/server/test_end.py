"""How a server begins and ends: models decode before it listens, balancers see it leave, and the drain is kept."""

import asyncio
import signal
import time
from contextlib import nullcontext, suppress

import httpx
import pytest
import uvicorn

from specdec.server.http import server_of
from specdec.server.models import Host
from tests.server.served import app, facts_of, listening, settings, speech_model, state_of, turns_of, until

LONG = {"prompt": "abab", "max_tokens": 500, "seed": 1, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn raises signals again, once it has ended."""
    monkeypatch.setattr(uvicorn.Server, "capture_signals", lambda _: nullcontext())


async def test_models_decode_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request after "listening" took eight seconds."""
    listened: list[bool] = []
    warm_up, server = Host.warm_up, server_of(app(), settings(port=0))

    async def watched(host: Host) -> None:
        await warm_up(host)
        listened.append(server.started)

    monkeypatch.setattr(Host, "warm_up", watched)
    serving = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    server.should_exit = True
    await serving
    assert listened == [False]


async def test_a_model_that_cannot_decode_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are served, and `/ready` says no."""

    async def failing(host: Host) -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(Host, "warm_up", failing)
    async with listening() as (_, client):
        codes = [(await client.get(path)).status_code for path in ("/health", "/ready")]
    assert codes == [200, 503]
    assert [one.getMessage() for one in caplog.records if one.exc_info] == ["a model cannot decode"]


@pytest.mark.parametrize("early", [True, False], ids=["before anything", "while a model decodes"])
async def test_a_signal_before_it_listens(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an AttributeError in the signal's handler."""

    async def endless(host: Host) -> None:
        if not early:
            server.handle_exit(signal.SIGTERM, None)
        await asyncio.Event().wait()

    monkeypatch.setattr(Host, "warm_up", endless)
    server = server_of(app(), settings(port=0))
    if early:
        server.handle_exit(signal.SIGTERM, None)
    await server.serve()
    assert not server.started


async def test_balancers_see_it_leave() -> None:
    """The listener closed at once, so that nobody could ask `/ready`."""
    async with listening(limits={"notice_seconds": 2, "drain_seconds": 20}) as (server, client):
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.2)
        codes: list[int] = []
        for path in ("/ready", "/health"):
            async with httpx.AsyncClient(base_url=client.base_url, verify=False) as new:
                codes.append((await new.get(path)).status_code)
        codes.append((await client.post("/v1/completions", json={**LONG, "max_tokens": 2})).status_code)
        await asyncio.sleep(2.5)
        async with httpx.AsyncClient(base_url=client.base_url, verify=False) as late:
            with pytest.raises(httpx.ConnectError):
                await late.get("/ready")
    assert codes == [503, 200, 503]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_closes_the_listener(sig: signal.Signals) -> None:
    """As Ctrl-C does at once."""
    async with listening(limits={"notice_seconds": 30}) as (server, _):
        began = time.monotonic()
        server.handle_exit(sig, None)
        if sig == signal.SIGTERM:
            server.handle_exit(sig, None)
    assert time.monotonic() - began < 5


async def test_the_drain_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """What takes longer is told so, and a body that never comes is not waited for.

    In the log a stream that was cut was like a whole one.
    """
    caplog.set_level("INFO", "specdec.server")
    async with listening(limits={"drain_seconds": 0.5}) as (server, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        tasks = [
            asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "n": 4, "stream": stream}))
            for stream in (True, False)
        ]
        turns = turns_of(server)
        await until(lambda: turns.running >= 2)
        began = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        streamed, whole = await asyncio.gather(*tasks)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert all("the server is shutting down" in text for text in (streamed.text, whole.text))
    assert whole.status_code == 503
    assert 0.5 <= time.monotonic() - began < 3
    assert [line["error"] for line in facts_of(caplog) if line["status"] == 200] == ["unavailable"]
    assert caplog.messages[-1] == "stopped, 2 requests were cut"


async def test_a_second_interrupt_ends_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the event loop in the midst of the requests: six tracebacks, and "stopped", with no request cut."""
    caplog.set_level("INFO", "specdec.server")
    async with listening(limits={"drain_seconds": 60}) as (server, client):
        long = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "n": 4}))
        await until(lambda: turns_of(server).running >= 1)
        server.handle_exit(signal.SIGINT, None)
        await asyncio.sleep(0.3)  # uvicorn waits for the request
        began = time.monotonic()
        server.handle_exit(signal.SIGINT, None)
        answer = await long
    assert time.monotonic() - began < 5
    assert (answer.status_code, server.force_exit) == (503, False)
    assert caplog.messages[-1] == "stopped, 1 request was cut"
    assert not [line for line in caplog.records if line.exc_info]


async def test_uploads_that_wait_begin_nothing_after_the_drain() -> None:
    """They got the turns of those that were given up, and ended in a bare 500 when the process did."""
    limits = {"recordings": 1, "drain_seconds": 0.3, "per_key": 20}
    async with listening(speech_model(), limits=limits) as (server, client):
        state = state_of(server)
        turns, files = turns_of(server, "speech"), {"file": ("a.wav", b"no sound")}
        async with turns.turn("somebody"):
            tasks = [asyncio.ensure_future(client.post("/v1/audio/transcriptions", files=files)) for _ in range(10)]
            await until(lambda: turns.waiting >= 7 and state.uploads.waiting >= 3)
            began = time.monotonic()
            server.handle_exit(signal.SIGTERM, None)
            answers = await asyncio.gather(*tasks)
            assert time.monotonic() - began < 3
    assert [answer.status_code for answer in answers] == [503] * 10
    assert all("the server is shutting down" in answer.text for answer in answers)


async def test_work_that_comes_after_the_drain_is_given_up() -> None:
    """It closes what it was handed."""
    events: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("closed")

    state = state_of(app())
    state.stop()
    task = asyncio.ensure_future(work())
    state.track(task)
    await asyncio.wait({task}, timeout=5)
    assert (events, task.cancelled()) == (["closed"], True)
