"""The engine beside the loop in its plainest form: the same texts, by every strategy that has one."""

import pytest
import torch
from torch import Tensor

from specdec import SpecGenerator
from specdec.decoding import noise
from specdec.engine import reference
from specdec.proposers import FunctionDraft
from tests.tiny import tiny

PROMPT = [5, 9, 12, 7, 5, 9]
SEED = 3


class Guesser:
    """Guesses the true text, but for every `wrong`-th token."""

    def __init__(self, text: list[int], wrong: int) -> None:
        self.text, self.wrong = text, wrong

    def propose(self, tokens: list[int], k: int) -> list[int]:
        guesses = self.text[len(tokens) : len(tokens) + k]
        return [(token + (len(tokens) + i) % self.wrong // (self.wrong - 1)) % 64 for i, token in enumerate(guesses)]


def seeded(logits: Tensor, tokens: list[int]) -> int:
    return noise.draw(logits, noise.key(SEED, noise.COUPLED, len(tokens) - len(PROMPT)))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("wrong", [2, 3, 7, 1000])
def test_the_engine_writes_what_the_plainest_loop_writes(wrong: int, sampled: bool) -> None:
    """With drafts that are right once in two, three, seven and nearly all times; and the plainest loop, with none."""
    model, passes = tiny("llama"), 0

    def target(tokens: list[int]) -> Tensor:
        nonlocal passes
        passes += 1
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]

    choose = seeded if sampled else reference.greedy
    plain = reference.generate(target, None, PROMPT, 40, choose=choose)
    assert passes == 40 - len(PROMPT)
    draft, passes = Guesser(plain, wrong), 0
    ends = {plain[-4]} - {*plain[:-4]}
    until = 40 if not ends else 37
    assert reference.generate(target, draft, PROMPT, 40, choose=choose, ends=ends) == plain[:until]
    assert passes < 40 - len(PROMPT)
    options = {"max_new_tokens": 34, "eos_token_id": sorted(ends), "pad_token_id": 0}
    more = {"do_sample": True, "seed": [SEED], "top_k": 0} if sampled else {}
    out = SpecGenerator(model, FunctionDraft(draft.propose)).generate([PROMPT], **options, **more)
    assert out.sequences[0].tolist() == plain[:until]


def test_a_prompt_that_ends_with_an_end_token() -> None:
    """Is continued, as by the engine."""
    model = tiny("llama")
    text = reference.generate(
        lambda tokens: model(torch.tensor([tokens])).logits[0], None, PROMPT, 9, ends={PROMPT[-1]}
    )
    out = SpecGenerator(model).generate([PROMPT], max_new_tokens=3, eos_token_id=PROMPT[-1], pad_token_id=0)
    assert out.sequences[0].tolist() == text
