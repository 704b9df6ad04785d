"""What a server costs: one client of `specdec serve` beside calls of the library, in turn, plain and with the draft.

    python benchmarks/server.py                              # the package's code pair, all cores
    OMP_NUM_THREADS=1 python benchmarks/server.py --repeats 9

Both run the same pair in the same backend; every text must be the same. The server streams, the library answers as a
whole (`generate`). The client is the standard library's, which costs next to nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from http.client import HTTPConnection
from typing import Any

import torch
from measure import Watch, interleaved, ratio, read_prompts, served, table

from specdec import SpecGenerator
from specdec.options.bundled_models import pair


class Client:
    """Asks one server, over one connection."""

    def __init__(self, address: str, tokens: int) -> None:
        self._connection, self._tokens = HTTPConnection(address), tokens

    def text(self, prompt: str, *, drafts: bool) -> str:
        """What the server streams for a prompt."""
        body: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": self._tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "speculate": None if drafts else False}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer, lines = self._connection.getresponse(), []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                lines.append(line)
        return "".join(choice["text"] for line in lines for choice in json.loads(line[6:])["choices"])


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(pair().target), help="folder or hub id (default: the package's pair)")
    parser.add_argument("--draft", default=str(pair().draft))
    parser.add_argument("--backend", default="packed")
    parser.add_argument("--count", type=int, default=3, help="prompts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    watch, how = Watch(), {"dtype": "float32", "backend": args.backend}
    generators = {
        drafts: SpecGenerator.from_pretrained(args.target, args.draft if drafts else None, **how)
        for drafts in (False, True)
    }
    prompts, texts = read_prompts(None, args.count), {}
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": []}

    def library(drafts: bool, prompt: str) -> None:
        out = generators[drafts].generate(prompt, **options)
        assert texts.setdefault(prompt, out.texts[0]) == out.texts[0]

    model = [args.target, "--draft", args.draft, "--name", "model", "--log", "text"]
    with served(*model, "--backend", args.backend, "--dtype", "float32") as (address, _):
        client = Client(address.removeprefix("http://"), args.tokens)

        def server(drafts: bool, prompt: str) -> None:
            assert client.text(prompt, drafts=drafts) == texts[prompt]

        systems = {
            "library, plain": lambda prompt: library(False, prompt),
            "server, plain": lambda prompt: server(False, prompt),
            "library, draft": lambda prompt: library(True, prompt),
            "server, draft": lambda prompt: server(True, prompt),
        }
        for run in systems.values():
            for prompt in prompts:
                run(prompt)
        seconds = interleaved(systems, prompts, args.repeats, watch)
    rows = []
    for name, found in seconds.items():
        beside = seconds[f"library, {name.split()[1]}"]
        per_second = args.tokens / statistics.median(statistics.median(one) for one in found)
        rows.append([name, f"{per_second:.0f}", f"{ratio(beside, found):.1%}"])
    print(f"{torch.get_num_threads()} threads, {len(prompts)} prompts, {args.tokens} new tokens\n")
    print(table(["one client", "tokens per second", "of the library's"], rows))
    print(f"\n{watch.verdict()}")


if __name__ == "__main__":
    main()
