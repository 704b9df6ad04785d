"""Clients that hold connections: half heads, answers that nobody reads, more of them than there is room for."""

import asyncio
import errno
import json
import resource
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from specdec.server import http as server_module
from tests.server.served import events, facts_of, listening, speech_model, state_of, text_model, turns_of, until

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LONG = {"prompt": "abab", "max_tokens": 100, "seed": 1, "ignore_eos": True, "n": 4, "logprobs": 5}


async def opened(client: httpx.AsyncClient, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this was sent."""
    port = client.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


@asynccontextmanager
async def unread(
    client: httpx.AsyncClient, data: bytes, host: str = "127.0.0.1", buffer: int = 16_384
) -> AsyncGenerator[socket.socket, None]:
    """A connection from an address on which this was sent, of a client that does not read, with a small buffer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        connection.bind((host, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", client.base_url.port))
        await loop.sock_sendall(connection, data)
        yield connection


async def answer(client: httpx.AsyncClient, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and everything behind them of what is answered until the server hangs up."""
    reader, writer = await opened(client, data)
    raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def body_of(fields: Any) -> bytes:
    """A request for a text, as it is on the wire."""
    content = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


HALF = {
    "silent": b"",
    "half a head": GET,
    "half a second head": GET + b"\r\n" + GET,
    "half a body after its answer": GET + b"Content-Length: 9\r\n\r\nhalf",
}


@pytest.mark.parametrize("name", HALF)
async def test_half_requests_end(name: str) -> None:
    """A socket without a whole head stayed open for ever, also one that sent a byte now and then after an answer."""
    started = time.monotonic()
    async with listening(limits={"head_seconds": 0.3}) as (server, client):
        reader, writer = await opened(client, HALF[name])
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            await asyncio.sleep(0.05)
            if not writer.is_closing():
                writer.write(b"x" if "half" in name else b"")
        await until(lambda: not server.server_state.connections)
        writer.close()
    assert time.monotonic() - started < 5


async def test_a_request_may_take_longer_than_its_head() -> None:
    """The time for heads does not end what is being answered, nor a body that takes its time."""
    async with listening(limits={"head_seconds": 0.2}) as (_, client):
        data = body_of({"prompt": "abc", "max_tokens": 4})
        reader, writer = await opened(client, data[:-1])
        await asyncio.sleep(0.5)
        writer.write(data[-1:])
        status = int((await reader.readline()).split()[1])
        writer.close()
    assert status == 200


PAGES = (GET.replace(b"/health", b"/page/app.js") + b"\r\n") * 400


async def test_connections_have_a_bound() -> None:
    """Beyond it, a request is told to come later; idle connections end soon and make room."""
    async with listening(limits={"connections": 4, "head_seconds": 0.5}) as (server, client):
        connections = [await opened(client, GET) for _ in range(6)]
        await until(lambda: len(server.server_state.connections) == 6)
        assert (await answer(client, GET + b"Connection: close\r\n\r\n"))[0] == 503
        await until(lambda: not server.server_state.connections)
        assert (await client.get("/health")).status_code == 200
        for _, writer in connections:
            writer.close()


def test_the_process_opens_what_files_it_may() -> None:
    """Of 256 descriptors that a shell grants there were few connections, though the system grants many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        server_module._allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_that_cannot_be_taken_in_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """They were two thousand tracebacks a second: 116 MB in 25 seconds. Any other error is logged as ever."""
    async with listening():
        loop = asyncio.get_running_loop()
        for _ in range(2000):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_exception_handler({"message": "another error", "exception": OSError(errno.EIO, "no")})
    assert [line for line in caplog.messages if "file descriptor" in line or "another error" in line] == [
        "no connection can be accepted: the process has no free file descriptor",
        "another error",
    ]


WRONG = {
    "no request": b"hello\r\n\r\n",
    "two framings": GET + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + GET + b"\r\n",
    "a bad chunk": GET.replace(b"GET /health", b"POST /tokenize") + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_no_http(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One error, the end of the connection, and nothing in the log. (After two framings the next one was answered.)"""
    async with listening() as (_, client):
        status, headers, _ = await answer(client, WRONG[name])
    assert (status, headers["connection"]) == (400, "close")
    assert not [one for one in caplog.records if one.exc_info or "Invalid HTTP" in one.getMessage()]


async def test_a_body_that_goes_wrong_after_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    """It was a traceback for whoever wanted one, keys or none."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening() as (_, client):
        reader, writer = await opened(client, head)
        assert b" 404 " in await reader.readline()
        await reader.readuntil(b"}}")
        writer.write(b"zz\r\n")
        await reader.read()
        writer.close()
    assert not [one for one in caplog.records if one.exc_info]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/"])
async def test_probes_may_ask_for_heads(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """HEAD was a 405. The connection goes on behind its answer."""
    with caplog.at_level("INFO", "specdec.server"):
        async with listening() as (server, client):
            head, get, other = await client.head(path), await client.get(path), await client.head("/v1/completions")
            assert len(server.server_state.connections) == 1
    assert (head.status_code, get.status_code, other.status_code) == (200, 200, 405)
    assert head.headers["content-type"] == get.headers["content-type"]
    assert path == "/metrics" or head.headers["content-length"] == get.headers["content-length"]
    assert head.content == b""
    assert [(one["method"], one["path"]) for one in facts_of(caplog)[:2]] == [("HEAD", path), ("GET", path)]


async def told_late(connection: socket.socket) -> list[Any]:
    """The events of a stream that is read at last."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    raw = b""
    while not raw.endswith(b"\r\n0\r\n\r\n"):
        piece = await asyncio.get_running_loop().sock_recv(connection, 65_536)
        assert piece, "cut off"
        raw += piece
    return events("".join(chunk for chunk in raw.decode().split("\r\n") if chunk.startswith("data")))


def small_buffers(server: uvicorn.Server) -> None:
    """Lets connections from now on send through small buffers, as a proxy may."""
    for listener in server.servers:
        for bound in listener.sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)


@asynccontextmanager
async def decoded(**limits: int) -> AsyncGenerator[tuple[httpx.AsyncClient, socket.socket], None]:
    """A stream whose turn has ended, and of which nothing was read yet; and a client for others."""
    async with listening(limits=limits) as (server, client):
        small_buffers(server)
        turns = turns_of(server)
        async with unread(client, body_of({**LONG, "stream": True})) as connection:
            await until(lambda: turns.running)
            await until(lambda: not turns.running)
            yield client, connection


async def test_turns_end_with_the_work() -> None:
    """Who did not read a stream kept its turn until its time was up, and all others waited. It may read it later."""
    async with decoded(running=1) as (client, connection):
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
        parts = await told_late(connection)
    assert parts[-1] == "[DONE]"
    assert [e["choices"][0]["finish_reason"] for e in parts[:-1]].count("length") == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_sends_end(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes nothing is hung up on; it kept its connection, and its answer in memory, for ever."""
    async with listening(limits={"send_seconds": 0.2}) as (server, client):
        small_buffers(server)
        async with unread(client, body_of({**LONG, "max_tokens": 300, "stream": stream})):
            await until(lambda: server.server_state.connections)
            await until(lambda: not server.server_state.connections)
        assert (await client.get("/health")).status_code == 200
    assert "a client did not read what it was sent within 0.2 s: its connection is closed" in caplog.messages


async def test_unread_events_have_a_bound() -> None:
    """They piled up without one. Who reads on is told why the stream ends."""
    async with decoded(unread_bytes=20_000) as (_, connection):
        parts = await told_late(connection)
    assert "reads too slowly" in parts[-1]["error"]["message"]
    assert all(e["choices"][0]["finish_reason"] is None for e in parts[:-1])


@pytest.mark.parametrize("sent", [100, 200_000])
async def test_uploads_of_clients_that_left_make_room(sent: int) -> None:
    """They kept their places until their turn came, 60 seconds and more, as nobody reads on what has no turn."""
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x"
    part = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    upload = f"{head}\r\nContent-Length: 1000000\r\n\r\n{part}".encode() + b"-" * sent
    async with listening(speech_model(), limits={"recordings": 1}) as (server, client):
        uploads = state_of(server).uploads
        connections = [await opened(client, upload) for _ in range(uploads.free)]
        await until(lambda: not uploads.free)
        left = [await opened(client, upload) for _ in range(3)]
        await until(lambda: uploads.waiting == 3)
        text = (await client.get("/metrics")).text
        assert "specdec_num_uploads_waiting 3.0" in text
        assert f"specdec_num_uploads_running {len(connections)}.0" in text
        for _, writer in left:
            await writer.drain()
            writer.close()
        await asyncio.wait_for(until(lambda: not uploads.waiting), 5)
        assert not uploads.free
        for _, writer in connections:
            writer.close()


async def test_who_leaves_amid_a_body_has_left() -> None:
    """That was a 400 in the log, as if the body had been wrong, and not counted."""
    async with listening() as (server, client):
        _, writer = await opened(client, body_of({"prompt": "abc"})[:-1])
        await until(lambda: len(server.server_state.connections) == 1)
        await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: not server.server_state.connections)
        text = (await client.get("/metrics")).text
        assert 'specdec_requests_aborted_total{endpoint="/v1/completions"} 1.0' in text
        assert 'specdec_requests_total{endpoint="/v1/completions",status="499"} 1.0' in text


async def test_who_pipelines_leaves_too() -> None:
    """What came behind a request hid that its client had left: its answer was worked out for nobody."""
    model = text_model(draft="none")
    model.generator.target.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    async with listening(model) as (server, client):
        turns = turns_of(server)
        _, writer = await opened(client, body_of({"prompt": "abc", "max_tokens": 450, "ignore_eos": True}))
        await until(lambda: turns.running)
        writer.write(PAGES)
        await writer.drain()
        writer.close()
        await asyncio.wait_for(until(lambda: not turns.running), 5)
        metrics = (await client.get("/metrics")).text
    assert 'specdec_requests_aborted_total{endpoint="/v1/completions"} 1.0' in metrics


async def test_a_refused_request_keeps_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """What the library refused was answered, but logged as a defect with all of its traceback, and hung up on.

    A client that took the connection up again lost its next request.
    """
    with caplog.at_level("INFO", "specdec.server"):
        async with listening() as (server, client):
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={"prompt": [10**9], "stream": stream})
                assert (answer.status_code, answer.headers.get("connection")) == (400, None)
            assert len(server.server_state.connections) == 1
            assert (await client.get("/health")).status_code == 200
    assert [one["status"] for one in facts_of(caplog)] == [400, 400, 200]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """By comments between its events, which are whole; they end with it."""
    monkeypatch.setattr("specdec.server.responses.PING", 0.1)
    model = text_model(draft="none")
    body = {"prompt": "ab", "max_tokens": 4, "stream": True, "ignore_eos": True, "logprobs": 0}
    async with listening(model) as (_, client):
        model.generator.target.model.register_forward_pre_hook(lambda *_: time.sleep(0.4))
        text = (await client.post("/v1/completions", json=body)).text
        await until(lambda: "EventStream" not in str(asyncio.all_tasks()))
    assert "\n\n: alive\n\n" in text
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events(text)[:-1]] == [1] * 4
