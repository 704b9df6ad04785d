"""A server in a process of its own."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.folders import WIDTH
from tests.server.served import TOKENIZER
from tests.tiny import tiny

KEY, OTHER_KEY = "a-key-of-enough-letters", "another-key-of-letters"
_PATIENCE = 60.0  # seconds
_ROOT = Path(__file__).parents[2]


class Process:
    """A running `specdec serve`, its address and what it logged."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen, self.log = popen, log
        self.url = self._address()

    def _address(self) -> str:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end and self.popen.poll() is None:
            if match := re.search(r"listening on (http://[\w.:]+)", self.log.read_text()):
                return match[1]
            time.sleep(0.05)
        raise AssertionError(f"the server does not listen:\n{self.log.read_text()}")

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=_PATIENCE, headers={"Authorization": f"Bearer {KEY}"}, **more)

    @property
    def memory(self) -> float:
        """Resident MiB."""
        [line] = [x for x in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
        return int(line.split()[1]) / 1024


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[Process]:
    """`specdec serve` with these arguments, which logs into a folder."""
    log = folder / "log"
    command = [sys.executable, "-m", "specdec", "serve", *arguments, "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        popen = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder)
        try:
            yield Process(popen, log)
        finally:
            popen.kill()
            popen.wait()


@contextmanager
def serving(folder: Path, **more: Any) -> Iterator[Process]:
    """A server of the package's code pair, a tiny chat model and the package's speech pair, with one key."""
    model = folder / "tiny"
    TOKENIZER.save_pretrained(model)
    tiny("llama", vocab=WIDTH).save_pretrained(model)
    (folder / "keys").write_text(f"tests: {KEY}\n")
    pairs = {"tiny": (str(model), "suffix"), "code": ("zoo:python-code",) * 2, "speech": ("zoo:speech",) * 2}
    models: list[dict[str, Any]] = [
        {"name": name, "target": target, "draft": draft, "loading": {"backend": "eager"}}
        for name, (target, draft) in pairs.items()
    ]
    models[1]["prefix_cache"] = 2**24  # full soon, so that memory can be watched
    settings = {"models": models, "port": 0, "api_key_file": str(folder / "keys"), "log": "json", **more}
    (folder / "serve.yaml").write_text(yaml.safe_dump(settings))
    with started("--config", str(folder / "serve.yaml"), folder=folder) as process:
        yield process
