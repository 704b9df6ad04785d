"""Statistics against values worked out by hand."""

import os

import pytest

from specdec.bench import machine
from specdec.bench.machine import Watch
from specdec.bench.results import (
    Speedup,
    per_token,
    percentiles,
    requests,
    speedup,
)
from specdec.bench.systems import token_gaps
from tests.bench.fakes import sample


def test_a_request_is_its_median() -> None:
    """A stall in one of three repetitions does not count."""
    runs = [sample(repeat=r, seconds=s) for r, s in enumerate([1.0, 9.0, 2.0])]
    assert requests(runs) == {0: (2.0, 10)}
    assert per_token(runs) == 0.2
    assert per_token([]) == float("inf")


def test_speedup_is_of_all_seconds() -> None:
    """4 + 2 seconds against 1 + 2, on the requests that both have."""
    plain = [sample(batch=0, seconds=4), sample(batch=1, seconds=2), sample(batch=2, seconds=50)]
    other = [sample("x", batch=0, seconds=1), sample("x", batch=1, seconds=2)]
    found = speedup(plain, other)
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(1.0)  # the second request alone, drawn twice
    assert found.high == pytest.approx(4.0)
    assert found.state == "same"
    doubled = [sample("x", batch=s.batch, seconds=s.seconds / 2) for s in plain]
    assert speedup(plain, doubled) == (2.0, 2.0, 2.0)  # of each request beside its own


def test_speedup_counts_tokens() -> None:
    """Twice the tokens in twice the seconds is no slower."""
    found = speedup([sample(seconds=1)], [sample("x", seconds=2, tokens=[list(range(20))])])
    assert found == Speedup(1.0)
    assert speedup([], [sample("x")]) is None


def test_percentiles() -> None:
    """Interpolated between neighbours."""
    assert percentiles(list(range(101))) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([1.0, 2.0]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([]) is None


def test_token_gaps() -> None:
    """Tokens of one round share its time; the first round is the wait before; a search gives everything at once."""
    assert token_gaps([(1.0, 1), (2.0, 1), (5.0, 3)]) == [1.0, 1.0, 1.0, 1.0]
    assert token_gaps([(6.0, 3)]) == [2.0, 2.0, 2.0]


def test_a_program_that_comes_later_makes_a_machine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the load at the start counted: a figure at half the speed was of a "quiet machine"."""
    watch = Watch(load=0.0)
    monkeypatch.setattr(machine, "_load_at_once", lambda: 4.0 * (os.cpu_count() or 1))
    for _ in range(3):
        watch.look()
    assert watch.busy
    assert watch.verdict().startswith("busy machine: load ")


@pytest.mark.parametrize(("speeds", "told"), [([48e9, 75e9], True), ([70e9, 75e9], False), ([], False)])
def test_memory_whose_speed_changes(speeds: list[float], told: bool) -> None:
    """It makes weights win that were measured in the fast minute."""
    watch = Watch(load=0.0, bandwidths=speeds)
    watch.look()
    words = "memory read between 48 and 75 GB/s: measure again before you choose between weights"
    assert (words in watch.verdict()) == told
