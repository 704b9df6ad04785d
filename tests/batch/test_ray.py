"""The same work over Ray: the file of a run in one process, whatever becomes of the workers; a server in replicas."""

import gc
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import SpecGenerator
from specdec.batch import BatchSpec, Source, WorkerPool, connect, over_ray
from specdec.batch import run_batch as run_batch
from specdec.options import bundled_models
from specdec.server.ray_serve import application

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra `ray` is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
ROOT = str(Path(specdec.__file__).parents[1])
PORT = 18_123
CODE = {"name": "code", "target": "zoo:python-code", "draft": "zoo:python-code"}
ASKED: dict[str, Any] = {"model": "code", "prompt": "def f(", "max_tokens": 32, "temperature": 0}
SOON = 150.0  # seconds, on a busy machine
PAUSE, WINK = 0.3, 0.1


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


@pytest.fixture(scope="module")
def client(cluster: None) -> Iterator[Any]:
    """A client that tries nothing twice, of a server in two replicas."""
    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})  # two nodes of one machine have one port
    two = application(
        {"host": "127.0.0.1", "models": [CODE], "log": "none"}, num_replicas=2, ray_actor_options={"num_cpus": 0.5}
    )
    serve.run(two, name="specdec", route_prefix="/")
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=SOON)
    serve.shutdown()


@pytest.fixture(scope="module")
def text() -> str:
    """What is answered to `ASKED`."""
    pair = bundled_models.pair("python-code")
    return SpecGenerator(pair.target).generate(ASKED["prompt"], max_new_tokens=ASKED["max_tokens"]).texts[0]


def answer(client: Any) -> str:
    return client.completions.create(**ASKED).choices[0].text


@contextmanager
def asking(client: Any, count: int) -> Iterator[list[str | Exception]]:
    """Threads that ask and ask; what they got so far."""
    ends: list[str | Exception] = []
    enough = threading.Event()

    def ask() -> None:
        while not enough.wait(PAUSE):
            try:
                ends.append(answer(client))
            except openai.APIError as error:
                ends.append(error)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def states() -> dict[str, int]:
    """How many replicas are in which state."""
    [found] = serve.status().applications["specdec"].deployments.values()
    return {str(getattr(state, "value", state)): count for state, count in found.replica_states.items()}


def wait_for(true: Callable[[], bool]) -> None:
    """Counts tries, as a clock goes on while processes are stopped. (Their time was up, and nothing was tried.)"""
    for _ in range(int(SOON / WINK)):
        if true():
            return
        time.sleep(WINK)
    raise AssertionError(states())


def test_a_conversation_keeps_its_replica(client: Any) -> None:
    """The one that holds its keys and values, which a conversation in another replica does not find."""

    def told(session: str, prompt: str) -> tuple[int, int]:
        """How many tokens were held, of how many."""
        given = {**ASKED, "prompt": prompt, "max_tokens": 4}
        usage = client.completions.create(**given, extra_headers={"X-Session-Id": session}).usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    first = "# Two stacks and a queue.\nclass Stack:\n    def push(self, item):\n"
    held, length = told("a", first)
    assert held == 0
    other = next(f"b{i}" for i in range(20) if told(f"b{i}", first)[0] == 0)
    prompts, lengths = {"a": first, other: first}, {"a": length, other: length}
    for turn in range(4):
        for session in prompts:
            prompts[session] += f"        self.items{session}{turn}.append(item)\n"
            held, length = told(session, prompts[session])
            assert held >= lengths[session] - 2  # a prompt's last tokens may be others where it goes on
            lengths[session] = length
    assert told(other, prompts["a"])[0] < lengths["a"] - 40


def test_two_replicas_one_of_which_is_killed(client: Any, text: str) -> None:
    """The openai client streams; requests of a killed replica fail cleanly, all others and later ones are answered."""
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**ASKED, stream=True) if chunk.choices]
    assert "".join(pieces) == text
    assert len(pieces) > 1
    replicas = processes(b"ServeReplica")
    assert len(replicas) == 2
    with asking(client, 4) as ends:
        wait_for(lambda: len(ends) > 3)
        os.kill(replicas[0], signal.SIGKILL)
        wait_for(lambda: len(ends) > 23)
    failed = [end for end in ends if isinstance(end, Exception)]
    assert {end for end in ends if isinstance(end, str)} == {text}
    assert len(failed) < len(ends) / 2
    assert answer(client) == text
    wait_for(lambda: set(processes(b"ServeReplica")) != set(replicas) and states() == {"RUNNING": 2})
