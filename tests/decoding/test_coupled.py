"""Greedy and coupled decoding, step by step, and samplers that agree with them."""

import math
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from specdec.core.tree import Tree
from specdec.decoding.noise import fold
from specdec.decoding.processors import Processors
from specdec.decoding.strategies import Coupled, Greedy, Rejection
from tests.decoding.toys import NOTHING, logits_of
from tests.proposers.fakes import FakeSequence

V = 12


def test_coupling_agrees_at_least_as_often_as_its_bound() -> None:
    """P(match) >= (1 - TV) / (1 + TV), less five standard errors over 2,000 seeds."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.4, 0.25, 0.15, 0.2])
    distance = float((p - q).abs().sum()) / 2
    scores = logits_of(Tree.chain([0]), p.log()[None])
    row, agreed = FakeSequence([0]), 0
    for seed in range(2000):
        selector = Coupled(NOTHING, fold(3, seed))
        agreed += selector.emit(row, [], scores, 0).token == selector.sampler.pick(row, [], q.log())[0]
    bound = (1 - distance) / (1 + distance)
    assert agreed / 2000 >= bound - 5 * (bound * (1 - bound) / 2000) ** 0.5


def test_greedy_takes_the_first_of_equals_and_tells_confidence() -> None:
    """Ties as torch.argmax breaks them; the draft's probability is its softmax."""
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert Greedy(NOTHING).emit(FakeSequence([0]), [], logits_of(Tree.chain([0]), logits[None]), 0).token == 1
    token, sure, q = Greedy(NOTHING).sampler.pick(FakeSequence([0]), [], logits.bfloat16())
    assert (token, q) == (1, None)
    assert sure == pytest.approx(float(logits.softmax(-1)[1]), rel=1e-6)


@pytest.mark.parametrize("kind", [Greedy, Coupled, Rejection])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("confident", [True, False])
def test_a_draft_that_overflowed_has_no_guess(kind: Any, bad: float, confident: bool) -> None:
    """Also without its confidence."""
    logits = torch.arange(V).float().index_fill(0, torch.tensor([5]), bad)
    assert math.isnan(kind(NOTHING).sampler.pick(FakeSequence([0]), [], logits, confident=confident)[1])


def test_guidance_equals_transformers() -> None:
    """Both log-softmaxed, combined, and before all processors."""
    logits, unconditional = torch.randn(2, V), torch.randn(2, V)
    theirs = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model=None)
    theirs.get_unconditional_logits = lambda ids: unconditional[:1, None]
    expected = theirs(torch.tensor([[0]]), logits[:1])[0] / 0.5
    selector = Greedy(Processors((TemperatureLogitsWarper(0.5),)), guidance_scale=1.7, keep_scores=True)
    step = selector.emit(FakeSequence([0]), [], logits_of(Tree.chain([0, 1]), logits, unconditional), 0)
    torch.testing.assert_close(step.scores, expected)
    assert step.token == int(expected.argmax())
    assert step.logits is None


def test_kept_scores_are_copies() -> None:
    """The pass's buffers may be written to again."""
    scores = logits_of(Tree.chain([0]), torch.randn(1, V))
    step = Greedy(NOTHING, keep_scores=True, keep_logits=True).emit(FakeSequence([0]), [], scores, 0)
    for kept in (step.scores, step.logits):
        assert torch.equal(kept, scores.logits[0])
        assert kept.data_ptr() != scores.logits.data_ptr()
