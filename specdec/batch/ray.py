"""Batches on a cluster, by Ray Data: a pool of actors with the models. Ray is imported on first use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdec.batch.rows import Row, pyarrow_module, windows
from specdec.batch.run import AT_ONCE, Answers, Start, Stop, by_length
from specdec.batch.tasks import TASKS, BatchSpec, OutputLine, encoded
from specdec.errors import EngineError, OptionError, SpecdecError

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

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
class Pool:
    """`least` to `most` workers, each with the models, `at_once` rows, and `cpus` and `gpus` of its node.

    None: one worker per GPU, or per node without GPUs, and an equal share of the CPUs.
    """

    least: int | None = None
    most: int | None = None
    cpus: float | None = None
    gpus: float | None = None
    at_once: int = AT_ONCE

    @classmethod
    def of(cls, workers: str | None, **more: Any) -> Pool:
        """The pool of `workers`, such as "4" or "1-4"."""
        if workers is None:
            return cls(**more)
        least, _, most = workers.partition("-")
        most = most or least
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise OptionError.of("workers", "a number, or two as in 1-4", workers)
        return cls(int(least), int(most), **more)

    def settled(self) -> Pool:
        """The pool with the cluster's defaults in place of None."""
        ray, known = ray_module(), ray_module().cluster_resources()
        gpus, nodes = int(known.get("GPU", 0)), sum(node["Alive"] for node in ray.nodes())
        most = self.most or (gpus if self.gpus is None and gpus else nodes)
        held = self.gpus if self.gpus is not None else float(gpus >= most)
        cpus = self.cpus or (1.0 if held else max(1.0, known.get("CPU", 1) // most))
        return replace(self, least=self.least or most, most=most, cpus=cpus, gpus=held)


def over_ray(pool: Pool, total: int) -> Start:
    """Workers of the connected cluster, for `total` rows; another worker repeats a lost worker's blocks."""

    def start(spec: BatchSpec) -> Answers:
        def answers(rows: Iterator[Row], stop: Stop) -> Iterator[OutputLine]:
            ray, own = ray_module(), pool.settled()
            size = max(1, min(_MOST_ROWS, own.at_once // 2, total // (2 * _CALLS * (own.most or 1))))
            ordered = by_length(rows, spec, _MOST_ROWS * own.at_once)
            blocks = [ray.put(_block(some)) for some in windows(ordered, size)]
            found = _mapped(ray.data.from_arrow_refs(blocks), own, _Lines, (spec, own.at_once))
            try:
                for batch in found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                    if stop():
                        return
                    yield from (OutputLine(**line) for line in batch.to_pylist())
            except ray.exceptions.RayError as error:
                cause = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
                raise EngineError(f"the cluster gave up ({cause}); the same command goes on") from error

        return answers

    return start


def map_batches(
    dataset: Dataset,
    target: str,
    draft: Any = None,
    *,
    task: str = "generate",
    field: str | None = None,
    id: str | None = None,
    seed: int = 0,
    workers: str | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    at_once: int = AT_ONCE,
    batch_size: int = 64,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """The Ray dataset with the further columns `output`, `finish_reason`, `usage` and `error`.

    `task`: generate, chat, summarize or transcribe; `field`: the column that it reads. `workers` ("4", or "1-4" to
    scale by load) hold target and draft, and take `at_once` rows each; `num_gpus` may be below 1. A sample depends on
    `seed` and on the row's column `id`, or on the whole row. `loading`: options of `from_pretrained`; `options`: those
    of every call. Raises OptionError.
    """
    ray_module()
    if task not in (known := [name for name in TASKS if name != "openai"]):
        raise OptionError.of("task", f"one of {', '.join(known)}", task)
    spec = BatchSpec(task, target, draft, options=options, loading=loading or {}, seed=seed, field=field, merges=False)
    pool = Pool.of(workers, cpus=num_cpus, gpus=num_gpus, at_once=at_once).settled()
    return _mapped(dataset, pool, _Columns, (spec, pool.at_once, id), batch_size)


def _mapped(dataset: Dataset, pool: Pool, worker: type, given: tuple[Any, ...], size: int | None = None) -> Dataset:
    """The dataset mapped by `worker(*given)` in batches of `size` rows (None: blocks)."""
    from ray.data import ActorPoolStrategy

    actors = ActorPoolStrategy(
        min_size=pool.least,
        max_size=pool.most,
        max_tasks_in_flight_per_actor=_CALLS,
        max_concurrent_calls_per_actor=_CALLS,
        enable_true_multi_threading=True,
    )
    held = {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "max_restarts": -1, "max_task_retries": _RETRIES}
    how: dict[str, Any] = {"batch_size": size, "batch_format": "pyarrow", "compute": actors, **held}
    with warnings.catch_warnings():  # Ray has no other argument for retries
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return dataset.map_batches(worker, fn_constructor_args=given, **how)


class _Lines:
    """An actor: loads the models once, then turns blocks of rows into lines."""

    def __init__(self, spec: BatchSpec, at_once: int) -> None:
        self._worker, self._pool = spec.start(), ThreadPoolExecutor(at_once)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        """The lines of a block."""
        rows = [
            Row(number, **json.loads(row)) for number, row in zip(*(c.to_pylist() for c in block.columns), strict=True)
        ]
        return pyarrow_module().Table.from_pylist([vars(line) for line in self._answer(rows)])

    def _answer(self, rows: list[Row]) -> list[OutputLine]:
        return list(self._pool.map(self._worker, rows))


class _Columns(_Lines):
    """The same for any columns: adds the answers' columns."""

    def __init__(self, spec: BatchSpec, at_once: int, id: str | None) -> None:
        super().__init__(spec, at_once)
        self._id = id

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        """The block with its answers' columns."""
        rows = [Row(self._number(fields), fields) for fields in block.to_pylist()]
        answers = [json.loads(line.data) for line in self._answer(rows)]
        for name in dict.fromkeys(name for answer in answers for name in answer):
            if name in block.column_names:
                block = block.drop_columns(name)
            block = block.append_column(name, _column(name, [answer.get(name) for answer in answers]))
        return block

    def _number(self, fields: dict[str, Any]) -> int:
        """A hash of the row's id, or of the whole row."""
        known = fields if self._id is None else fields[self._id]
        return int.from_bytes(hashlib.blake2b(encoded(known), digest_size=7).digest(), "big")


def _column(name: str, values: list[Any]) -> pyarrow.Array:
    """A column of the same type in all blocks, also where no row failed, or every row."""
    arrow = pyarrow_module()
    count = arrow.int64()
    kinds = {"error": arrow.string(), "usage": arrow.struct({"prompt_tokens": count, "completion_tokens": count})}
    found = arrow.array(values, type=kinds.get(name))
    return found.cast(arrow.string()) if arrow.types.is_null(found.type) else found


def _block(rows: list[Row]) -> pyarrow.Table:
    """Rows as a table, their fields as JSON."""
    sent = [encoded({"fields": row.fields, "error": row.error}) for row in rows]
    return pyarrow_module().table({"number": [row.number for row in rows], "row": sent})
