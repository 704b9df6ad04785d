"""How long requests take while others hold a thousand half-open connections to the same server, on this machine alone.

    python benchmarks/half_open.py                      # 1,000 from four addresses, two minutes
    python benchmarks/half_open.py --addresses 1        # all from one, which has fewer places than that
    python benchmarks/half_open.py --descriptors 256    # a server that may open few files

Half of the connections are silent, half sent a part of a head. Whichever is closed is opened again a second later.
Meanwhile one client asks for texts and for `/health`, each time on a new connection, and in turn of this server and of
another one whose connections nobody holds: what else the machine does slows both down.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import product
from pathlib import Path

import httpx
from measure import served, table

_BODY = {"model": "python-code", "prompt": "def add(first, second):\n", "max_tokens": 16, "temperature": 0}
Seconds = dict[str, list[float]]


def server(descriptors: int | None) -> AbstractContextManager[tuple[str, Path]]:
    """A server of the package's code pair: its address and its log."""

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    return served("zoo:python-code", preexec_fn=limit)


def hold(port: int, count: int, addresses: int) -> None:
    """Holds so many half-open connections, until it is ended."""

    async def one(number: int) -> None:
        own = f"127.0.0.{2 + number % addresses}"
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(own, 0))
                writer.write(b"GET /health HTTP/1.1\r\nHost: 127" if number % 2 else b"")
                await reader.read()
                writer.close()
            await asyncio.sleep(1)

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, range(count)))

    asyncio.run(all_of_them())


def ask(urls: Sequence[str], seconds: float) -> list[Seconds]:
    """How long requests of each server took, one after the other for so many seconds."""
    found: list[Seconds] = [{"text": [], "/health": []} for _ in urls]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for url, name in product(urls, found[0]):
            with httpx.Client(base_url=url, timeout=60, verify=False) as client:
                began = time.perf_counter()
                got = client.get(name) if name == "/health" else client.post("/v1/completions", json=_BODY)
                found[urls.index(url)][name].append(time.perf_counter() - began)
            assert got.status_code == 200, got.text
    return found


def main() -> None:
    """Asks both servers and prints how their times compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--addresses", type=int, default=4, help="of this machine, from which they come")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--descriptors", type=int, help="that the server may open")
    given = parser.parse_args()
    with server(given.descriptors) as (held, log), server(None) as (free, _):
        ask([held, free], 3)
        holder = multiprocessing.Process(
            target=hold, args=(httpx.URL(held).port, given.connections, given.addresses), daemon=True
        )
        holder.start()
        time.sleep(2)
        meanwhile, usual = ask([held, free], given.seconds)
        holder.kill()
        holder.join()
        lines = [line for line in log.read_text().splitlines() if '"request_id"' not in line]
    rows = []
    for name in usual:
        for what, of in (("median", statistics.median), ("mean", statistics.fmean), ("worst of 20", _late)):
            alone, then = of(usual[name]), of(meanwhile[name])
            rows.append([name, what, f"{1e3 * alone:.1f}", f"{1e3 * then:.1f}", f"{then / alone:.2f}"])
    print(table(["request", "", "usual ms", "meanwhile ms", "times"], rows))
    print(f"\n{sum(map(len, meanwhile.values()))} requests meanwhile; {len(lines)} lines in the log besides requests:")
    print("\n".join(lines[-8:]))


def _late(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


if __name__ == "__main__":
    main()
