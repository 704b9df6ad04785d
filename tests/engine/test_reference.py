"""The engine beside the loop in its plainest form: the same texts, by every strategy that has one."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.decoding import noise
from specdec.engine import reference
from specdec.proposers import FunctionDraft
from tests.oracle import KINDS, oracle
from tests.tiny import tiny

PROMPT = [5, 9, 12, 7, 5, 9]
SEED = 3


def seeded(logits: Tensor, tokens: list[int]) -> int:
    return noise.draw(logits, noise.key(SEED, noise.COUPLED, len(tokens) - len(PROMPT)))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_writes_what_the_plainest_loop_writes(kind: str, sampled: bool) -> None:
    """With a draft of each kind; and the plainest loop, with none."""
    model, passes = tiny("llama"), 0

    def target(tokens: list[int]) -> Tensor:
        nonlocal passes
        passes += 1
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]

    choose = seeded if sampled else reference.greedy
    plain = reference.generate(target, None, PROMPT, 40, choose=choose)
    assert passes == 40 - len(PROMPT)
    draft, passes = oracle(kind, [plain], 64), 0
    ends = {plain[-4]} - {*plain[:-4]}
    until = 40 if not ends else 37
    found = reference.generate(target, SimpleNamespace(propose=draft), PROMPT, 40, choose=choose, ends=ends)
    assert found == plain[:until]
    assert passes < until - len(PROMPT) or kind in ("wrong", "random")
    options = {"max_new_tokens": 34, "eos_token_id": sorted(ends), "pad_token_id": 0}
    more = {"do_sample": True, "seed": [SEED], "top_k": 0} if sampled else {}
    out = SpecGenerator(model, FunctionDraft(draft)).generate([PROMPT], **options, **more)
    assert out.sequences[0].tolist() == plain[:until]


def test_a_prompt_that_ends_with_an_end_token() -> None:
    """Is continued, as by the engine."""
    model = tiny("llama")
    text = reference.generate(
        lambda tokens: model(torch.tensor([tokens])).logits[0], None, PROMPT, 9, ends={PROMPT[-1]}
    )
    out = SpecGenerator(model).generate([PROMPT], max_new_tokens=3, eos_token_id=PROMPT[-1], pad_token_id=0)
    assert out.sequences[0].tolist() == text
