"""On how many threads an engine computes beside other programs."""

import logging
import os
import re
from hashlib import sha256
from pathlib import Path
from threading import Barrier, Event, Thread, get_native_id
from time import thread_time
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch

from specdec.engine import openmp
from specdec.engine.openmp import Threads, _is_running, waited_seconds


class Machine:
    """A clock, cores for `free` of the calling thread's `count` threads: the others wait."""

    def __init__(self) -> None:
        self.now, self.waited, self.free, self.count = 0.0, 0.0, 4.0, 4
        self.others: int | None = None

    def run(self, threads: Threads, seconds: float) -> list[int]:
        """The numbers of threads while steps of a tenth of a second take so long."""
        counts = []
        for _ in range(round(10 * seconds)):
            threads.use(4)
            counts.append(self.count)
            self.now += 0.1
            self.waited += 0.1 * max(self.count - self.free, 0.0)
        return counts


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    library = SimpleNamespace(
        omp_get_max_threads=lambda: machine.count, omp_set_num_threads=lambda count: setattr(machine, "count", count)
    )
    monkeypatch.setattr(openmp, "_openmp", lambda: library)
    monkeypatch.setattr(openmp, "use_threads", library.omp_set_num_threads)
    monkeypatch.setattr(openmp, "clock", lambda: machine.now)
    monkeypatch.setattr(openmp, "waited_seconds", lambda: machine.waited)
    monkeypatch.setattr(openmp, "others_running", lambda: machine.others)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return machine


def test_a_quiet_machine(machine: Machine) -> None:
    machine.free = 3.9
    assert {*machine.run(Threads(), 60)} == {4}


def test_a_busy_machine(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """As many threads as find a core after a few windows, all of them tried ever more rarely, and used again once they
    find their cores. (Two threads beside seven programs took ten times as long as one.)
    """
    caplog.set_level(logging.INFO, "specdec")
    threads, machine.free = Threads(), 1.6
    counts = machine.run(threads, 100)
    assert counts[:5] == [4] * 5
    assert {*counts[15:50]} == {1}
    assert 0.02 < counts.count(4) / len(counts) < 0.06
    assert caplog.messages == ["the cores are busy: passes run on fewer threads meanwhile"]
    machine.free = 4.0
    assert machine.run(threads, 90)[-1] == 4
    machine.free = 2.0
    assert machine.run(threads, 2)[-1] == 2


def test_a_short_program(machine: Machine) -> None:
    """All threads are used again when it ends, and not before. (A second's program cost five at half the speed.)"""
    threads, machine.free, machine.others = Threads(), 3.0, 1
    assert machine.run(threads, 30).count(4) < 30
    machine.free, machine.others = 4.0, 0
    assert {*machine.run(threads, 10)[6:]} == {4}


def test_what_a_system_does_not_say(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are used without OpenMP's library, and where nothing is counted."""
    machine.free = 0.0
    monkeypatch.setattr(openmp, "waited_seconds", lambda: 0.0)
    assert {*machine.run(Threads(), 5)} == {4}
    monkeypatch.setattr(openmp, "_openmp", lambda: None)
    assert {*machine.run(Threads(), 5)} == {4}


@pytest.mark.skipif(openmp._openmp() is None or openmp._mkl() is None, reason="torch is built without MKL")
def test_products_of_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed on as many threads, also after torch was told a number. (Passes over guesses in float32 took
    three times as long as plain ones beside two programs, and drafting ended.)
    """
    now, waited, seen = iter(range(99)), iter(range(0, 990, 10)), list[str]()
    monkeypatch.setattr(openmp, "clock", lambda: float(next(now)))
    monkeypatch.setattr(openmp, "waited_seconds", lambda: float(next(waited)))
    before = torch.get_num_threads()

    def compute() -> None:
        torch.set_num_threads(2)
        threads = Threads()
        for _ in range(2):
            threads.use(2)
            seen.extend(re.findall(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info()))

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen[-1] == "1"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to a core")
@pytest.mark.parametrize("gives_way", [False, True])
def test_threads_that_share_a_core_wait(gives_way: bool) -> None:
    """Two threads that compute for 0.2 seconds each on one core wait for each other.

    A thread that gives way does not count. (While packed weights were written, passes ran on half of the threads.)
    """
    cores, began, done = os.sched_getaffinity(0), waited_seconds(), Barrier(3)

    def compute(nice: int) -> None:
        os.sched_setaffinity(0, {min(cores)})  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, get_native_id(), nice)
        end = thread_time() + 0.2
        while thread_time() < end:
            sha256(bytes(2**20))  # lets other threads run
        done.wait()
        done.wait()  # it is counted while it lives

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    threads = [Thread(target=compute, args=(nice,)) for nice in (usual, 19 if gives_way else usual)]
    for thread in threads:
        thread.start()
    done.wait()
    waited = waited_seconds() - began
    done.wait()
    for thread in threads:
        thread.join()
    assert (waited > 0.1) != gives_way


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say which threads run")
def test_threads_of_this_program_are_no_others() -> None:
    """Threads that spun on for some milliseconds after a pass made an idle machine a busy one."""
    end, data = Event(), bytes(2**26)

    def work() -> None:
        while not end.is_set():
            crc32(data)  # without the interpreter's lock

    def running() -> int:
        return sum(_is_running(task) for task in Path("/proc/self/task").iterdir())

    threads = [Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    most = max(running() for _ in range(50))
    end.set()
    for thread in threads:
        thread.join()
    assert most >= 3  # the reading thread is one
    assert min(running() for _ in range(50)) < 3  # torch's own threads may run, too
