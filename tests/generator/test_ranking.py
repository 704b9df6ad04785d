"""Sample-and-rank: many samples of one prompt, the likeliest come back."""

from typing import Any

import pytest
import torch

from specdec import SpecGenerator
from tests.matrix import endless
from tests.test_exact import prompt_for
from tests.tiny import tiny

OPTIONS = endless(10, do_sample=True, eos_token_id=[7, 9, 11])


def log_prob(model: Any, text: list[int], prompt: int) -> float:
    """The model's own log-probability of what follows the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0].log_softmax(-1)
    return float(sum(logits[i - 1, text[i]] for i in range(prompt, len(text))))


@pytest.mark.parametrize("ranking", ["mean", "sum"])
@pytest.mark.parametrize("draft", [None, "suffix", "model"])
def test_the_likeliest_samples_come_back(ranking: str, draft: Any) -> None:
    """Scores are those of the model alone, and the best of all samples are returned, best first."""
    model = tiny("llama", vocab=64)
    draft = tiny("llama", vocab=64, seed=1) if draft == "model" else draft
    inputs = prompt_for("llama", rows=2)
    seeds = list(range(12))
    every = SpecGenerator(model).generate(**inputs, **OPTIONS, temperature=0.9, num_return_sequences=6, seed=seeds)
    scores = []
    for text in every.new_tokens():
        row = len(scores) // 6
        prompt = inputs["input_ids"][row].tolist()
        total = log_prob(model, prompt + text, len(prompt))
        scores.append(total if ranking == "sum" else total / len(text))
    out = SpecGenerator(model, draft).generate(
        **inputs, **OPTIONS, temperature=0.9, num_samples=6, num_return_sequences=2, ranking=ranking, seed=seeds
    )
    best = [sorted(range(6 * r, 6 * r + 6), key=lambda i: -scores[i])[:2] for r in range(2)]
    chosen = [i for pair in best for i in pair]
    assert out.new_tokens() == [every.new_tokens()[i] for i in chosen]
    assert torch.allclose(out.sequences_scores, torch.tensor([scores[i] for i in chosen]), atol=1e-4)
