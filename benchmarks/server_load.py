"""A running server under load, ours or another that speaks OpenAI's interface: speed, latency and accepted drafts.

    python benchmarks/server_load.py http://127.0.0.1:8000 --concurrency 1 8          # requests follow one another
    python benchmarks/server_load.py http://127.0.0.1:8000 --rate 2 4 --json load.json  # they arrive at random
    python benchmarks/server_load.py http://127.0.0.1:8000 --beside-plain             # and without the draft, in turn

It needs `pip install httpx`. The key of a server that needs one is read from $OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from measure import read_prompts, table

from specdec.bench.machine import provenance
from specdec.bench.results import percentiles

_PATIENCE = 600.0  # seconds that an answer may take
_COUNTER = r'^(?:specdec_|vllm:)spec_decode_{}_total(?:\{{.*?model(?:_name)?="{}".*?\}})? (\S+)$'
_COUNTERS = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}


@dataclass(frozen=True)
class Load:
    """`concurrency` requests at a time, or `rate` a second (a Poisson process); `plain` switches specdec's
    drafts off.
    """

    concurrency: int | None = None
    rate: float | None = None
    plain: bool = False

    def __str__(self) -> str:
        how = f"{self.concurrency} at a time" if self.concurrency is not None else f"{self.rate:g} a second"
        return f"{how}, plain" if self.plain else how


@dataclass
class Answer:
    """One request: the times at which it began, pieces of its text arrived and it ended; its tokens, or its error."""

    began: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    error: str | None = None


@dataclass
class Measured:
    """All answers under one load, the seconds that they took together, and the growth of the server's counters."""

    load: Load
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))

    def figures(self) -> dict[str, Any]:
        """Throughput, percentiles of latencies in milliseconds, and acceptance."""
        sound = [one for one in self.answers if one.error is None and one.pieces]
        latencies = {
            "first_token_ms": [one.pieces[0] - one.began for one in sound],
            "per_token_ms": [(one.pieces[-1] - one.pieces[0]) / (one.tokens - 1) for one in sound if one.tokens > 1],
            "request_ms": [one.ended - one.began for one in sound],
        }
        errors = [one.error for one in self.answers if one.error is not None]
        drafts, drafted, accepted = (self.counters[name] for name in _COUNTERS)
        return {
            **asdict(self.load),
            "requests": len(self.answers),
            "errors": len(errors),
            "first_error": errors[0] if errors else None,
            "requests_per_second": len(sound) / self.seconds,
            "tokens_per_second": sum(one.tokens for one in sound) / self.seconds,
            **{name: percentiles([1e3 * one for one in seconds]) for name, seconds in latencies.items()},
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
        }


class Client:
    """Sends prompts to one model of a server, one after the other; with `chat` as messages."""

    def __init__(self, http: httpx.AsyncClient, model: str, prompts: Sequence[str], tokens: int, *, chat: bool) -> None:
        self._http, self._model, self._prompts, self._sent = http, model, prompts, 0
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._body = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True}
        self._body["stream_options"], self._chat = {"include_usage": True}, chat

    async def measure(self, measured: Measured, count: int) -> None:
        """Adds `count` requests under the load of `measured` to it."""
        load, before, began = measured.load, await self._counters(), time.perf_counter()
        if load.concurrency is not None:
            left = iter(range(count))
            workers = [self._follow(left, load, measured.answers) for _ in range(load.concurrency)]
            await asyncio.gather(*workers)
        else:
            draw, sent = random.Random(0), []
            for _ in range(count):
                sent.append(asyncio.ensure_future(self.send(load)))
                await asyncio.sleep(draw.expovariate(load.rate or 1.0))
            measured.answers += await asyncio.gather(*sent)
        measured.seconds += time.perf_counter() - began
        for name, value in (await self._counters()).items():
            measured.counters[name] += value - before[name]

    async def _follow(self, left: Iterator[int], load: Load, answers: list[Answer]) -> None:
        for _ in left:
            answers.append(await self.send(load))

    async def send(self, load: Load) -> Answer:
        """The answer to the next prompt."""
        answer, prompt = Answer(time.perf_counter()), self._prompts[self._sent % len(self._prompts)]
        self._sent += 1
        text = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        body = {**self._body, **text, **({"speculate": False} if load.plain else {})}
        try:
            async with self._http.stream("POST", self._path, json=body) as response:
                if response.is_error:
                    answer.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(answer, json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        return answer

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            answer.error = str(event["error"])[:200]
        if any(one.get("text") or (one.get("delta") or {}).get("content") for one in event.get("choices") or ()):
            answer.pieces.append(time.perf_counter())
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]

    async def _counters(self) -> dict[str, float]:
        """The server's counters of drafts, in specdec's or vLLM's names; zeros where it has none."""
        text = (await self._http.get("/metrics")).text
        patterns = {name: _COUNTER.format(word, re.escape(self._model)) for name, word in _COUNTERS.items()}
        return {n: sum(map(float, re.findall(pattern, text, re.MULTILINE))) for n, pattern in patterns.items()}


async def measure(
    url: str,
    model: str | None,
    prompts: Sequence[str],
    loads: Sequence[Load],
    *,
    requests: int = 16,
    tokens: int = 64,
    chat: bool = False,
    repeats: int = 1,
) -> list[Measured]:
    """Every load in turn, `repeats` times, after one request that does not count.

    A load gets `requests` requests, or twice its concurrency where that is more. The only model of a server needs no
    name.
    """
    key, found = os.environ.get("OPENAI_API_KEY"), [Measured(load) for load in loads]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_PATIENCE, limits=limits) as http:
        if model is None:
            models = [one["id"] for one in (await http.get("/v1/models")).raise_for_status().json()["data"]]
            if len(models) != 1:
                raise SystemExit(f"the server has several models, pass one as --model: {', '.join(models)}")
            [model] = models
        client = Client(http, model, prompts, tokens, chat=chat)
        if error := (await client.send(loads[0])).error:
            raise SystemExit(f"{url} refused the first request: {error}")
        for _ in range(repeats):
            for measured in found:
                await client.measure(measured, max(requests, 2 * (measured.load.concurrency or 1)))
    return found


def rows(found: Sequence[Measured]) -> Iterator[list[str]]:
    """The lines of the table."""
    for measured in found:
        one = measured.figures()
        latencies = [
            one[name] or dict.fromkeys(("p50", "p90", "p99"), 0.0) for name in ("first_token_ms", "per_token_ms")
        ]
        speeds = [f"{one['requests_per_second']:.2f}", f"{one['tokens_per_second']:.1f}"]
        length = one["mean_acceptance_length"]
        words = [", ".join(f"{latency[p]:.1f}" for p in ("p50", "p90", "p99")) for latency in latencies]
        yield [str(measured.load), *speeds, *words, "" if length is None else f"{length:.2f}", str(one["errors"])]


def main() -> None:
    """Runs the loads and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", help="one of the server's (default: its only one)")
    parser.add_argument("--prompts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--chat", action="store_true", help="prompts are messages")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[], help="requests at a time (default: 1)")
    parser.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second, answered or not")
    parser.add_argument("--beside-plain", action="store_true", help="each load also without the draft (specdec only)")
    parser.add_argument("--requests", type=int, default=16, help="of each load in a turn")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    given = [*({"concurrency": n} for n in args.concurrency), *({"rate": r} for r in args.rate)] or [{"concurrency": 1}]
    loads = [Load(**one, plain=plain) for one in given for plain in ([True, False] if args.beside_plain else [False])]
    how = {name: getattr(args, name) for name in ("requests", "tokens", "chat", "repeats")}
    prompts, url = read_prompts(args.prompts, args.count), args.url.rstrip("/").removesuffix("/v1")
    try:
        found = asyncio.run(measure(url, args.model, prompts, loads, **how))
    except httpx.HTTPError as error:
        raise SystemExit(f"{url}: {error}; is a server running there?") from None
    header = ["requests", "requests/s", "tokens/s", "first token, ms (p50, p90, p99)"]
    print(table([*header, "ms per token after it (p50, p90, p99)", "acceptance length", "errors"], [*rows(found)]))
    if args.json is not None:
        whole = {"url": url, **how, "loads": [one.figures() for one in found], "machine": provenance()}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
