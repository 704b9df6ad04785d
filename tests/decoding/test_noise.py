"""The counter-based hash: uniform, independent of its neighbours, and the same in every implementation path."""

import itertools

import pytest
import torch
from scipy.stats import chi2, kstest

from specdec.decoding import noise
from specdec.decoding.noise import fold
from specdec.errors import SpecdecError

N = 1 << 16
FALSE_ALARM = 1e-6  # of every single statistic below
IDS = torch.arange(N)


def assert_flat(counts: torch.Tensor) -> None:
    expected = counts.sum().item() / counts.numel()
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    assert chi2.ppf(FALSE_ALARM, counts.numel() - 1) < statistic < chi2.ppf(1 - FALSE_ALARM, counts.numel() - 1)


def joint(a: torch.Tensor, b: torch.Tensor, bins: int = 16) -> torch.Tensor:
    return torch.bincount((a * bins).long() * bins + (b * bins).long(), minlength=bins * bins)


def at(seed: int, position: int, stream: int = noise.COUPLED, ids: torch.Tensor = IDS) -> torch.Tensor:
    return noise.uniforms(noise.key(seed, stream, position), ids)


@pytest.mark.parametrize("seed", [0, 1, 2**62, -1])
@pytest.mark.parametrize("position", [0, 1, 1000])
def test_uniform_over_token_ids(seed, position) -> None:
    """256 bins over 65,536 ids, and the low bits as well."""
    u = at(seed, position)
    assert 0 < float(u.min()) < float(u.max()) < 1
    assert_flat(torch.bincount((u * 256).long(), minlength=256))
    assert_flat(torch.bincount((u * 2**48).long() & 255, minlength=256))


def test_uniform_over_positions_and_over_seeds() -> None:
    """One token id, 4,096 neighbouring positions, seeds and folded rows."""
    one = torch.tensor([17])
    for series in (
        [at(5, n, ids=one) for n in range(4096)],
        [at(n, 3, ids=one) for n in range(4096)],
        [at(fold(9, n), 0, ids=one) for n in range(4096)],
    ):
        assert_flat(torch.bincount((torch.cat(series) * 64).long(), minlength=64))


def test_neighbours_are_independent() -> None:
    """Pairs of neighbouring seeds, positions, streams, rows and token ids fill the unit square evenly."""
    u = at(5, 7)
    others = [at(6, 7), at(5, 8), at(5, 7, noise.ACCEPT), at(fold(5, 1), 7), at(4, 8), u.roll(1), u.roll(256)]
    for other in others:
        assert_flat(joint(u, other))
        assert abs(float(torch.corrcoef(torch.stack((u, other)))[0, 1])) < 5.2 / N**0.5


def test_scalar_numbers_are_uniform_and_apart() -> None:
    """The numbers that accept or reject, over neighbouring places and streams."""
    places = [noise.uniform(noise.key(0, noise.ACCEPT, start, i)) for start in range(256) for i in range(16)]
    assert_flat(torch.bincount((torch.tensor(places) * 64).long(), minlength=64))
    assert_flat(joint(torch.tensor(places[:-1]), torch.tensor(places[1:]), 8))
    keys = {noise.key(s, t, a, b) for s, t, a, b in itertools.product(range(8), range(5), range(8), range(8))}
    assert len(keys) == 8 * 5 * 8 * 8


def test_gumbel_has_its_law() -> None:
    """Kolmogorov-Smirnov against the standard Gumbel distribution."""
    assert kstest(noise.gumbel(noise.key(1, 2, 3), IDS).numpy(), "gumbel_r").pvalue > FALSE_ALARM


@pytest.mark.usefixtures("ways")
def test_draws_follow_the_distribution() -> None:
    """20,000 positions, a skewed distribution with an impossible token."""
    p = torch.tensor([0.6, 0.25, 0.1, 0.0, 0.05])
    draws = torch.tensor([noise.draw(p.log(), noise.key(8, noise.DRAW, n)) for n in range(20_000)])
    counts = torch.bincount(draws, minlength=5)
    assert counts[3] == 0
    kept = p > 0
    statistic = float(((counts[kept] - 20_000 * p[kept]) ** 2 / (20_000 * p[kept])).sum())
    assert statistic < chi2.ppf(1 - FALSE_ALARM, 3)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("vocab", [50, 3_000, 40_003])
@pytest.mark.parametrize("kind", ["flat", "wide", "peaked", "masked", "half masked"])
def test_shortcuts_find_the_same_winner(vocab, kind) -> None:
    """Compiled code leaves out tokens that cannot win, which never changes the draw."""
    generator = torch.Generator().manual_seed(vocab)
    for n in range(20):
        logits = torch.randn(vocab, generator=generator) * {"flat": 0.01, "wide": 6.0}.get(kind, 2.0)
        if kind == "peaked":
            logits[n] += 30
        if "masked" in kind:
            logits[torch.rand(vocab, generator=generator) < (0.5 if kind == "half masked" else 0.95)] = float("-inf")
        address = noise.key(n, noise.COUPLED, n)
        everything = noise.gumbel(address, torch.arange(vocab)) + logits
        assert noise.draw(logits, address) == int(everything.argmax())


def test_bits_are_pinned() -> None:
    """Texts under a seed must not change between versions or devices."""
    assert fold(0, 0) == 0xA706DD2F4D197E6F
    address = noise.key(1, noise.COUPLED, 2)
    assert address == 0xD69887A7933B8AAD
    bits = (noise.uniforms(address, torch.tensor([0, 1, 128_000, 2**20 - 1])) * 2**52).long()
    assert bits.tolist() == [2917458557571936, 2626963569755285, 3458024829148741, 2393910986508060]


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(
    ("places", "value", "told"),
    [*((place, torch.nan, "NaN") for place in (0, 2, 33)), (slice(None), -torch.inf, "no token is left")],
)
def test_nothing_to_draw_is_an_error(places, value, told) -> None:
    """Of NaN, or where processors forbid every token. (The first token came, for ever.)"""
    logits = torch.zeros(34)
    logits[places] = value
    with pytest.raises(SpecdecError, match=told):
        noise.draw(logits, 1)


def test_rows_and_samples_get_seeds_of_their_own() -> None:
    """Folding never repeats itself over neighbouring seeds and rows, and takes any integer."""
    assert len({fold(seed, row) for seed in range(-64, 64) for row in range(64)}) == 128 * 64
    assert fold(2**70, 1) == fold(2**70, 1)
