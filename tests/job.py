"""What processes of a job run in tests: `torchrun -m tests.job WHAT FOLDER`; rank 0 prints what came of it."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from specdec import SpecGenerator, cli
from tests.folders import saved
from tests.heads import eagle_folder
from tests.matrix import endless, some

IDS = [[5, 6, 7, 8, 9, 5, 6] * 3, [3, 4, 5]]  # long enough to be kept, and short
RUN = endless(16)
CALLS = some("greedy", "coupled", "rejection", "beams")
TARGETS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"tie_word_embeddings": True, "vocab": 63}}
DRAFTS = (None, "suffix", "ngram", "model", "head", "early_exit:1")
ARRIVALS = 6


def save(folder: Path) -> None:
    """The models of all jobs."""
    for name, options in TARGETS.items():
        saved(name, folder / name, num_hidden_layers=3, **options)
    saved("llama", folder / "model", seed=1)
    eagle_folder(folder / "head")


def texts(folder: Path, **how: Any) -> dict[str, Any]:
    """What is written with every draft, by every strategy; and by threads whose calls come at any time."""
    found: dict[str, Any] = {}
    for target in TARGETS:
        for name in DRAFTS:
            draft = str(folder / name) if name in ("model", "head") else name
            if draft != name and target != "llama":
                continue  # those have its vocabulary
            gen = SpecGenerator.from_pretrained(str(folder / target), draft, dtype="float32", **how, **RUN)
            for call, options in CALLS.items():
                out = gen.generate(IDS, **options)
                found[f"{target} {name} {call}"] = out.sequences.tolist()
    found["arrivals"] = arrivals(gen)
    return found


def arrivals(gen: SpecGenerator) -> list[Any]:
    """What calls write that overlap, each from a thread of its own, which comes when it likes."""
    found: list[Any] = [None] * ARRIVALS

    def call(i: int) -> None:
        time.sleep(0.02 * (os.urandom(1)[0] % 4))
        found[i] = gen.generate([IDS[0][: i + 1]], do_sample=bool(i % 2), seed=i).sequences.tolist()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(ARRIVALS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(what: str, folder: str) -> int:
    torch.set_num_threads(1)
    if what == "command":
        Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
        prompt = ["-p", "abc", "--draft", "suffix", "--max-new-tokens", "1500", "--set", "eos_token_id=[]"]
        return cli.commands.run_command(["generate", folder, "--tp-plan", "auto", *prompt])
    found = texts(Path(folder), tp_plan="auto")
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
