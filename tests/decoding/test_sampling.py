"""Sampling: a function of the seed alone (coupled), and the target's own law (all kinds), with drafts that disagree."""

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specdec import SpecGenerator
from tests.matrix import endless, slow
from tests.oracle import oracle
from tests.test_exact import prompt_for, shifts
from tests.tiny import tiny

OPTIONS = endless(20, do_sample=True)
FALSE_ALARM = 1e-4  # per test, fixed by its seed


SCHEDULES = (("heuristic", 5), ("constant", 3), ("confidence", 8), ("cost", None))
COUPLED = (("coupled", None), ("coupled", 4), ("match", 4))


@pytest.mark.parametrize(("name", "shift"), [*shifts("llama", "gpt2", "mistral", "t5"), slow("qwen3_next", 0)])
def test_coupled_text_depends_on_the_seed_alone(name: str, shift: int) -> None:
    """The same seed gives the same text without a draft and with any draft, length and schedule.

    Every draft meets every schedule, the three kinds of drafts that guess trees all pairs of schedule and sampling;
    with the three shifts every draft meets all of these.
    """
    model, assistant = tiny(name), tiny(name, seed=1)
    prompt = [[5, 9, 12, 7, 30, 5, 9]]
    length = 6 if name == "qwen3_next" else 8
    options = endless(length, do_sample=True, temperature=0.8, top_k=20, top_p=0.95, seed=11)
    plain = SpecGenerator(model).generate(prompt, **options).sequences.tolist()
    drafts = [model, assistant, ("suffix", assistant), "suffix", "ngram", oracle("random", [], 64)]
    for i, draft in enumerate(drafts):
        generator = SpecGenerator(model, draft)
        for j, (schedule, k) in enumerate(SCHEDULES):
            sampling, branches = COUPLED[(i + j + shift) % 3]
            run = {**options, "schedule": schedule, "num_assistant_tokens": k, "sampling": sampling}
            if generator.draft.guesses_trees:
                run["num_assistant_branches"] = branches
            out = generator.generate(prompt, **run)
            assert out.sequences.tolist() == plain, (draft, schedule, sampling, branches)
    assert SpecGenerator(model).generate(prompt, **{**options, "seed": 12}).sequences.tolist() != plain


def test_num_return_sequences() -> None:
    """Copies of a prompt lie side by side and differ; one seed fixes them all."""
    generator = SpecGenerator(tiny("llama"), "suffix")
    first = generator.generate([[5, 6], [7, 8]], num_return_sequences=3, seed=0, **OPTIONS).sequences
    again = generator.generate([[5, 6], [7, 8]], num_return_sequences=3, seed=0, **OPTIONS).sequences
    assert first.tolist() == again.tolist()
    assert first[:, :2].tolist() == [[5, 6]] * 3 + [[7, 8]] * 3
    assert len({tuple(row) for row in first.tolist()}) == 6


def test_seed_none_follows_torch() -> None:
    generator = SpecGenerator(tiny("llama"))
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(generator.generate([[5, 6]], **OPTIONS).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]


def test_temperature_zero_is_greedy() -> None:
    generator = SpecGenerator(tiny("llama"), "suffix")
    greedy = generator.generate([[5, 6]], **{**OPTIONS, "do_sample": False})
    for temperature in (0.0, 1e-40, 1e-310):  # (Logits that were divided by the latter were infinite.)
        cold = generator.generate([[5, 6]], **OPTIONS, temperature=temperature)
        assert cold.sequences.tolist() == greedy.sequences.tolist()


VOCAB, DEPTH = 5, 3


def flat(seed: int = 0) -> Any:
    """A model flat enough that every continuation is seen."""
    model = tiny("llama", vocab=VOCAB, seed=seed)
    model.lm_head.weight.data *= 0.35
    return model


def assert_law(texts: list[list[int]], law: dict[tuple[int, ...], float]) -> None:
    """By chi-square; continuations that are seen too rarely count together."""
    counts, total = Counter(tuple(text[:DEPTH]) for text in texts), len(texts)
    common = [s for s in law if law[s] * total >= 5]
    observed = [counts[s] for s in common] + [total - sum(counts[s] for s in common)]
    expected = [law[s] * total for s in common] + [total * (1 - sum(law[s] for s in common))]
    assert chisquare(observed, expected).pvalue > FALSE_ALARM


def exact_law(model: Any, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `DEPTH` tokens, by enumeration."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        prefixes = list(law)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *p] for p in prefixes])).logits[:, -1]
        p = torch.softmax(logits.double() / temperature, -1)
        law = {(*s, t): law[s] * float(p[i, t]) for i, s in enumerate(prefixes) for t in range(VOCAB)}
    return law


# The text of "coupled" and "match" is that of plain sampling (above), so the law of one run of them says it all.
# That of "rejection" and "block" is enumerated in test_rejection.py.
LAWS = [
    *(("coupled", "cost", None), ("rejection", "constant", 3), slow("block", "confidence", 1)),
    *(slow(sampling, "cost", None) for sampling in ("rejection", "block")),
]


@pytest.mark.parametrize(("sampling", "schedule", "branches"), LAWS)
def test_law_is_the_targets(sampling: str, schedule: str, branches: int | None) -> None:
    """The joint law of three tokens is the target's own, by chi-square against enumeration (false alarm 1e-4).

    A draft of another seed proposes up to four tokens, so that rejections happen at every depth.
    """
    how = {"schedule": schedule, "num_assistant_tokens": 4, "num_assistant_branches": branches}
    generator, texts = SpecGenerator(model := flat(), flat(seed=1), **how), []
    accepted = rejected = 0
    run = endless(DEPTH + 2, do_sample=True, sampling=sampling, temperature=0.9, top_k=0)
    for batch in range(2):
        out = generator.generate([[1, 3]] * 500, **run, seed=batch)
        texts += out.new_tokens()
        accepted += out.stats.num_accepted_draft_tokens
        rejected += out.stats.num_draft_tokens - out.stats.num_accepted_draft_tokens
    assert accepted > 50
    assert rejected > 25  # guesses; of their siblings, which rescue most of these rounds, nothing is counted
    assert_law(texts, exact_law(model, [1, 3], 0.9))


@pytest.mark.parametrize("sampling", [None, "coupled", "match", "rejection", "block"])
def test_a_draft_that_overflows_is_left_out(sampling: str | None) -> None:
    """A draft whose logits are NaN drafts nothing. (It once ended the whole call with an error.)"""
    model, broken = tiny("llama"), tiny("llama", seed=1)
    broken.lm_head.weight.data[5] = float("nan")
    options = {**OPTIONS, "do_sample": sampling is not None, "sampling": sampling, "seed": 4}
    plain = SpecGenerator(model).generate([[5, 6, 7]], **options)
    out = SpecGenerator(model, broken).generate([[5, 6, 7]], **options)
    assert out.stats.num_draft_tokens == 0
    assert out.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("name", ["llama", slow("mamba"), "t5"])
def test_a_prompt_of_many_samples_is_read_once(name: str) -> None:
    """Copies share the reading of their prompt and of the encoder's input, and become what each is alone."""
    model, draft = tiny(name, vocab=64), tiny(name, vocab=64, seed=1)
    inputs = prompt_for(name, rows=2)
    options = endless(8, do_sample=True)
    seeds = list(range(6))
    fed: list[int] = []
    generator = SpecGenerator(model)
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, __: fed.append(args[0].numel()))
    out = generator.generate(**inputs, num_return_sequences=3, seed=seeds, **options)
    hook.remove()
    assert sum(fed) <= 2 * 14 + 2 + 6 * 8
    drafted = SpecGenerator(model, draft).generate(**inputs, num_return_sequences=3, seed=seeds, **options)
    assert drafted.sequences.tolist() == out.sequences.tolist()
    for r, seed in enumerate(seeds):
        one = {key: value[r // 3 : r // 3 + 1] for key, value in inputs.items()}
        alone = SpecGenerator(model).generate(**one, seed=[seed], **options)
        assert alone.sequences[0].tolist() == out.sequences[r].tolist()
