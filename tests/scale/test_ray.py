"""The same work over Ray: the file of a run in one process, whatever becomes of the workers; a server in replicas."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import SpecGenerator, zoo
from specdec.scale import Pool, Source, Work, connect, map_batches, over_ray
from specdec.scale import run as run_batch
from specdec.scale.ray_serve import Replicas, deploy, withdraw
from specdec.select import fold
from tests.folders import saved_model

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
ROOT = str(Path(specdec.__file__).parents[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two CPUs of this machine as a cluster of its own, whose workers import this very package."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ |= {"PYTHONPATH": os.pathsep.join([ROOT, before]), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    connect("local")  # a second time is no harm
    yield
    ray.shutdown()
    os.environ["PYTHONPATH"] = before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray leaves its processes to the system
        gc.collect()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft that often disagrees with it."""
    folder = tmp_path_factory.mktemp("models")
    return saved_model(folder / "target"), saved_model(folder / "draft", seed=1)


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
    cluster: None, models: tuple[str, str], tmp_path: Path, sample: bool
) -> None:
    """200 rows: byte for byte the file of the run in this process, nothing lost and nothing twice."""
    rows = [{"id": n, "prompt": f"{'row ' * (n % 5)}{n}"} for n in range(199)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:50], "no JSON", *lines[50:]]))
    source = Source.of(tmp_path / "in.jsonl")
    work = Work("generate", *models, options={"max_new_tokens": 24, "do_sample": sample}, seed=1)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_batch(source, whole, work)
    killed: list[int] = []

    def kill_one(progress: Any) -> None:
        if progress.done >= 20 and not killed:
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    done = run_batch(source, out, work, start=over_ray(Pool(2, 2, cpus=1, at_once=4), 200), tell=kill_one)
    assert len(killed) == 1
    assert (done.done, done.failed) == (200, 1)
    assert out.read_bytes() == whole.read_bytes()


def test_columns_of_a_dataset(cluster: None, models: tuple[str, str]) -> None:
    """Answers stand behind a dataset's own columns; a sample depends on the row and not on its batch."""
    rows = [{"n": n, "prompt": f"row {n}"} for n in range(20)]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "num_cpus": 1, "id": "n"}
    found = {}
    for size in (3, 20):
        dataset = map_batches(ray.data.from_items(rows), *models, workers="1", batch_size=size, **how)
        found[size] = sorted(dataset.take_all(), key=lambda row: row["n"])
    assert found[3] == found[20]
    assert [row["n"] for row in found[3]] == list(range(20))
    assert len({row["output"] for row in found[3]}) > 10
    assert {row["error"] for row in found[3]} == {None}
    plain = SpecGenerator.from_pretrained(models[0])
    greedy = map_batches(ray.data.from_items(rows[:3]), *models, workers="1", num_cpus=1, max_new_tokens=6).take_all()
    for row in greedy:
        assert row["output"] == plain.generate(row["prompt"], max_new_tokens=6).texts[0]
    assert fold(3, 0) != fold(3, 1)


def test_two_replicas_one_of_which_is_killed(cluster: None) -> None:
    """The openai client streams; requests of a killed replica fail cleanly, all others and later ones are answered."""
    keys = {
        "models": [{"name": "code", "target": "zoo:python-code", "draft": "zoo:python-code"}],
        "port": 18_123,
        "log": "none",
    }
    deploy(keys, Replicas(2, 2, cpus=0.5), "local")
    try:
        client = openai.OpenAI(base_url="http://127.0.0.1:18123/v1", api_key="none", max_retries=0, timeout=120)
        given = {"model": "code", "prompt": "def f(", "max_tokens": 32, "temperature": 0}
        text = SpecGenerator(zoo.pair("python-code").target).generate("def f(", max_new_tokens=32).texts[0]
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True) if chunk.choices]
        assert "".join(pieces) == text
        assert len(pieces) > 1
        ends: list[str | Exception] = []

        def ask() -> None:
            for _ in range(6):
                try:
                    ends.append(client.completions.create(**given).choices[0].text)
                except openai.APIError as error:
                    ends.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(ends) < 4:
            time.sleep(0.01)
        replicas = processes(b"ServeReplica")
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert len(ends) == 24
        failed = [end for end in ends if isinstance(end, Exception)]
        assert {end for end in ends if isinstance(end, str)} == {text}
        assert len(failed) < 12
        assert client.completions.create(**given).choices[0].text == text
        until = time.monotonic() + 120
        while not _both_run() and time.monotonic() < until:
            time.sleep(0.5)
        assert _both_run()
    finally:
        withdraw()


def _both_run() -> bool:
    """Whether the lost replica has been replaced."""
    [found] = serve.status().applications["specdec"].deployments.values()
    return found.replica_states == {"RUNNING": 2}
