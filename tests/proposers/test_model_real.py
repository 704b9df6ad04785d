"""The model draft over real (tiny) models: its proposals are what transformers says from scratch."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from specdec.models import LanguageModel
from specdec.proposers import EarlyExitDraft, ModelDraft
from tests.proposers.fakes import FakePlan, FakeSequence, Greedy, follow, task
from tests.tiny import tiny, tiny_inputs


@torch.no_grad()
def likeliest(model: PreTrainedModel, text: list[int], count: int, **inputs: torch.Tensor) -> list[int]:
    """Greedy tokens after `text`, everything recomputed for each."""
    tokens = list(text)
    for _ in range(count):
        name = "decoder_input_ids" if inputs else "input_ids"
        logits = model(**{name: torch.tensor([tokens])}, **inputs, use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(text) :]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3_next", "bloom"])
def test_catching_up_equals_recomputation(name: str) -> None:
    """Ragged rows, all kinds of acceptance, idle rounds and released rows; attention, windows, recurrence."""
    rng = random.Random(name)
    model = tiny(name)
    session = ModelDraft(LanguageModel(model)).start(64)
    rows = [FakeSequence([rng.randrange(3, 64) for _ in range(n)], n) for n in (1, 4, 9)]
    for turn in range(3 if name == "qwen3_next" else 6):
        plans = [FakePlan(rng.choice([0, 1, 4])) for _ in rows]
        for row, plan, tree in zip(rows, plans, session.propose(rows, plans), strict=True):
            assert tree.tokens == likeliest(model, row.tokens, plan.limit)
            follow(session, row, tree.tokens, rng.randint(0, 4), rng.randrange(3, 64))
        if turn == 1:
            session.drop([rows.pop(0).id])


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoder(name: str) -> None:
    """Each row's guesses follow from its own encoder input, encoded by the draft or shared by the target."""
    model, inputs = tiny(name), tiny_inputs(name, rows=2)
    language_model = LanguageModel(model)
    shared = language_model.encode(inputs)
    for is_shared in (False, True):
        session = ModelDraft(language_model, shared_encoder=is_shared).start(64)
        rows = [
            FakeSequence(
                text, r, encoding=shared.select([r]), task=task(inputs=None if is_shared else inputs, encoder_row=r)
            )
            for r, text in enumerate([[1], [1, 5, 6]])
        ]
        for _ in range(3):
            trees = session.propose(rows, [FakePlan(3)] * 2)
            for row, tree in zip(rows, trees, strict=True):
                own = {key: value[row.id : row.id + 1] for key, value in inputs.items()}
                assert tree.tokens == likeliest(model, row.tokens, 3, **own)
                follow(session, row, tree.tokens, row.id + 2, 7)


def test_early_exit_is_the_truncated_model() -> None:
    """One layer of two and the head: what a model with that layer alone would say; the target is as before."""
    target = tiny("llama")
    before = likeliest(target, [5, 6], 3)
    session = EarlyExitDraft(LanguageModel(target), 1).start(64)
    [tree] = session.propose([FakeSequence([5, 6], task=task(Greedy(needs_q=True)))], [FakePlan(3)])
    short = tiny("llama", num_hidden_layers=1)
    short.load_state_dict(target.state_dict(), strict=False)
    assert tree.tokens == likeliest(short, [5, 6], 3)
    assert likeliest(target, [5, 6], 3) == before
