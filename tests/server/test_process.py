"""A server as people run it: the openai package, fuzzing from the schema, signals, clients that come and go."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec import SpecGenerator
from specdec.options import bundled_models
from tests.server.process import KEY, Process, serving
from tests.server.served import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = "def add(first, second):\n"
MINUTES = float(os.environ.get("SPECDEC_LOAD_MINUTES", "0.5"))  # of the load test


@pytest.fixture(scope="module")
def offline() -> SpecGenerator:
    """The same model without a server."""
    pair = bundled_models.pair("python-code")
    return SpecGenerator.from_pretrained(str(pair.target), dtype="float32", backend="eager")


def test_the_openai_package(server: Process, offline: SpecGenerator) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    expected = offline.generate(PROMPT, max_new_tokens=24, do_sample=False).texts[0]
    assert {model.id for model in client.models.list()} == {"tiny", "code", "speech"}
    assert client.models.retrieve("code").id == "code"

    how: dict[str, Any] = {"model": "code", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    done = client.completions.create(**how, logprobs=2)
    assert (done.choices[0].text, done.usage.completion_tokens) == (expected, 24)
    assert len(done.choices[0].logprobs.token_logprobs) == 24
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**how, stream=True)]
    assert "".join(pieces) == expected
    assert len(pieces) > 3

    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
    first, again = (client.chat.completions.create(**chat, max_tokens=8, n=2).choices for _ in range(2))
    assert [choice.message.content for choice in first] == [choice.message.content for choice in again]
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**chat, max_tokens=8, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == first[0].message.content
    assert chunks[-1].usage.completion_tokens <= 8

    path, text = bundled_models.recordings()[0]
    hear = client.audio.transcriptions.create
    assert text.split(".")[0] in hear(model="speech", file=path).text
    for kind in ("text", "srt", "vtt"):
        assert hear(model="speech", file=path, response_format=kind)
    stamps: Any = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    verbose = hear(model="speech", file=path, **stamps)
    assert all((verbose.words, verbose.segments, verbose.duration > 1))

    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**how, "model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        client.chat.completions.create(**chat, tools=[{"type": "function", "function": {"name": "f"}}])


def _idle(server: Process) -> None:
    """Waits until nothing runs; fails where something is stuck."""
    end = time.monotonic() + 20
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


def test_sigterm_under_load(tmp_path: Path) -> None:
    """Requests under way end as they would have; new ones are refused; the process ends by itself."""
    with serving(tmp_path, limits={"drain_seconds": 30}) as process:
        body = {"model": "code", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool, process.client() as client:
            answers = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
            while client.get("/v1/load").json()["code"]["running"] < 8:
                time.sleep(0.01)
            process.popen.send_signal(signal.SIGTERM)
            texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1
        assert process.popen.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{process.url}/health")


def test_two_interrupts_under_load(tmp_path: Path) -> None:
    """Requests are told, and the process ends without a traceback. (It wrote one for each, and for the closed loop.)"""
    with serving(tmp_path) as process:
        body = {"model": "code", "prompt": PROMPT, "max_tokens": -1, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool, process.client() as client:
            answers = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
            while client.get("/v1/load").json()["code"]["running"] < 4:
                time.sleep(0.01)
            for _ in "ab":
                process.popen.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert [answer.result().status_code for answer in answers] == [503] * 4
        assert process.popen.wait(30) == 130
        log = process.log.read_text()
    assert "stopped, 4 requests were cut" in log
    assert "Traceback" not in log


WRONG = {"n": -1, "prompt": [10**9], "tools": [{"type": "function"}]}


def test_load(server: Process, offline: SpecGenerator) -> None:
    """64 clients that ask, stream, leave and err: every text is that of its request alone, and memory does not grow.

    `SPECDEC_LOAD_MINUTES` says for how long. Nothing is lost: whoever stays is answered, in full or with a 429.
    """
    bodies: list[dict[str, Any]] = [
        {"model": "code", "prompt": PROMPT * (1 + i % 4) + f"    value = {i}\n", "max_tokens": 12 + i, "seed": i}
        for i in range(12)
    ]
    texts = [
        offline.generate(body["prompt"], max_new_tokens=body["max_tokens"], seed=i, do_sample=True, top_k=0).texts[0]
        for i, body in enumerate(bodies)
    ]
    end, counts, memory = time.monotonic() + 60 * MINUTES, Counter[str](), [server.memory]

    async def use(client: httpx.AsyncClient, number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < end:
            i, kind = choose.randrange(12), choose.choice(["text", "text", "stream", "stream", "left", "wrong"])
            wrong = dict([choose.choice([*WRONG.items()])]) if kind == "wrong" else {}
            body = {**bodies[i], "stream": kind != "text", **wrong}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == (400 if wrong else 200)
                if kind == "left":
                    await anext(answer.aiter_lines())
                else:
                    await answer.aread()
            if kind == "text":
                assert answer.json()["choices"][0]["text"] == texts[i]
            elif kind == "stream":
                *parts, done = events(answer.text)
                assert done == "[DONE]"
                assert "".join(part["choices"][0]["text"] for part in parts) == texts[i]
            counts[kind] += 1

    async def all_of_them() -> None:
        # A connection must not be taken up again while the server, which waits five seconds, hangs up.
        limits = httpx.Limits(max_connections=80, keepalive_expiry=1.0)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, timeout=600, headers=head, limits=limits) as client:
            await asyncio.gather(*(use(client, number) for number in range(64)))

    asyncio.run(all_of_them())
    _idle(server)
    memory.append(server.memory)
    print(f"\n{counts}, {memory[0]:.0f} to {memory[1]:.0f} MiB")
    assert {*counts} >= {"text", "stream", "left", "wrong"}
    assert memory[1] < memory[0] + 400  # buffers, allocators and the threads of 32 requests have their sizes
