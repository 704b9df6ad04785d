"""The same work over Ray: the file of a run in one process, whatever becomes of the workers."""

import gc
import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.batch import BatchSpec, Source, WorkerPool, connect, over_ray
from specdec.batch import run_batch as run_batch

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
ROOT = str(Path(specdec.__file__).parents[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of one CPU each, both on this machine, whose workers import this very package."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([ROOT, before]),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_worker_niceness": "0",  # else whatever runs beside the tests comes first
    }
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 2**27}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    nodes.add_node(**node)
    ray.init(nodes.address, log_to_driver=False)
    connect("local")  # a second time is no harm
    yield
    ray.shutdown()
    nodes.shutdown()
    os.environ["PYTHONPATH"] = before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray leaves its processes to the system
        gc.collect()


def workers() -> list[int]:
    """The processes that hold models for a batch."""
    return processes(b"Map")


def processes(name: bytes) -> list[int]:
    """Ray's processes whose title holds this."""
    found = {int(pid): read(Path(f"/proc/{pid}/cmdline")) for pid in os.listdir("/proc") if pid.isdigit()}
    return [pid for pid, title in found.items() if title.startswith(b"ray::") and name in title]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_batch_over_two_workers_one_of_which_is_killed(
    cluster: None, folders: tuple[str, str], tmp_path: Path, sample: bool
) -> None:
    """200 rows: byte for byte the file of the run in this process, nothing lost and nothing twice."""
    rows = [{"id": n, "prompt": f"{'row ' * (n % 5)}{n}"} for n in range(199)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:50], "no JSON", *lines[50:]]))
    source = Source.of(tmp_path / "in.jsonl")
    spec = BatchSpec("generate", *folders, options={"max_new_tokens": 24, "do_sample": sample}, seed=1)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_batch(source, whole, spec)
    killed: list[int] = []

    def kill_one(progress: Any) -> None:
        if progress.done >= 20 and not killed:
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    done = run_batch(source, out, spec, start=over_ray(WorkerPool(2, 2, cpus=1, at_once=4), 200), tell=kill_one)
    assert len(killed) == 1
    assert (done.done, done.failed) == (200, 1)
    assert out.read_bytes() == whole.read_bytes()
