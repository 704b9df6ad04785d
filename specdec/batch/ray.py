"""Batches on a cluster, by Ray Data: a pool of actors with the models. Ray is imported on first use."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdec.batch.rows import InputRow, pyarrow_module, windows
from specdec.batch.run import AT_ONCE, Answers, Start, Stop, by_length
from specdec.batch.tasks import BatchSpec
from specdec.batch.worker import OutputLine, encode_line, load_worker
from specdec.errors import EngineError, OptionError, SpecdecError

if TYPE_CHECKING:
    import pyarrow

_CALLS = 4  # blocks in flight per actor, so that passes stay full while one finishes
_MOST_ROWS = 128  # of a block
_RETRIES = 5  # of a block whose worker was lost: a row may be the cause


def ray_module() -> Any:
    """The module; raises SpecdecError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError:
        raise SpecdecError("Ray is not installed: pip install -e '.[ray]'") from None
    return ray


def connect(address: str) -> None:
    """Connects to the cluster at `address` ("auto": this machine's; "local": a new one on this machine)."""
    ray = ray_module()
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level="error", **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError.of("ray", "the address of a cluster, auto or local", address, str(error)) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


@dataclass(frozen=True)
class WorkerPool:
    """`least` to `most` workers, each with the models, `at_once` rows, and `cpus` and `gpus` of its node.

    None: one worker per GPU, or per node without GPUs, and an equal share of the CPUs.
    """

    least: int | None = None
    most: int | None = None
    cpus: float | None = None
    gpus: float | None = None
    at_once: int = AT_ONCE

    @classmethod
    def of(cls, workers: str | None, **more: Any) -> WorkerPool:
        """The pool of `workers`, such as "4" or "1-4"."""
        if workers is None:
            return cls(**more)
        least, _, most = workers.partition("-")
        most = most or least
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise OptionError.of("workers", "a number, or two as in 1-4", workers)
        return cls(int(least), int(most), **more)

    def settled(self) -> WorkerPool:
        """The pool with the cluster's defaults in place of None."""
        ray, known = ray_module(), ray_module().cluster_resources()
        gpus, nodes = int(known.get("GPU", 0)), sum(node["Alive"] for node in ray.nodes())
        most = self.most or (gpus if self.gpus is None and gpus else nodes)
        held = self.gpus if self.gpus is not None else float(gpus >= most)
        cpus = self.cpus or (1.0 if held else max(1.0, known.get("CPU", 1) // most))
        return replace(self, least=self.least or most, most=most, cpus=cpus, gpus=held)

    def actors(self) -> dict[str, Any]:
        """The workers as arguments of Ray Data."""
        strategy = ray_module().data.ActorPoolStrategy(
            min_size=self.least,
            max_size=self.most,
            max_tasks_in_flight_per_actor=_CALLS,
            max_concurrent_calls_per_actor=_CALLS,
            enable_true_multi_threading=True,
        )
        held = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return {"compute": strategy, **held, "max_restarts": -1, "max_task_retries": _RETRIES}


def over_ray(pool: WorkerPool, total: int) -> Start:
    """Workers of the connected cluster, for `total` rows; another worker repeats a lost worker's blocks."""

    def start(spec: BatchSpec) -> Answers:
        def answers(rows: Iterator[InputRow], stop: Stop) -> Iterator[OutputLine]:
            ray, own = ray_module(), pool.settled()
            size = max(1, min(_MOST_ROWS, own.at_once // 2, total // (2 * _CALLS * (own.most or 1))))
            ordered = by_length(rows, spec, _MOST_ROWS * own.at_once)
            blocks = ray.data.from_arrow_refs([ray.put(_block(some)) for some in windows(ordered, size)])
            how: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
            with warnings.catch_warnings():  # Ray has no other argument for retries
                warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
                found = blocks.map_batches(_Lines, fn_constructor_args=(spec, own.at_once), **how, **own.actors())
            try:
                for batch in found.iter_batches(**how, prefetch_batches=0):
                    yield from (OutputLine(**line) for line in batch.to_pylist())
                    if stop():
                        return
            except ray.exceptions.RayError as error:
                cause = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
                raise EngineError(f"the cluster gave up ({cause}); the same command goes on") from error

        return answers

    return start


class _Lines:
    """An actor: loads the models once, then turns blocks of rows into lines."""

    def __init__(self, spec: BatchSpec, at_once: int) -> None:
        self._worker, self._pool = load_worker(spec), ThreadPoolExecutor(at_once)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        """The lines of a block."""
        rows = [InputRow(**json.loads(row)) for row in block["row"].to_pylist()]
        return pyarrow_module().Table.from_pylist([vars(line) for line in self._pool.map(self._worker, rows)])


def _block(rows: list[InputRow]) -> pyarrow.Table:
    """Rows as a table of JSON."""
    return pyarrow_module().table({"row": [encode_line(vars(row)) for row in rows]})
