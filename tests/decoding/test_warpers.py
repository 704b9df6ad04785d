"""Top-k and top-p keep what transformers' warpers keep, ties included, without writing to their input."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from specdec.decoding.processors import Top

pytestmark = pytest.mark.usefixtures("ways")
VOCABS = [5, 300, 5000, 40_003]


def samples(vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(3, vocab, generator=generator)
    masked = noise.masked_fill(torch.rand(3, vocab, generator=generator) < 0.7, float("-inf"))
    masked[:, 0] = 0.0
    mixed = noise * torch.tensor([[0.1], [4.0], [40.0]])  # rows of one batch may need different ways to the cut
    return [noise * 0.5, noise * 4, masked, mixed]


def assert_same_but_at_the_cut(got, expected, logits, p: float, temper: torch.Tensor | None = None) -> None:
    """Equal, except for tokens whose upper mass lies within rounding of p."""
    off = got.isfinite() != expected.isfinite()
    ordered, order = (logits if temper is None else temper).double().softmax(-1).sort(descending=True)
    above = torch.zeros_like(ordered).scatter_(-1, order, ordered.cumsum(-1) - ordered)
    assert not (off & ((above - p).abs() > 1e-5)).any()
    both = got.isfinite() & expected.isfinite()
    assert torch.equal(got[both], expected[both])


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [1, 7, 50])
def test_top_k_is_transformers(vocab, k) -> None:
    """The same tensor, for peaked, flat and masked logits."""
    for logits in samples(vocab):
        before = logits.clone()
        assert torch.equal(Top(k)(None, logits), TopKLogitsWarper(k)(None, logits))
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.999])
def test_top_p_is_transformers(vocab, p) -> None:
    """The same kept set but for rounding at the cut, whether few tokens stay or most."""
    for logits in samples(vocab):
        before = logits.clone()
        assert_same_but_at_the_cut(Top(p=p)(None, logits), TopPLogitsWarper(p)(None, logits), logits, p)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [3, 50, 1000])
def test_fused_is_one_after_the_other(vocab, k) -> None:
    """Top-k, then top-p of what is left."""
    for logits in samples(vocab):
        filtered = TopKLogitsWarper(k)(None, logits)
        expected = TopPLogitsWarper(0.8)(None, filtered)
        assert_same_but_at_the_cut(Top(k, 0.8)(None, logits), expected, logits, 0.8, filtered)


@pytest.mark.parametrize("warper", [Top(p=0.9), Top(20, 0.9)])
def test_rows_without_a_largest_logit_do_not_disturb_others(warper) -> None:
    """Where all tokens are forbidden, nothing is cut off, and the draw raises."""
    ragged, never = torch.zeros(300), torch.full((300,), float("-inf"))
    got = warper(None, torch.stack([ragged, never]))
    assert torch.equal(got[:1], warper(None, ragged[None]))
    assert torch.equal(got[1], never)


def test_gradients_pass_what_stays() -> None:
    """Those of the logits that are kept, and no others."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)).requires_grad_()
    kept = Top(5)(None, logits)
    kept.backward(torch.ones_like(kept))
    assert torch.equal(logits.grad, kept.isfinite().float())


@pytest.mark.parametrize("kind", ["few values", "bfloat16", "equal"])
@pytest.mark.parametrize("vocab", [300, 5000])
def test_ties_at_the_cut_stay_as_in_transformers(kind, vocab) -> None:
    """Top-k keeps every tie of the last one; top-p the highest ids, where a stable ascending sort leaves them."""
    noise = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    logits = {"few values": noise.round(), "bfloat16": noise.bfloat16().float(), "equal": torch.zeros(2, vocab)}[kind]
    assert torch.equal(Top(20)(None, logits), TopKLogitsWarper(20)(None, logits))
    fused, filtered = Top(20, 0.7)(None, logits), TopKLogitsWarper(20)(None, logits)
    for got, source, p in ((Top(p=0.7)(None, logits), logits, 0.7), (fused, filtered, 0.7)):
        ordered, order = source.sort(dim=-1, stable=True)
        removed = ordered.double().softmax(-1).cumsum(-1) <= 1 - p
        expected = source.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
        # One token at most, where the mass of equals adds up to p but for rounding.
        assert (got.isfinite() != expected.isfinite()).sum(-1).max() <= 1


def test_min_tokens_to_keep_is_honoured() -> None:
    """Beam sampling needs tokens besides the end-of-sequence ones."""
    logits = torch.tensor([[9.0, 1.0, 0.0, -1.0, -2.0]])
    for ours, theirs in (
        (Top(p=0.1, min_tokens_to_keep=3), TopPLogitsWarper(0.1, min_tokens_to_keep=3)),
        (Top(1, min_tokens_to_keep=2), TopKLogitsWarper(1, min_tokens_to_keep=2)),
    ):
        assert torch.equal(ours(None, logits), theirs(None, logits))
    assert Top(1, 0.1, min_tokens_to_keep=3)(None, logits).isfinite().sum() == 3
