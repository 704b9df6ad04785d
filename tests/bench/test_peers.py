"""Engines as processes: none stays behind, stopped or not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
FIND = f"import os, sys; sys.path.insert(0, {str(FOLDER)!r}); import worker; "
ENGINE = FIND + "worker.serve(lambda task: (task['name'], dict))"
PARENT = """
engine = worker.Worker(sys.executable, "-c", ENGINE, name="one")
print(engine.ask(pid=0) and engine._process.pid, flush=True)
{then}
"""


def parent(then: str) -> "subprocess.Popen[str]":
    """A process with an engine that has answered and is stopped, which does `then`; the engine's id was printed."""
    begin = f"{FIND}ENGINE = {ENGINE!r}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", begin + PARENT.format(then=then)], text=True, **pipes)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, at most ten seconds from now; a zombie waits for whoever reads its code."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(100):
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives its parent")
@pytest.mark.parametrize("then", ["import time; time.sleep(60)", "raise SystemExit"])
def test_an_engine_dies_with_its_parent(then: str) -> None:
    """Killed or ended by an exception. (Stopped engines stayed, with their models in memory.)"""
    process = parent(then)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    if "sleep" in then:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert is_gone(pid)


def test_an_engine_that_was_killed() -> None:
    """It is told when it is asked, and does not keep the others from their end. (A broken pipe did.)"""
    then = """
os.kill(engine._process.pid, 9)
os.waitid(os.P_PID, engine._process.pid, os.WEXITED | os.WNOWAIT)
try:
    engine.ask(pid=0)
except RuntimeError as error:
    print(error)
engine.end()
"""
    process = parent(then)
    out, err = process.communicate(timeout=60)
    assert out.splitlines()[1:] == ["the process ended with code -9"]
    assert process.returncode == 0, err
