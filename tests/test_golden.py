"""Group, constrained and contrastive search are transformers 4.49's, the last to have all three (tests/golden)."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import DisjunctiveConstraint, PhrasalConstraint, SpecGenerator
from tests.golden import models
from tests.matrix import slow
from tests.oracle import oracle
from tests.test_exact import noisy

HERE = Path(__file__).parent / "golden"
DATA: dict[str, Any] = {
    kind: json.loads((HERE / f"{kind}.json").read_text()) for kind in ("group", "constrained", "contrastive")
}
CASES = [(kind, number) for kind, data in DATA.items() for number in range(len(data["cases"]))]
DRAFTED = [(kind, number) for kind, number in CASES if kind != "contrastive" and number % 3 == 1]
build = cache(models.build)


def run(case: dict[str, Any], draft: Any = None, **more: Any) -> Any:
    """Our answer to a golden case."""
    kwargs = dict(case["kwargs"])
    if "constraints" in kwargs:
        words = kwargs["constraints"]
        phrases = [PhrasalConstraint(ids) for ids in words.get("phrasal", [])]
        kwargs["constraints"] = phrases + [DisjunctiveConstraint(ids) for ids in words.get("disjunctive", [])]
    if "eos_token_id" in kwargs and kwargs["eos_token_id"] is None:
        kwargs["eos_token_id"] = []
    return SpecGenerator(build(case["model"]), draft).generate(
        **models.inputs(case), **kwargs, output_scores=True, **more
    )


def assert_golden(out: Any, case: dict[str, Any]) -> None:
    """Sequences, scores, the beams of every token, and the kept entries of `scores`."""
    assert out.sequences.tolist() == case["sequences"]
    for step, row, ids, values in case.get("scores", []):
        assert torch.allclose(out.scores[step][row, ids], torch.tensor(values), atol=1e-4), (step, row)
    if "sequences_scores" not in case:
        assert out.beam_indices is None
        assert out.sequences_scores is None
        return
    assert torch.allclose(out.sequences_scores, torch.tensor(case["sequences_scores"]), atol=1e-4)
    assert [[beam for beam in row if beam >= 0] for row in out.beam_indices.tolist()] == case["paths"]


@pytest.mark.parametrize("name", models.NAMES)
def test_the_models_are_those_of_the_data(name: str) -> None:
    """If this fails, the models changed and not the strategies."""
    found = models.check(build(name), next(case for case in DATA["group"]["cases"] if case["model"] == name))
    for data in DATA.values():
        assert found == pytest.approx(data["check"][name], abs=1e-4)


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_golden(kind: str, number: int) -> None:
    case = DATA[kind]["cases"][number]
    assert_golden(run(case), case)


@pytest.mark.parametrize(("kind", "number"), [*DRAFTED[::2], *(slow(*case) for case in DRAFTED[1::2])])
def test_golden_with_drafts(kind: str, number: int) -> None:
    """Drafts that are mostly right, copy, or guess at random: the same texts, scores and beams."""
    case = DATA[kind]["cases"][number]
    plain = run(case)
    for draft in (noisy(deepcopy(build(case["model"])), 0.03), "suffix", oracle("random", [], models.VOCAB)):
        out = run(case, draft)
        assert_golden(out, case)
        if isinstance(draft, torch.nn.Module):
            assert out.stats.num_target_passes <= plain.stats.num_target_passes
