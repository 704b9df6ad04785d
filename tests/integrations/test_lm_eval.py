"""The model for lm-evaluation-harness: the texts of its own `hf` model, in fewer passes."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.options import bundled_models
from tests.folders import WIDTH, byte_tokenizer
from tests.tiny import tiny

pytestmark = pytest.mark.filterwarnings("ignore")


def test_without_the_harness_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "specdec.integrations.lm_eval", raising=False)
    with pytest.raises(SpecdecError, match=r"pip install -c constraints.txt -e '\.\[harness\]'"):
        import_module("specdec.integrations.lm_eval")


def requests(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_and_likelihoods_are_those_of_hf(batch_size: int) -> None:
    """Ragged batches, stop strings across tokens and prompts that end with a part of one; likelihoods pass through."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from specdec.integrations.lm_eval import SpecdecLM

    common = {"tokenizer": byte_tokenizer(), "batch_size": batch_size, "device": "cpu", "max_length": 200}
    model = tiny("llama", vocab=WIDTH)
    theirs = HFLM(pretrained=model, **common)
    ours = SpecdecLM(pretrained=model, draft=tiny("llama", vocab=WIDTH, seed=1), schedule="cost", **common)
    prompts = ("def f(x):", "a", "class Long(Thing):\n    pass\n8")
    free = theirs.generate_until(requests("generate_until", *((p, {"max_gen_toks": 24}) for p in prompts)))
    until = {"until": [free[0][9:11], free[2][4:6], "8" + free[2][0]], "max_gen_toks": 24}
    pairs_until = [(text, until) for text in prompts]
    expected = theirs.generate_until(requests("generate_until", *pairs_until), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", *pairs_until), disable_tqdm=True) == expected
    assert any(len(text) < 20 for text in expected)
    assert sum(run.num_new_tokens for run in ours.runs) > 0
    pairs = requests("loglikelihood", ("def ", "f(x)"), ("a", "b"))
    scores, wanted = (one.loglikelihood(pairs, disable_tqdm=True) for one in (ours, theirs))
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in wanted]
    assert torch.allclose(*(torch.tensor([score for score, _ in one]) for one in (scores, wanted)))


def test_pairs_of_the_zoo() -> None:
    pytest.importorskip("lm_eval")
    from specdec.integrations.lm_eval import SpecdecLM

    model = SpecdecLM(pretrained="zoo:python-code", draft="zoo:python-code", device="cpu")
    [text] = model.generate_until(requests("generate_until", ("def mean(values):\n", {"until": ["\n\n"]})))
    assert text
    assert model.runs[0].num_accepted_draft_tokens > 0
    assert bundled_models.locate("zoo:python-code", "draft").endswith("draft")
