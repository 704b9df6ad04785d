"""A running server under load: requests that come as others end (concurrency), or as they please (open loop)."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from specdec.errors import OptionError, SpecdecError

_PATIENCE = 600.0  # seconds that an answer may take
_COUNTS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}

Notify = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Load:
    """How requests come: `concurrency` at a time, or `rate` a second whatever becomes of them (a Poisson process).

    `plain` asks specdec's server to leave its draft out.
    """

    concurrency: int | None = None
    rate: float | None = None
    plain: bool = False

    @property
    def label(self) -> str:
        """In words."""
        how = f"{self.concurrency} at a time" if self.concurrency is not None else f"{self.rate:g} a second"
        return f"{how}, plain" if self.plain else how


@dataclass(frozen=True)
class Workload:
    """What is asked of which server: every load gets `requests` requests (twice its concurrency at least), `repeats`
    times in turn with the others; a prompt is asked as a message with `chat`.
    """

    url: str
    model: str
    prompts: Sequence[str]
    loads: Sequence[Load]
    key: str | None = None
    chat: bool = False
    max_new_tokens: int = 64
    temperature: float = 0.0
    requests: int = 16
    repeats: int = 1
    seed: int = 0


@dataclass
class Answer:
    """One request: when it began, when pieces of its text came, its tokens, or its error."""

    began: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None


@dataclass
class Measured:
    """All answers under one load, the seconds that they took together, and what the server's counters say of drafts."""

    load: Load
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0


def models_of(url: str, key: str | None) -> list[str]:
    """The models of a server; raises SpecdecError where nobody answers, or not as OpenAI does."""
    try:
        found = httpx.get(f"{url}/v1/models", headers=_head(key), timeout=30)
        found.raise_for_status()
        return [str(one["id"]) for one in found.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise SpecdecError(f"{url} does not tell its models ({error}): is a server running there?") from None


def measure(workload: Workload, notify: Notify = lambda *_: None) -> list[Measured]:
    """Runs all loads, in turn where they are repeated, after one request that does not count."""
    if not workload.prompts or not workload.loads:
        raise OptionError("a server is measured with at least one prompt and one load: pass --concurrency or --rate")
    return asyncio.run(_Run(workload, notify).all())


class _Run:
    def __init__(self, workload: Workload, notify: Notify) -> None:
        self._workload, self._notify = workload, notify
        self._asked = 0

    async def all(self) -> list[Measured]:
        """Every load's answers."""
        w = self._workload
        found = [Measured(load) for load in w.loads]
        total = w.repeats * sum(self._count(load) for load in w.loads)
        limits, done = httpx.Limits(max_connections=None, max_keepalive_connections=256), 0
        async with httpx.AsyncClient(
            base_url=w.url, headers=_head(w.key), timeout=_PATIENCE, limits=limits
        ) as self._client:
            first = await self._ask(plain=False)
            if first.error is not None:
                raise SpecdecError(f"{w.url} refused the first request: {first.error}")
            for _ in range(w.repeats):
                for measured in found:
                    self._notify(done, total, measured.load.label)
                    await self._measure(measured)
                    done += self._count(measured.load)
        return found

    def _count(self, load: Load) -> int:
        return max(self._workload.requests, 2 * (load.concurrency or 1))

    async def _measure(self, measured: Measured) -> None:
        before, began = await self._counters(), time.perf_counter()
        load, count = measured.load, self._count(measured.load)
        if load.concurrency is not None:
            left = iter(range(count))

            async def next_ones() -> None:
                for _ in left:
                    measured.answers.append(await self._ask(plain=load.plain))

            await asyncio.gather(*(next_ones() for _ in range(load.concurrency)))
        else:
            draw, asked = random.Random(self._workload.seed), []
            for _ in range(count):
                asked.append(asyncio.ensure_future(self._ask(plain=load.plain)))
                await asyncio.sleep(draw.expovariate(load.rate or 1.0))
            measured.answers += await asyncio.gather(*asked)
        measured.seconds += time.perf_counter() - began
        for name, value in (await self._counters()).items():
            setattr(measured, name, getattr(measured, name) + value - before.get(name, 0.0))

    async def _ask(self, *, plain: bool) -> Answer:
        w, answer = self._workload, Answer(time.perf_counter())
        prompt, self._asked = w.prompts[self._asked % len(w.prompts)], self._asked + 1
        body: dict[str, Any] = {"model": w.model, "max_tokens": w.max_new_tokens, "temperature": w.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "seed": w.seed}
        body |= {"speculate": False} if plain else {}
        body |= {"messages": [{"role": "user", "content": prompt}]} if w.chat else {"prompt": prompt}
        path = "/v1/chat/completions" if w.chat else "/v1/completions"
        try:
            async with self._client.stream("POST", path, json=body) as found:
                if found.status_code != 200:
                    content = (await found.aread()).decode("utf-8", "replace")
                    answer.error = f"{found.status_code} {content[:200]}"
                    return answer
                async for line in found.aiter_lines():
                    self._take(answer, line)
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        return answer

    def _take(self, answer: Answer, line: str) -> None:
        """One line of a stream."""
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.error = str(event["error"])[:200]
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                answer.pieces.append(time.perf_counter())
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]

    async def _counters(self) -> dict[str, float]:
        """What the server counts of drafts, in specdec's or vLLM's names; empty where it tells nothing."""
        try:
            text = (await self._client.get("/metrics")).text
        except httpx.HTTPError:
            return {}
        found = {}
        for name, word in _COUNTS.items():
            lines = re.findall(
                rf"^(?:specdec_|vllm:)spec_decode_{word}_total(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE
            )
            own = [float(value) for labels, value in lines if self._is_own(labels)]
            found[name] = sum(own)
        return found

    def _is_own(self, labels: str) -> bool:
        named = re.search(r'model(?:_name)?="([^"]*)"', labels)
        return named is None or named[1] == self._workload.model


def _head(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
