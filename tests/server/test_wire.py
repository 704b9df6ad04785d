"""Streams that go from the decoder's thread to the socket: all of it, in order, whoever writes."""

import asyncio
import socket
import threading
import time

import pytest

from specdec.server.direct_socket import WIRE, Wire, wire_of
from tests.server.served import events, facts_of, listening, text_model

EVENTS = [b"data: %d %b\n\n" % (i, b"x" * (i * 37 % 900)) for i in range(3000)]


class Lost(asyncio.Protocol):
    """Says when its connection has ended, with all that was written."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def chunks(raw: bytes) -> list[bytes]:
    """The bodies of HTTP/1.1 chunks."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n")
        size = int(head, 16)
        assert raw[size : size + 2] == b"\r\n"
        found.append(raw[:size])
        raw = raw[size + 2 :]
    return found


@pytest.mark.parametrize("slow", [False, True])
async def test_nothing_is_lost_or_overtaken(slow: bool) -> None:
    """A client that reads at once gets most by the thread alone; one that does not read fills all buffers."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    got, asked = bytearray(), 0
    begin = threading.Event()

    def read() -> None:
        begin.wait()
        while piece := theirs.recv(65536):
            got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    loop, news = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
    transport, lost = await loop.create_connection(Lost, sock=ours)
    wire = Wire(transport)

    def decode() -> None:
        for event in EVENTS:
            if not wire.send(event):
                loop.call_soon_threadsafe(news.put_nowait, event)
        loop.call_soon_threadsafe(news.put_nowait, None)

    wire.open()
    if not slow:
        begin.set()
    done = loop.run_in_executor(None, decode)
    while (event := await news.get()) is not None:
        asked += 1
        transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        wire.passed()
        begin.set()
    begin.set()
    await done
    wire.close()
    assert not wire.send(b"late")
    transport.close()
    await lost.ended.wait()
    reader.join(20)
    theirs.close()
    assert chunks(bytes(got)) == EVENTS
    assert not slow or asked


async def test_a_client_that_is_gone() -> None:
    """Its events go nowhere, the thread that decodes hears of no error, and the loop does, though it does not read."""
    ours, theirs = socket.socketpair()
    transport, lost = await asyncio.get_running_loop().create_connection(Lost, sock=ours)
    wire = Wire(transport)
    wire.open()
    transport.pause_reading()
    theirs.close()
    assert all(wire.send(event) for event in EVENTS[:9])
    await asyncio.wait_for(lost.ended.wait(), 5)
    wire.close()


async def test_old_clients_get_no_chunks() -> None:
    """HTTP/1.0 does not know them; another server gives no wire."""
    wire = Wire(asyncio.Transport())
    scopes = [{WIRE: wire, "http_version": "1.0"}, {"http_version": "1.1"}, {WIRE: wire, "http_version": "1.1"}]
    assert [wire_of(scope) for scope in scopes] == [None, None, wire]


async def test_a_refused_request_keeps_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """What the library refused was answered, but logged as a defect with all of its traceback, and hung up on.

    A client that took the connection up again lost its next request.
    """
    with caplog.at_level("INFO", "specdec.server"):
        async with listening() as (server, client):
            for stream in (False, True):
                found = await client.post("/v1/completions", json={"prompt": [10**9], "stream": stream})
                assert (found.status_code, found.headers.get("connection")) == (400, None)
            assert len(server.server_state.connections) == 1
            assert (await client.get("/health")).status_code == 200
    assert [one["status"] for one in facts_of(caplog)] == [400, 400, 200]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_served_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Over a socket the text is that of the whole answer, of several choices and prompts too; the log counts it all."""
    body = {"prompt": ["abab", "ba"], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "n": 1}
    with caplog.at_level("INFO", "specdec.server"):
        async with listening() as (_, client):
            whole = (await client.post("/v1/completions", json=body)).json()["choices"]
            for _ in range(3):
                found = await client.post("/v1/completions", json={**body, "stream": True})
                told = events(found.text)
                assert told.pop() == "[DONE]"
                texts = ["".join(c["text"] for e in told for c in e["choices"] if c["index"] == i) for i in (0, 1)]
                assert texts == [choice["text"] for choice in whole]
                assert [e["choices"][0]["finish_reason"] for e in told].count("length") == 2
        assert facts_of(caplog)[-1]["bytes"] == len(found.content)


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """By comments between its events, which are whole."""
    monkeypatch.setattr("specdec.server.responses.PING", 0.1)
    model = text_model(draft="none")
    body = {"prompt": "ab", "max_tokens": 4, "stream": True, "ignore_eos": True, "logprobs": 0}
    async with listening(model) as (_, client):
        model.generator.target.model.register_forward_pre_hook(lambda *_: time.sleep(0.4))
        found = (await client.post("/v1/completions", json=body)).text
    assert "\n\n: alive\n\n" in found
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events(found)[:-1]] == [1] * 4
