"""An engine as a process of its own, in an environment of its own: it answers lines of JSON, each in its turn."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
Answers = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """The process as its parent sees it, stopped while it is not asked: some engines spin on after an answer.

    It dies with its parent. Raises RuntimeError with the words of the process.
    """

    def __init__(self, python: str, script: str, *arguments: str, **task: Any) -> None:
        where = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([python, script, *arguments], text=True, env=where, **pipes)
        self.version: str = self.ask(**task)["ready"]

    def ask(self, **what: Any) -> dict[str, Any]:
        """The answer to one line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}")
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.end()
            raise RuntimeError(answer["error"])
        return answer

    def end(self) -> None:
        """Lets the process end, which waits for its next line, and with it the engine's own processes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died before it read its last line
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def serve(start: Callable[[dict[str, Any]], tuple[str, Answers]]) -> None:
    """The process itself: `start` makes of the first line's task a version and what answers all others.

    Whatever else is printed goes to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    if sys.platform == "linux":  # a process that is stopped does not see the end of its input
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        ready, answer_to = start(json.loads(sys.stdin.readline()))
        answer(ready=ready)
        for line in sys.stdin:
            answer(**answer_to(json.loads(line)))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
