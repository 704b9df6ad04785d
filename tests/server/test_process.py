"""A server as people run it: the openai package, fuzzing from the schema, signals, clients that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec import SpecGenerator
from specdec.options import bundled_models
from tests.server.process import KEY, Process, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = "def add(first, second):\n"
MINUTES = float(os.environ.get("SPECDEC_LOAD_MINUTES", "2"))  # of the load test
_TELLING = 5.0  # minutes from which on the second half tells of growth


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server for most of these."""
    with serving(tmp_path_factory.mktemp("served")) as process:
        yield process


@pytest.fixture(scope="module")
def offline() -> SpecGenerator:
    """The same model without a server."""
    pair = bundled_models.pair("python-code")
    return SpecGenerator.from_pretrained(str(pair.target), dtype="float32", backend="eager")


def test_the_openai_package(server: Process, offline: SpecGenerator) -> None:
    """Every endpoint by the client that most programs use."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    expected = offline.generate(PROMPT, max_new_tokens=24, do_sample=False).texts[0]
    assert {model.id for model in client.models.list()} == {"tiny", "code", "speech"}
    assert client.models.retrieve("code").id == "code"

    how: dict[str, Any] = {"model": "code", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    done = client.completions.create(**how)
    assert done.choices[0].text == expected
    assert done.usage.completion_tokens == 24
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**how, stream=True)]
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    scored = client.completions.create(**how, logprobs=2).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == 24

    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=1, n=2)
    again = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=1, n=2)
    texts = [[choice.message.content for choice in one.choices] for one in (chat, again)]
    assert texts[0] == texts[1]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == texts[0][0]
    assert chunks[-1].usage.completion_tokens <= 8

    predicted = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, temperature=0,
        prediction={"type": "content", "content": "hello hello"}, extra_body={"return_metrics": True},
    )  # fmt: skip
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    assert predicted.metrics["speculative_decoding"]["num_spec_steps"] > 0

    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    said = client.chat.completions.create(model="tiny", messages=messages, max_tokens=30, response_format=form)
    assert json.loads(said.choices[0].message.content)["a"] in ("x", "y")

    path, text = bundled_models.recordings()[0]
    with path.open("rb") as file:
        heard = client.audio.transcriptions.create(model="speech", file=file)
    assert text.split(".")[0] in heard.text
    for kind in ("text", "srt", "vtt"):
        with path.open("rb") as file:
            assert client.audio.transcriptions.create(model="speech", file=file, response_format=kind)
    with path.open("rb") as file:
        verbose = client.audio.transcriptions.create(
            model="speech", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
    assert verbose.words
    assert verbose.segments
    assert verbose.duration > 1

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**how, "model": "gpt"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tool calls"):
        client.chat.completions.create(model="tiny", messages=messages, tools=tools)


def test_the_openai_package_async(server: Process) -> None:
    """Many at once, each text that of its request alone; a stream that is left frees the server."""
    openai = pytest.importorskip("openai")

    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:

            async def one(i: int) -> str:
                made = await client.completions.create(model="code", prompt=PROMPT * (1 + i % 3), max_tokens=16, seed=i)
                return made.choices[0].text

            alone = [await one(i) for i in range(8)]
            stream = await client.completions.create(model="code", prompt=PROMPT, max_tokens=1500, stream=True)
            async for _ in stream:
                break
            await stream.close()
            return alone, list(await asyncio.gather(*map(one, range(8))))

    alone, together = asyncio.run(ask())
    assert alone == together
    _idle(server)


def _idle(server: Process, seconds: float = 20.0) -> None:
    """Waits until nothing runs; fails where something is stuck."""
    end = time.monotonic() + seconds
    with server.client() as client:
        while any(one["running"] + one["waiting"] for one in client.get("/v1/load").json().values()):
            assert time.monotonic() < end, "something is stuck"
            time.sleep(0.05)


def test_schemathesis(server: Process, tmp_path: Path) -> None:
    """Requests made from the schema, right and wrong: no 500, no hang, no answer that the schema does not know."""
    tool = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis") or shutil.which("st")
    if tool is None:
        pytest.skip("schemathesis is not installed (SCHEMATHESIS=path)")
    command = [
        tool, "run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--max-examples", "10",
        "--checks", "not_a_server_error", "--request-timeout", "30", "--seed", "1",
        "--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--max-failures", "5",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    _idle(server)


def test_large_headers_on_the_wire(server: Process) -> None:
    """uvicorn's parser has its own bound, before the application."""
    with server.client() as client:
        found = client.get("/health", headers={f"x-{i}": "a" * 1000 for i in range(100)})
        assert found.status_code in (400, 431)
        assert client.get("/health").status_code == 200


def test_sigterm_under_load(tmp_path: Path) -> None:
    """Requests under way end as they would have; new ones are refused; the process ends by itself."""
    with serving(tmp_path, limits={"drain_seconds": 30}) as process:
        body = {"model": "code", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool, process.client() as client:
            found = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
            while client.get("/v1/load").json()["code"]["running"] < 8:
                time.sleep(0.01)
            process.popen.send_signal(signal.SIGTERM)
            texts = {one.result().json()["choices"][0]["text"] for one in found}
        assert len(texts) == 1
        assert process.popen.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{process.url}/health")


def test_sigterm_when_time_is_up(tmp_path: Path) -> None:
    """What would take longer than the drain is told so, and the process ends soon."""
    with serving(tmp_path, limits={"drain_seconds": 0.5}) as process:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 4}
        with ThreadPoolExecutor(2) as pool, process.client() as client:
            whole = pool.submit(client.post, "/v1/completions", json=body)
            stream = pool.submit(client.post, "/v1/completions", json={**body, "stream": True})
            while client.get("/v1/load").json()["tiny"]["running"] < 2:
                time.sleep(0.01)
            process.popen.send_signal(signal.SIGTERM)
            assert whole.result().status_code == 503
            assert "shutting down" in stream.result().text
        assert process.popen.wait(20) in (0, -signal.SIGTERM)


def test_kill_and_restart(tmp_path: Path) -> None:
    """A killed server leaves nothing behind that keeps the next one from answering the same."""
    texts = []
    for _ in range(2):
        with serving(tmp_path) as process, process.client() as client:
            body = {"model": "code", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            texts.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
            thread = threading.Thread(target=_ignored, args=(client, {**body, "max_tokens": 1500, "ignore_eos": True}))
            thread.start()
            time.sleep(0.2)
            process.popen.kill()
            thread.join(20)
            assert not thread.is_alive()
    assert texts[0] == texts[1]


def _ignored(client: httpx.Client, body: dict[str, Any]) -> None:
    with pytest.raises(httpx.TransportError):
        client.post("/v1/completions", json=body)


WRONG: list[tuple[int, dict[str, Any]]] = [  # what is answered, and what is wrong with the request
    (400, {"json": {"model": "code", "prompt": PROMPT, "n": -1}}),
    (400, {"json": {"model": "code", "prompt": PROMPT, "max_tokens": 10**6}}),
    (400, {"json": {"model": "code", "prompt": PROMPT, "tools": [{"type": "function"}]}}),
    (400, {"json": {"model": "code", "prompt": [10**9]}}),
    (400, {"content": b"{broken", "headers": {"Content-Type": "application/json"}}),
    (401, {"json": {"model": "code", "prompt": PROMPT}, "headers": {"Authorization": "Bearer wrong"}}),
    (404, {"json": {"model": "gpt", "prompt": PROMPT}}),
]


def test_load(server: Process, offline: SpecGenerator) -> None:
    """64 clients that ask, stream, leave and err: every text is that of its request alone, and memory does not grow.

    `SPECDEC_LOAD_MINUTES` says for how long. Nothing is lost: whoever stays is answered, in full or with a 429.
    """
    prompts = [PROMPT * (1 + i % 4) + f"    value = {i}\n" for i in range(12)]
    bodies: list[dict[str, Any]] = [
        {"model": "code", "prompt": prompt, "max_tokens": 12 + i, "seed": i, "temperature": i % 2}
        for i, prompt in enumerate(prompts)
    ]
    texts = [
        offline.generate(
            body["prompt"], max_new_tokens=body["max_tokens"], seed=i, do_sample=bool(i % 2), temperature=1.0, top_k=0
        ).texts[0]
        for i, body in enumerate(bodies)
    ]
    end = time.monotonic() + 60 * MINUTES
    counts = dict.fromkeys(("text", "stream", "left", "wrong", "busy"), 0)
    memory: list[tuple[float, float]] = []  # minutes, MiB

    async def one(client: httpx.AsyncClient, number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < end:
            i, kind = choose.randrange(12), choose.choice(["text", "text", "stream", "stream", "left", "wrong"])
            if kind == "wrong":
                status, asked = choose.choice(WRONG)
                found = await client.post("/v1/completions", **asked)
                assert found.status_code == status, found.text
            elif kind == "text":
                found = await client.post("/v1/completions", json=bodies[i])
                assert found.status_code in (200, 429), found.text
                if found.status_code == 200:
                    assert found.json()["choices"][0]["text"] == texts[i]
                else:
                    kind = "busy"
                    await asyncio.sleep(0.1)
            else:
                kind = await streamed(client, bodies[i], texts[i], left=kind == "left")
            counts[kind] += 1

    async def streamed(client: httpx.AsyncClient, body: dict[str, Any], text: str, *, left: bool) -> str:
        got, ended = "", False
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as found:
            assert found.status_code in (200, 429)
            if found.status_code == 429:
                await asyncio.sleep(0.1)
                return "busy"
            async for line in found.aiter_lines():
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    got += json.loads(line[6:])["choices"][0]["text"]
                    if left:
                        return "left"
        assert ended
        assert got == text
        return "stream"

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic() / 60, server.memory))
            await asyncio.sleep(0.5)

    async def all_of_them() -> None:
        # A connection must not be taken up again while the server, which waits five seconds, hangs up.
        limits = httpx.Limits(max_connections=80, keepalive_expiry=1.0)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, timeout=600, headers=head, limits=limits) as client:
            await asyncio.gather(watch(), *(one(client, number) for number in range(64)))

    asyncio.run(all_of_them())
    _idle(server)
    slope = statistics.linear_regression(*zip(*memory[len(memory) // 2 :], strict=True)).slope
    print(f"\n{counts}, {memory[0][1]:.0f} to {memory[-1][1]:.0f} MiB, {slope:.2f} MiB/min in the second half")
    assert all(counts[kind] for kind in ("text", "stream", "left", "wrong"))
    assert memory[-1][1] < memory[0][1] + 400  # buffers, allocators and the threads of 32 requests have their sizes
    assert slope < 1 or MINUTES < _TELLING
