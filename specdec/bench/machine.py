"""Where a benchmark ran: processor, memory, versions, and whether other programs used the cores."""

from __future__ import annotations

import os
import platform
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec import kernels
from specdec.engine.openmp import others_running
from specdec.options.versions import commit, system_entries, versions

# Parts of processor flags that decide the speed of matrix products.
_FLAGS = ("avx", "amx", "vnni", "bf16", "fp16", "fma", "f16c", "neon", "asimd", "sve", "i8mm")
_HIGH_LOAD = 0.5  # programs per core
_FULL_SHARE = 0.8  # share of a core: one busy neighbour on two cores leaves 0.6 to 0.75, a quiet machine 0.98
_STEADY = 1.25  # times its slowest speed, that the memory of a steady machine reads at most
FEWER_THREADS = "passes run on fewer threads meanwhile; OMP_NUM_THREADS= the number of free cores avoids that"


def provenance() -> dict[str, Any]:
    """The machine, its load, the versions in use, and the commit of a checkout."""
    entries = system_entries("/proc/cpuinfo")
    flags = entries.get("flags") or entries.get("Features", "")
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "processor": entries.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in flags.split() if any(part in flag for part in _FLAGS)],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "load": round(load_now(), 2),
        "versions": versions(),
        "commit": commit(),
    }


def load_now() -> float:
    """How many threads of other programs run or wait for a core, on average over a tenth of a second.

    Where the system does not say, it is the load average of the last minute, in which this program may have a part.
    """
    loads = list[float]()
    for _ in range(10):
        loads.append(_load_at_once())
        time.sleep(0.01)
    return statistics.mean(loads)


def _load_at_once() -> float:
    others = others_running()  # threads of this program spin on for some milliseconds after a pass
    return os.getloadavg()[0] if others is None else others


def high_load(load: float) -> str | None:
    """Words about a load at which other programs take the cores; None at a lower one."""
    cores = os.cpu_count() or 1
    return f"load {load:.1f} on {cores} cores" if load > _HIGH_LOAD * cores else None


def memory_bandwidth() -> float:
    """The best rate, in bytes per second, at which torch's threads read a buffer of 256 MiB."""
    buffer = torch.ones(2**26)
    return buffer.nbytes / kernels.best_seconds(buffer.sum, 6)


def core_share() -> float:
    """The share of a core, up to 1, that each of torch's threads gets while they read 32 MiB again and again.

    Threads that wait for each other spin, so the share falls only where they wait for cores.
    """
    buffer = torch.ones(2**23)
    for _ in range(3):  # the first sum makes torch's helper threads
        buffer.sum()
    began, cpu_began = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < 0.15:  # seconds
        buffer.sum()
    return min((time.process_time() - cpu_began) / (passed * torch.get_num_threads()), 1.0)


def waiting_threads() -> str | None:
    """A sentence if torch's threads wait for cores that other programs use, else None."""
    threads = torch.get_num_threads()
    if threads == 1 or (share := core_share()) > _FULL_SHARE:
        return None
    return (
        f"torch's {threads} threads got {share:.0%} of the cores that they need, and passes wait for the last of them"
    )


def reset_peak_memory() -> None:
    """Forgets the peak so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Peak memory in bytes: the accelerator's, else resident; None except on Linux."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = system_entries("/proc/self/status").get("VmHWM")
    return int(peak.split()[0]) * 1024 if peak else None


@dataclass
class Watch:
    """Notices contention: `spins` are the seconds of a fixed piece of work, `load` is the mean load of the machine.

    `bandwidths` are speeds of its memory, in bytes per second.
    """

    spins: list[float] = field(default_factory=list)
    load: float = field(default_factory=load_now)
    bandwidths: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Takes the load, and times a few milliseconds of pure Python on one core."""
        self.load += (_load_at_once() - self.load) / (len(self.spins) + 2)
        began = time.perf_counter()
        total = 0
        for i in range(40_000):
            total += i
        self.spins.append(time.perf_counter() - began)

    @property
    def busy(self) -> bool:
        """Whether other programs slow this one down."""
        usual, best = statistics.median(self.spins), min(self.spins)
        return high_load(self.load) is not None or usual > 1.3 * best or self._late_share > 0.1

    @property
    def _late_share(self) -> float:
        """The share of tries that took more than twice the best time."""
        return sum(spin > 2 * min(self.spins) for spin in self.spins) / len(self.spins)

    def verdict(self) -> str:
        """One sentence on whether the figures can be trusted."""
        pace = f"a fixed piece of work took {statistics.median(self.spins) / min(self.spins):.2f}x its best time"
        facts = f"load {self.load:.1f} on {os.cpu_count()} cores, {pace}"
        slow, fast = min(self.bandwidths, default=1.0), max(self.bandwidths, default=1.0)
        if fast > _STEADY * slow:
            words = f"memory read between {slow / 1e9:.0f} and {fast / 1e9:.0f} GB/s"
            facts += f", and {words}: measure again before you choose between weights"
        if not self.busy:
            return f"quiet machine: {facts}."
        facts += f" and more than twice that in {self._late_share:.0%} of all tries"
        return f"busy machine: {facts}. Other programs run: ratios are rough, and times mean little."
