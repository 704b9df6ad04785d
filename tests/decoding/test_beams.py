"""Beam search is transformers', token by token and score by score, and no draft changes it."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LanguageModel, SpecGenerator
from specdec.decoding.strategies import beam
from specdec.errors import OptionError
from tests.matrix import endless, slow
from tests.oracle import oracle
from tests.test_exact import prompt_for
from tests.tiny import tiny

VOCAB = 64
MODELS = ["llama", "gpt2", "gemma2", "bloom", "mistral", "opt", "t5", "bart", "whisper"]
PROCESSORS: list[dict[str, Any]] = [
    {}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.5}, {"min_new_tokens": 4},
    {"bad_words_ids": [[8], [10, 12]]},
]  # fmt: skip


def cases(seed: int, count: int) -> list[dict[str, Any]]:
    """Random settings of a search."""
    source = random.Random(seed)
    return [
        {
            "num_beams": (beams := source.choice([2, 3, 4, 6])), "num_return_sequences": source.choice([1, beams]),
            "max_new_tokens": source.choice([4, 12, 16]), "eos_token_id": source.choice([None, 5, [7, 9, 11], [3, 40]]),
            "length_penalty": source.choice([1.0, 0.0, 2.0, -1.0]),
            "early_stopping": source.choice([True, False, "never"]), **source.choice(PROCESSORS),
        }
        for _ in range(count)
    ]  # fmt: skip


def theirs(model: Any, inputs: dict[str, Tensor], case: dict[str, Any], **more: Any) -> Any:
    """transformers' own beam search."""
    from transformers import GenerationMixin

    options = {**case, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with torch.no_grad():
        return GenerationMixin.generate(model, **inputs, **options, **more)


def ours(model: Any, draft: Any, inputs: dict[str, Tensor], case: dict[str, Any], **more: Any) -> Any:
    """Our search with a draft, or without."""
    options = {**case, "eos_token_id": [] if case["eos_token_id"] is None else case["eos_token_id"], "pad_token_id": 0}
    return SpecGenerator(model, draft).generate(**inputs, **options, output_scores=True, **more)


def texts(out: Any) -> list[list[int]]:
    """Every text up to its own end: transformers pads with the first EOS where the padding id is 0."""
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    start = out.sequences.shape[1] - max(lengths)
    return [row[: start + n].tolist() for row, n in zip(out.sequences, lengths, strict=True)]


def assert_same(mine: Any, other: Any, what: Any) -> None:
    assert texts(mine) == texts(other), what
    assert mine.beam_indices.tolist() == other.beam_indices.tolist(), what
    assert torch.allclose(mine.sequences_scores, other.sequences_scores, atol=1e-4), what


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str) -> None:
    """Sequences, scores, beam indices, and the processed scores of every step."""
    for seed, case in enumerate(cases(MODELS.index(name), 5)):
        model = tiny(name, vocab=VOCAB, seed=seed % 3)
        inputs = prompt_for(name, rows=1 + seed % 2)
        expected, out = theirs(model, inputs, case), ours(model, None, inputs, case)
        assert_same(out, expected, case)
        if len(inputs[next(iter(inputs))]) == 1:
            for step, (mine, other) in enumerate(zip(out.scores, expected.scores, strict=True)):
                live = expected.beam_indices.shape[1] > step
                assert not live or torch.allclose(mine[0], other[0], atol=1e-4), (case, step)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "t5", *map(slow, ("mamba", "qwen3_next", "whisper"))])
def test_no_draft_changes_a_search(name: str) -> None:
    """Drafts that agree, disagree, copy or guess at random: same texts, scores and beams, in fewer passes.

    The draft that agrees takes part in every case, the others take turns.
    """
    for seed, case in enumerate(cases(7 + len(name), 3)):
        case["do_sample"] = seed == 1
        if name in ("mamba", "qwen3_next"):  # every branch is a row of its own there
            case["max_new_tokens"] = min(case["max_new_tokens"], 6)
        model = tiny(name, vocab=VOCAB, seed=seed)
        inputs = prompt_for(name, rows=1 + seed % 2)
        plain = ours(model, None, inputs, case, seed=3)
        others = [tiny(name, vocab=VOCAB, seed=seed + 1), "suffix", "ngram", "early_exit:1"]
        others += [oracle("random", [], VOCAB), tiny(name, vocab=VOCAB, seed=seed + 2)]
        for draft in (model, *others[(seed + len(name)) % 3 :: 3]):
            out = ours(model, draft, inputs, case, seed=3, schedule=("heuristic", "constant", "cost")[seed])
            assert_same(out, plain, (draft, case))
            if draft is model and case["max_new_tokens"] > 4 and LanguageModel(model).capability.cache_kind == "kv":
                assert out.stats.num_target_passes < plain.stats.num_target_passes


def test_a_pair_of_drafts_helps_a_search_as_its_model_does() -> None:
    """The model of a hybrid guesses after every beam. (It guessed after the best one alone, and nearly in vain.)"""
    model, prompts = tiny("llama", vocab=VOCAB), [[5, 6, 7], [9, 8, 7, 6, 9, 8]]
    options = endless(16, num_beams=4, output_scores=True)
    plain = SpecGenerator(model).generate(prompts, **options)
    alone, paired = (SpecGenerator(model, draft).generate(prompts, **options) for draft in (model, ("suffix", model)))
    assert_same(paired, plain, None)
    assert alone.stats.num_target_passes < 0.6 * plain.stats.num_target_passes
    assert paired.stats.num_target_passes <= alone.stats.num_target_passes + 1  # the first round may copy


def test_the_prompt_is_read_once() -> None:
    """A prompt goes through the target as one row, however many beams there are."""
    model = tiny("llama", vocab=VOCAB)
    widths: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: widths.append(tuple(args[0].shape)))
    SpecGenerator(model).generate([list(range(5, 35))], **endless(6, num_beams=4))
    assert widths == [(1, 30)] + [(1, 4)] * 5


def test_hidden_states_and_attentions() -> None:
    """Per step and layer, the states of all beams, as transformers gives them; test_searches.py has a decoder alone."""
    model, inputs = tiny("bart", vocab=VOCAB, attn_implementation="eager"), prompt_for("bart")
    case = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": None}
    more = {"output_hidden_states": True, "output_attentions": True}
    expected = theirs(model, inputs, case, **more)
    for draft in (None, tiny("bart", vocab=VOCAB, seed=1)):
        out = ours(model, draft, inputs, case, **more)
        for field in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
            for mine, other in zip(out[field], expected[field], strict=True):
                for layer, theirs_ in zip(mine, other, strict=True):
                    assert layer.shape == theirs_.shape, field
                    assert torch.allclose(layer, theirs_, atol=1e-4), field


def test_exhaustive_goes_on_to_the_end() -> None:
    """`early_stopping="exhaustive"` keeps searching, and never ends with a worse best text than the others do."""
    model = tiny("gpt2", vocab=VOCAB)
    inputs = prompt_for("gpt2")
    case = {"num_beams": 3, "max_new_tokens": 16, "eos_token_id": list(range(3, 20)), "length_penalty": 1.0}
    usual = ours(model, None, inputs, case | {"early_stopping": True})
    out = ours(model, None, inputs, case | {"early_stopping": "exhaustive"})
    assert out.stats.num_new_tokens == 16 > usual.stats.num_new_tokens
    assert out.sequences_scores[0] >= usual.sequences_scores[0]


def test_beam_sample_draws_without_replacement() -> None:
    """The first draw follows softmax, the second softmax without the first, and no candidate comes twice."""
    scores = torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, -0.5]]).log_softmax(-1)
    law = scores.add(torch.tensor([0.3, -0.3])[:, None]).flatten().softmax(0)
    first, second = torch.zeros(6), torch.zeros(6)
    runs = 2000
    for address in range(runs):
        found = beam.draw_candidates(scores, [0.3, -0.3], 4, address * 7919)
        places = [3 * b + t for b, t in zip(found.parents, found.tokens, strict=True)]
        assert len(set(places)) == 4
        first[places[0]] += 1
        second[places[1]] += 1
    then = sum(law[i] * law / (1 - law[i]) * (torch.arange(6) != i) for i in range(6))
    assert (first / runs - law).abs().max() < 0.03
    assert (second / runs - then).abs().max() < 0.03


def test_the_documented_example() -> None:
    """The worked example of docs/guides/beams.md gives what its tables say."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "beams.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"SpecGenerator": SpecGenerator}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
    out, decode = names["out"], names["gen"].tokenizer.decode
    rows = re.findall(r'^\| (\d) \| (\d) \| `"(.*)"` \| (\d) \| (-[\d.]+) \|$', page, re.M)
    assert len(rows) == 6
    for step, number, text, origin, score in rows:
        beam = out.trace[0][int(step) - 1].live[int(number)]
        assert decode(list(beam.tokens)) == text.replace("\\n", "\n")
        assert (beam.origins[-1], f"{beam.score:.3f}") == (int(origin), score)
    for row, (text, indices) in enumerate(re.findall(r'^\| \d \| `"(.*)"` \|.*\| `(\[.*\])` \|$', page, re.M)):
        assert out.texts[row] == text.replace("\\n", "\n")
        assert str(out.beam_indices[row].tolist()) == indices


@pytest.mark.parametrize("penalty", [-200.0, 200.0])
def test_extreme_penalties_are_no_warning(penalty: float) -> None:
    """NumPy's, of a division by zero, was on the error stream of servers."""
    gen = SpecGenerator(tiny("llama", vocab=VOCAB))
    assert gen.generate([[5, 6]], num_beams=2, max_new_tokens=4, length_penalty=penalty).sequences.shape[1] <= 6


@pytest.mark.parametrize("options", [{"num_beams": 2, "do_sample": True}, {"do_sample": True}, {}])
def test_nothing_left_to_choose_is_an_error(options: dict[str, Any]) -> None:
    """Processors that forbid every token are found out. (Greedy decoding took token 0.)"""
    suppressed = list(range(VOCAB))
    with pytest.raises(OptionError, match="no token is left"):
        SpecGenerator(tiny("llama", vocab=VOCAB)).generate(
            [[5, 6]], max_new_tokens=3, suppress_tokens=suppressed, **options
        )
