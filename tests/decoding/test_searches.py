"""What the golden data does not show of beam, group, constrained and contrastive search: batches, drafts, errors."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer

from specdec import DisjunctiveConstraint, LanguageModel, OptionError, PhrasalConstraint, SpecGenerator
from tests.matrix import endless
from tests.oracle import contrastive
from tests.test_exact import prompt_for
from tests.tiny import tiny
from tests.versions import wrong_before

VOCAB = 64
KINDS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "group": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 4},
    "constrained": {"num_beams": 4, "force_words_ids": [[20, 21], [[8, 9], [8, 30], [41]]], "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
}
BEAMS = {kind: options for kind, options in KINDS.items() if kind != "contrastive"}
RAGGED = [[5, 9, 12], [6, 6, 9, 20, 13, 9, 30, 14, 6, 6], [17]]


def generate(model: Any, draft: Any, prompt: Any, options: dict[str, Any], **more: Any) -> Any:
    common = {"max_new_tokens": 10, "eos_token_id": [7, 11], "pad_token_id": 0, "output_scores": True}
    inputs = prompt if isinstance(prompt, dict) else {"input_ids": prompt}
    return SpecGenerator(model, draft).generate(**inputs, **{**common, **options, **more})


def assert_same(mine: Any, other: Any) -> None:
    assert mine.new_tokens() == other.new_tokens()
    if other.beam_indices is not None:
        assert mine.beam_indices.tolist() == other.beam_indices.tolist()
        assert torch.allclose(mine.sequences_scores, other.sequences_scores, atol=1e-4)


def test_a_draft_saves_passes() -> None:
    """A perfect draft runs the search ahead, also across groups and with forced words."""
    model = tiny("llama", vocab=VOCAB)
    for options in BEAMS.values():
        plain = generate(model, None, RAGGED[:1], options, max_new_tokens=24, eos_token_id=[])
        out = generate(model, model, RAGGED[:1], options, max_new_tokens=24, eos_token_id=[])
        assert_same(out, plain)
        assert out.stats.num_target_passes < 0.6 * plain.stats.num_target_passes


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "opt", "mistral", "mamba", "qwen3_next"])
@torch.no_grad()
def test_contrastive_equals_the_formula(name: str) -> None:
    """On every kind of layers, those that cannot be cut back among them (4.49 refuses these)."""
    model = tiny(name, vocab=VOCAB)
    out = generate(model, None, RAGGED[:1], KINDS["contrastive"], eos_token_id=[])

    def read(new: list[int]) -> Any:
        return model(torch.tensor([RAGGED[0] + new]), use_cache=False, output_hidden_states=True)

    assert out.new_tokens() == [contrastive(read, 0.6, 4, 10)]
    if LanguageModel(model).capability.cache_kind == "kv":
        assert out.stats.num_target_passes == 11


@pytest.mark.parametrize("kind", ["beams", "contrastive"])
def test_streams(kind: str) -> None:
    """Beams are final at the end: a stream brings them then, and none to a streamer. Contrastive tokens are at once."""
    generator, options = SpecGenerator(tiny("llama", vocab=VOCAB)), endless(6, **KINDS[kind])
    texts = generator.generate(RAGGED[:1], **options).new_tokens()
    expected = texts if kind == "beams" else [[token] for token in texts[0]]
    assert [event.token_ids for event in generator.stream(RAGGED[:1], **options)] == expected
    if kind == "beams":
        with pytest.raises(OptionError, match="streamer"):
            generator.generate(RAGGED[:1], **options, streamer=TextIteratorStreamer(None))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_hidden_states_and_attentions(kind: str) -> None:
    """Every returned text's states are those that a pass over the whole text computes."""
    model = tiny("llama", vocab=VOCAB, attn_implementation="eager")
    traced = {"output_hidden_states": True, "output_attentions": True, "output_logits": True}
    draft = None if kind == "contrastive" else tiny("llama", vocab=VOCAB, seed=1)
    out = generate(model, draft, RAGGED[:1], KINDS[kind], **traced)
    start = len(RAGGED[0])
    for row, new in enumerate(out.new_tokens()):
        whole = model(torch.tensor([RAGGED[0] + new]), output_hidden_states=True, output_attentions=True)
        beams = [0] * len(new) if kind == "contrastive" else out.beam_indices[row].tolist()
        for step, beam in enumerate(beams[: len(new)]):
            at = start + step - 1
            assert torch.allclose(out.logits[step][beam], whole.logits[0, at], atol=1e-4)
            for mine, other in zip(out.hidden_states[step], whole.hidden_states, strict=True):
                assert torch.allclose(mine[beam, -1], other[0, at], atol=1e-4)
            for mine, other in zip(out.attentions[step], whole.attentions, strict=True):
                assert torch.allclose(mine[beam, :, -1], other[0, :, at, : at + 1], atol=1e-4)


def test_finished_groups_leave_rows_behind() -> None:
    """Where one group ends before another, its rows hold padding and zeros, and every step has all rows."""
    model = tiny("llama", vocab=VOCAB)
    for first in range(40):
        case = {**KINDS["group"], "early_stopping": True, "eos_token_id": list(range(4, 30))}
        out = generate(model, "suffix", [[first + 5, 9]], case, output_hidden_states=True, max_new_tokens=14)
        assert {len(scores) for scores in out.scores} == {4}
        assert {len(step[-1]) for step in out.hidden_states} == {4}
        gone = [step[-1].abs().sum((1, 2)) == 0 for step in out.hidden_states]
        if any(rows.any() for rows in gone):
            last = next(i for i, rows in enumerate(gone) if rows.any())
            assert torch.isinf(out.scores[last][gone[last], 1:]).all()
            return
    pytest.fail("no group ended before another")


@pytest.mark.parametrize("groups", [1, 2])
def test_prefix_function(groups: int) -> None:
    """It is asked with the prompt's number and each beam's own ids, and nothing else is written, however little it
    allows."""
    model, asked = tiny("llama", vocab=VOCAB), []
    prompts = [[5, 9, 12], [6, 30, 9]]
    allowed = [{9: [20], 12: [20], 20: [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]}, {}]

    def allow(row: int, ids: Tensor) -> list[int]:
        assert ids[:3].tolist() == prompts[row]
        asked.append(row)
        return allowed[row].get(int(ids[-1]), list(range(20 + 10 * row, 34 + 10 * row)))

    options = {"num_beams": 4, "num_return_sequences": 4, "num_beam_groups": groups}
    if groups > 1:
        options["diversity_penalty"] = 0.5
    more = {"prefix_allowed_tokens_fn": allow, "eos_token_id": []}
    plain = generate(model, None, prompts, options, **more)
    assert set(asked) == {0, 1}
    for row, text in enumerate(plain.new_tokens()):
        assert set(text) <= set(range(20 + row // 4 * 10, 34 + row // 4 * 10))
    for draft in (model, "suffix"):
        assert_same(generate(model, draft, prompts, options, **more), plain)
    if groups == 1:
        from transformers import GenerationMixin

        common = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        options.pop("num_beam_groups")
        theirs = GenerationMixin.generate(
            model, torch.tensor(prompts), **options, prefix_allowed_tokens_fn=allow, **common
        )
        assert plain.sequences.tolist() == theirs.tolist()


@wrong_before("encoder penalties of beams")
@pytest.mark.parametrize("option", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}])
def test_encoder_processors_with_beams(option: dict[str, Any]) -> None:
    """They take as many texts as a step brings. (The prompt's only one made them fail.)"""
    from transformers import GenerationMixin

    model, inputs = tiny("t5", vocab=VOCAB), prompt_for("t5")
    common = {"max_new_tokens": 8, "pad_token_id": 0, "num_beams": 3}
    theirs = GenerationMixin.generate(model, **inputs, **common, **option, do_sample=False, eos_token_id=None)
    for draft in (None, tiny("t5", vocab=VOCAB, seed=1)):
        out = generate(model, draft, inputs, {**common, **option}, eos_token_id=[])
        assert out.sequences.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_stopping_criteria(kind: str) -> None:
    """A search goes on until its criterion holds for all of its beams, as in transformers 4.49."""
    ends = {"stopping_criteria": [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 8)], "eos_token_id": []}
    out = generate(tiny("llama", vocab=VOCAB), None, RAGGED[:1], KINDS[kind], **ends)
    assert set(out.stats.lengths) == {5}
    assert out.stats.finish_reasons == ("criteria",) * KINDS[kind].get("num_return_sequences", 1)


def test_guidance() -> None:
    """The unconditional row takes part in every search."""
    model = tiny("llama", vocab=VOCAB)
    for kind, options in KINDS.items():
        more = {"guidance_scale": 2.0, "negative_prompt_ids": [[5, 9]]}
        plain = generate(model, None, RAGGED[:1], options, **more)
        assert plain.new_tokens() != generate(model, None, RAGGED[:1], options).new_tokens()
        if kind != "contrastive":
            assert_same(generate(model, model, RAGGED[:1], options, **more), plain)


def test_a_large_bias_does_not_break_a_look_ahead() -> None:
    """A draft's confidence in a biased token is at most 1. (Its exponential overflowed.)"""
    model = tiny("llama", vocab=VOCAB)
    for options in BEAMS.values():
        biased = {**options, "sequence_bias": [[[20], 1000.0]]}
        assert_same(generate(model, model, RAGGED[:1], biased), generate(model, None, RAGGED[:1], biased))


def test_processors_of_the_user_run_per_group() -> None:
    """A processor of the caller sees the ids of one group at a time."""
    seen: list[tuple[int, ...]] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(tuple(ids.shape))
        return scores

    generate(tiny("llama", vocab=VOCAB), None, RAGGED[:1], KINDS["group"], logits_processor=[watch], max_new_tokens=2)
    assert seen == [(2, 3), (2, 3), (2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"num_beams": 2, "do_sample": True, "sampling": "rejection"}, "sampling"),
        ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0}, "diversity_penalty"),
        ({**KINDS["group"], "do_sample": True}, "num_beam_groups.*do_sample"),
        ({**KINDS["group"], "force_words_ids": [[3]]}, "num_beam_groups.*force_words_ids"),
        ({"force_words_ids": [[3]]}, "force_words_ids.*num_beams"),
        ({"num_beams": 2, "force_words_ids": []}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": [[]]}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": [3]}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": "word"}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": [[3, -1]]}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": [[3, VOCAB]]}, "force_words_ids.*63"),
        ({"num_beams": 2, "force_words_ids": [[[3], [3, 4]]]}, "force_words_ids"),
        ({"num_beams": 2, "force_words_ids": [[3]], "do_sample": True}, "force_words_ids.*do_sample"),
        ({"num_beams": 2, "constraints": [[3]]}, "constraints"),
        ({"num_beams": 2, "constraints": []}, "constraints"),
        ({"num_beams": 2, "constraints": [PhrasalConstraint([VOCAB])]}, "constraints"),
        ({"constraints": [PhrasalConstraint([3])]}, "constraints.*num_beams"),
        ({"penalty_alpha": 0.6, "num_beams": 2}, "penalty_alpha.*num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 1}, "penalty_alpha.*top_k"),
        ({"penalty_alpha": 1.5, "top_k": 4}, "penalty_alpha"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": True}, "penalty_alpha.*do_sample"),
        ({"penalty_alpha": 0.6, "top_k": 4, "num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_bad_input(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        SpecGenerator(tiny("llama", vocab=VOCAB)).generate([[5, 6]], **{"max_new_tokens": 3, **options})


@pytest.mark.parametrize("wrong", [[], "word", [1.5], [True], None])
def test_constraints_are_checked_when_made(wrong: Any) -> None:
    """A phrase is a list of at least one id."""
    with pytest.raises(OptionError):
        PhrasalConstraint(wrong)
    with pytest.raises(OptionError):
        DisjunctiveConstraint([wrong])
    with pytest.raises(OptionError):
        DisjunctiveConstraint([[3, 4], [3, 4]])


def test_defaults_wait_where_a_call_chooses_otherwise() -> None:
    """A generator's way of searching steps back for a call that samples or sets its beams."""
    model = tiny("llama", vocab=VOCAB)
    once = {"max_new_tokens": 3, "eos_token_id": []}
    for kind, options in KINDS.items():
        generator = SpecGenerator(model, **options)
        strategy = generator.generate([[5, 6]], **once).stats.settings["strategy"]
        assert strategy == {"beams": "beamsearch", "contrastive": kind}.get(kind, f"{kind}search")
        sampled = generator.generate([[5, 6]], do_sample=True, num_beams=1, num_return_sequences=1, **once)
        assert sampled.stats.settings["strategy"] == "coupled"
    out = SpecGenerator(model, **KINDS["contrastive"]).generate([[5, 6]], num_beams=2, do_sample=True, **once)
    assert out.stats.settings["strategy"] == "beamsearch"


@pytest.mark.parametrize("kind", BEAMS)
def test_trace(kind: str) -> None:
    """Live beams after each step, as the next step continues them, and the hypotheses so far."""
    out = generate(tiny("llama", vocab=VOCAB), "suffix", RAGGED[:1], KINDS[kind], output_trace=True)
    (states,) = out.trace
    assert [len(state.live[0].tokens) for state in states] == list(range(1, len(states) + 1))
    assert {len(state.live) for state in states} == {4}
    for before, after in itertools.pairwise(states):
        for one in after.live:
            assert one.tokens[:-1] == before.live[one.origins[-1]].tokens
    best = states[-1].finished[: KINDS[kind]["num_return_sequences"]]
    assert [list(found.tokens) for found in best] == out.new_tokens()


def test_contrastive_takes_no_draft() -> None:
    """Nor does it ignore one; without it, its own options are as they were."""
    generator = SpecGenerator(tiny("llama", vocab=VOCAB), "suffix")
    with pytest.raises(OptionError, match="draft"):
        generator.generate([[5, 6]], max_new_tokens=3, penalty_alpha=0.6, top_k=4)
    assert generator.generate([[5, 6]], max_new_tokens=3, penalty_alpha=0.0, eos_token_id=[]).stats.num_new_tokens == 3


def test_contrastive_feeds_its_last_candidates() -> None:
    """They need a position, which the last token of other strategies does not."""
    model = tiny("gpt2", vocab=VOCAB)
    most = model.config.n_positions
    prompt = [[5 + i % 40 for i in range(most - 2)]]
    options = {"eos_token_id": [], "pad_token_id": 0}
    SpecGenerator(model).generate(prompt, max_new_tokens=3, **options)
    SpecGenerator(model).generate(prompt, max_new_tokens=2, **KINDS["contrastive"], **options)
    with pytest.raises(OptionError, match="positions"):
        SpecGenerator(model).generate(prompt, max_new_tokens=3, **KINDS["contrastive"], **options)
