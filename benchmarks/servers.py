"""`specdec serve` beside `transformers serve` (continuous batching, no draft): same model, same clients, in turn.

    python benchmarks/servers.py                                    # the package's code pair, 1, 4 and 16 clients
    python benchmarks/servers.py --target MODEL --draft suffix --chat --prompts chats.jsonl --clients 4

`transformers serve` needs `pip install 'transformers[serving]'`. Requests are greedy and streamed, measured as
`server_load.py` does. No prompt is asked twice of a server, and a server whose turn it is not is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from measure import Watch, read_prompts, table
from server_load import Load, Measured, measure

from specdec.options.bundled_models import pair

_PATIENCE = 120.0  # seconds until a server listens


class Server:
    """A server in a process of its own, which runs while it is asked."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process, self.url = process, url

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Lets it run meanwhile."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)


@contextmanager
def started(command: Sequence[str]) -> Iterator[Server]:
    """The server that this command starts on a port that is added to it, once it listens, stopped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        own = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], **own)
        server, end = Server(process, f"http://127.0.0.1:{port}"), time.monotonic() + _PATIENCE
        try:
            while not _listens(server.url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{command[:3]} does not listen: {Path(log.name).read_text()[-2000:]}")
                time.sleep(0.2)
            os.killpg(process.pid, signal.SIGSTOP)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(pair().target), help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft", default=str(pair().draft), help='a model, or "suffix"')
    parser.add_argument("--prompts", type=Path, help="text file or JSON lines (default: held-out code)")
    parser.add_argument("--chat", action="store_true", help="prompts are messages")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=4, help="of each client in a turn, at one client twice that")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file of speeds by title, for docs/make/figures.py")
    parser.add_argument("--title", default="the bundled pair, its draft model", help="in that file")
    args = parser.parse_args()
    draft = ["--draft", args.draft]
    commands = {
        "transformers": ["transformers", "serve", args.target, "--continuous-batching", "--device", "cpu"],
        "specdec": [sys.executable, "-m", "specdec", "serve", args.target, *draft, "--name", "model", "--log", "none"],
    }
    loads = [Load(concurrency=clients) for clients in args.clients]
    needed = args.repeats * sum(_count(load, args.requests) + 1 for load in loads)
    prompts, watch = read_prompts(args.prompts, needed), Watch()
    if len(prompts) < needed:
        raise SystemExit(f"{needed} different prompts are needed, got {len(prompts)}: pass --prompts or ask for less")
    found: dict[tuple[str, Load], list[Measured]] = {(name, load): [] for load in loads for name in commands}
    with ExitStack() as stack:
        servers = {n: stack.enter_context(started([*c, "--dtype", args.dtype])) for n, c in commands.items()}
        for turn in range(args.repeats):
            for load in loads:
                count = _count(load, args.requests)
                own, prompts = prompts[: count + 1], prompts[count + 1 :]  # one for the request that does not count
                for name in sorted(servers, reverse=bool(turn % 2)):
                    model = args.target if name == "transformers" else "model"
                    work = measure(
                        servers[name].url, model, own, [load], requests=count, tokens=args.tokens, chat=args.chat
                    )
                    watch.look()
                    with servers[name].asked():
                        found[name, load] += asyncio.run(work)
                    watch.look()
    rows = []
    for (name, load), measured in found.items():
        base = _speed(found["transformers", load])
        figures = [one.figures() for one in measured]
        first, each = (_middle([one[key] for one in figures]) for key in ("first_token_ms", "per_token_ms"))
        errors, speed = sum(one["errors"] for one in figures), _speed(measured)
        rows.append([f"{load.concurrency}, {name}", f"{speed:.0f}", f"{speed / base:.2f}x", first, each, f"{errors}"])
    header = ["clients", "tokens per second", "over transformers", "first token, ms (p50, p90, p99)"]
    print(table([*header, "ms per token after it (p50, p90, p99)", "errors"], rows))
    print(f"\n{watch.verdict()}")
    if args.json:
        speeds = {name: [[load.concurrency, round(_speed(found[name, load]))] for load in loads] for name in commands}
        known = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else {}
        args.json.write_text(json.dumps({**known, args.title: speeds}, indent=1) + "\n", encoding="utf-8")


def _count(load: Load, requests: int) -> int:
    return max(2, load.concurrency or 1) * requests


def _speed(measured: Sequence[Measured]) -> float:
    """Tokens per second of all turns."""
    return sum(a.tokens for m in measured for a in m.answers) / sum(m.seconds for m in measured)


def _middle(percentiles: Sequence[dict[str, float] | None]) -> str:
    """The medians over turns of percentiles within each."""
    known = [one for one in percentiles if one is not None]
    return ", ".join(f"{statistics.median(one[name] for one in known):.1f}" for name in ("p50", "p90", "p99"))


if __name__ == "__main__":
    main()
