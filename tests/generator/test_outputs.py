"""What comes back: every field with one entry per token, equal to transformers', assisted or not."""

import time
from copy import copy
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from specdec import LanguageModel, SpecGenerator, UnsupportedError
from specdec.generator.tokenizers import Detokenizer
from tests.engine.test_requests_stateful import leaves
from tests.folders import WIDTH, byte_tokenizer
from tests.oracle import KINDS, oracle
from tests.tiny import never, tiny, tiny_inputs

KEPT = ("scores", "logits", "hidden_states", "attentions")
FIELDS = {"return_dict_in_generate": True, **{f"output_{kind}": True for kind in KEPT}}
LAYERED = ("attentions", "hidden_states", "decoder_attentions", "decoder_hidden_states", "cross_attentions")
COMMON = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
SOME = (None, "model", "suffix")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=2e-4)


def same_fields(found: Any, expected: Any, *names: str) -> None:
    """Fails unless these fields are in both results or in none, with the same tensors."""
    for name in names:
        assert (name in found) == (name in expected), name
        for ours, theirs in zip(leaves(found.get(name)), leaves(expected.get(name)), strict=True):
            assert close(ours, theirs), name


def compared(model: Any, draft: Any, own: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    """Our result, with options of its `own`, and transformers', which has the same text and fields.

    The draft may be a kind of oracle.
    """
    given = {**COMMON, **FIELDS, **given}
    with torch.no_grad():
        expected = model.generate(**given, eos_token_id=None)
    draft = oracle(draft, expected.sequences.tolist(), 64) if draft in KINDS else draft
    out = SpecGenerator(model, draft).generate(**given, **own, eos_token_id=[])
    assert out.sequences.tolist() == expected.sequences.tolist()
    same_fields(out, expected, "scores", "logits", *LAYERED)
    return out, expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "draft", "chunk"),
    [
        *((name, draft, None) for name in ("llama", "gpt2", "t5", "bart") for draft in (None, "perfect", "half")),
        *((name, draft, None) for name in ("qwen3_next", "lfm2", "gpt_neo") for draft in (None, "suffix")),
        *(("jamba", None, None), ("llama", "suffix", 3), ("mamba", "suffix", 3), ("t5", "suffix", 3)),
    ],
)
def test_fields_equal_transformers(name: str, draft: str | None, chunk: int | None) -> None:
    """Scores, logits, hidden states and attentions, per token, of every layer, the attentions of those that attend.

    They are whole where a prompt is longer than a chunk. (Only its last chunk's were kept.)
    """
    attends = {} if name == "mamba" else {"attn_implementation": "eager"}
    model, ids = tiny(name, **attends), torch.tensor([[5, 9, 12, 7, 9, 12, 30, 8]])
    inputs = tiny_inputs(name) if name in ("t5", "bart") else {"input_ids": ids}
    if name == "t5" and chunk:
        inputs["decoder_input_ids"] = torch.cat([torch.tensor([[1]]), ids[:, 1:]], dim=1)
    own = {"prefill_chunk_size": chunk} if chunk else {}
    both = compared(model, draft, own, **inputs, repetition_penalty=1.2, output_attentions=bool(attends))
    assert len(both[0].scores) == len(both[0].logits) == 12
    assert close(*(model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in both))


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("copies", [1, 2])
def test_encoder_fields_equal_transformers(name: str, copies: int) -> None:
    """What the encoder kept comes along, one entry per prompt. (The fields existed and were never filled.)"""
    model = tiny(name, attn_implementation="eager")
    inputs, options = tiny_inputs(name, rows=2), {**FIELDS, "max_new_tokens": 3, "pad_token_id": 0}
    sampled = {"do_sample": True, "num_return_sequences": 2} if copies == 2 else {"do_sample": False}
    with torch.no_grad():
        expected = GenerationMixin.generate(model, **inputs, **options, **sampled)
    out = SpecGenerator(model, "suffix").generate(**inputs, **options, **sampled)
    same_fields(out, expected, "encoder_hidden_states", "encoder_attentions")
    assert len(out.encoder_hidden_states) > len(out.encoder_attentions) > 0
    plain = SpecGenerator(model).generate(**inputs, max_new_tokens=3)
    assert plain.encoder_hidden_states is None
    assert plain.encoder_attentions is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "attention", "reason", "draft"),
    [
        *((name, "sdpa", "eager", draft) for name in ("llama", "t5", "qwen3_next", "lfm2") for draft in SOME),
        *((name, None, "no attention", draft) for name in ("mamba", "mamba2", "rwkv") for draft in SOME),
        ("jamba", "eager", "one by one", "suffix"),
    ],
)
def test_attentions_that_cannot_be_had(name: str, attention: str | None, reason: str, draft: str | None) -> None:
    """Refused before any pass. (Some came after the draft's passes, some were left out, some ended in IndexError.)"""
    model = tiny(name, **({} if attention is None else {"attn_implementation": attention}))
    assistant = tiny(name, seed=1) if draft == "model" else draft
    generator = SpecGenerator(model, assistant)
    for part in (model, assistant):
        if isinstance(part, torch.nn.Module):
            part.register_forward_pre_hook(never)
    for hidden in (False, True):
        with pytest.raises(UnsupportedError, match=reason):
            generator.generate([[5, 9, 12]], **COMMON, output_attentions=True, output_hidden_states=hidden)


def test_attentions_of_trees_that_a_model_cannot_read() -> None:
    """The error of a beam search came after passes where a draft's trees branch."""
    model = tiny("gpt_neo", attn_implementation="eager")
    generator = SpecGenerator(model, tiny("gpt_neo", seed=1))
    model.register_forward_pre_hook(never)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        generator.generate([[5, 9, 12]], **COMMON, output_attentions=True, num_assistant_branches=2)


def test_attentions_of_a_model_whose_parts_differ() -> None:
    """transformers 5.17 sets the implementation of the whole model alone: its decoder has no attentions to show."""
    model = tiny("t5", attn_implementation="eager")
    model.decoder.config = copy(model.decoder.config)
    model.decoder.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedError, match="eager"):
        SpecGenerator(model).generate([[5, 9, 12]], **COMMON, output_attentions=True)


def test_fields_of_a_ragged_batch() -> None:
    """Rows that end early are certain of their padding from then on."""
    model = tiny("llama")
    text = SpecGenerator(model).generate([[5, 9, 12]], **COMMON, eos_token_id=[]).sequences[0].tolist()
    out = SpecGenerator(model, "suffix").generate(
        [[5, 9, 12], [7, 7]], **{**COMMON, **FIELDS, "output_attentions": False}, eos_token_id=text[6]
    )
    assert all(s.shape == (2, 64) for s in out.scores)
    last = out.stats.per_row[0].num_new_tokens
    assert last < len(out.scores)
    assert out.scores[last][0].argmax() == 0
    assert torch.isfinite(model.compute_transition_scores(out.sequences, out.scores)).all()


def test_fields_are_absent_unless_asked_for() -> None:
    out = SpecGenerator(tiny("llama"), "suffix").generate([[5, 9]], **COMMON)
    assert [getattr(out, kind) for kind in KEPT] == [None] * 4
    assert out.to_tuple()[0] is out.sequences


def test_statistics_add_up() -> None:
    model = tiny("llama")
    generator = SpecGenerator(model, tiny("llama", seed=1))
    stats = generator.generate([[5, 9, 12], [7, 7]], **COMMON, eos_token_id=[]).stats
    assert stats.num_new_tokens == 24
    assert stats.num_new_tokens == sum(row.num_new_tokens for row in stats.per_row)
    assert stats.num_accepted_draft_tokens == sum(stats.per_round_accepted)
    assert stats.num_draft_tokens == sum(stats.per_round_drafted)
    assert sum(stats.acceptance_histogram) == stats.num_draft_rounds
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_draft_rounds
    assert stats.target_passes_per_token == stats.num_target_passes / 24
    assert 0 < stats.draft_seconds + stats.verify_seconds + stats.select_seconds < stats.seconds
    parts = {"backend": "eager", "weight_kind": "float32", "draft_backend": "eager", "draft_weight_kind": "float32"}
    assert stats.settings == {"strategy": "greedy", "schedule": "heuristic", "draft_kind": "model", **parts}
    assert 0 < stats.first_token_seconds < stats.seconds - stats.seconds / 12  # not the time of the whole call
    assert stats.loading_seconds == 0  # the models are the caller's


def test_accepted_tokens_by_source() -> None:
    """Of a hybrid, copies and guesses of the model were one number."""
    model = tiny("llama")
    generator = SpecGenerator(model, ("suffix", tiny("llama")), schedule="constant", num_assistant_tokens=3)
    stats = generator.generate([[5, 9, 12, 5, 9, 12, 5, 9], [7, 7]], **{**COMMON, "max_new_tokens": 40}).stats
    counts = stats.accepted_by_source
    assert len(counts) > 1
    assert counts.keys() <= {"suffix", "model", "model+suffix"}
    assert sum(counts.values()) == stats.num_accepted_draft_tokens
    for row in stats.per_row:
        assert sum(row.accepted_by_source.values()) == row.num_accepted_draft_tokens
    assert "drafted, " + ", ".join(f"{name} {count}" for name, count in counts.items()) in str(stats)


def test_times_of_a_stream() -> None:
    """From its start to the first token; a model that is target and draft loaded once. (It counted twice.)"""
    model = LanguageModel(tiny("llama"))
    model.loading_seconds = 2.0
    stream = SpecGenerator(model, model).stream([[5, 9, 12]], **COMMON, eos_token_id=[])
    time.sleep(0.2)
    began, times = time.perf_counter(), []
    try:
        while True:
            next(stream)
            times.append(time.perf_counter() - began)
    except StopIteration as end:
        stats = end.value.stats
    assert 0 < stats.first_token_seconds <= times[0]
    assert times[-1] - 0.2 < stats.seconds <= time.perf_counter() - began
    assert stats.loading_seconds == 2.0


def test_stream_events_make_up_the_text() -> None:
    """Events in order give the tokens and the text of generate, and tell which tokens came from the draft."""
    model, tokenizer = tiny("llama", vocab=WIDTH), byte_tokenizer()
    expected = SpecGenerator(model, tokenizer=tokenizer).generate([[5, 9, 12]], **COMMON, eos_token_id=[])
    generator = SpecGenerator(model, oracle("half", expected.sequences.tolist(), WIDTH), tokenizer=tokenizer)
    events = list(generator.stream([[5, 9, 12]], **COMMON, eos_token_id=[]))
    assert [i for e in events for i in e.token_ids] == expected.sequences[0, 3:].tolist()
    assert "".join(e.text for e in events) == expected.texts[0]
    assert any(e.accepted for e in events)
    assert all(e.accepted <= len(e.token_ids) for e in events)
    assert [e.finish for e in events] == [None] * (len(events) - 1) + ["length"]
    beams = generator.stream([[5, 9, 12]], **COMMON, eos_token_id=[], num_beams=2)
    assert [e.finish for e in beams] == ["length"]


def test_text_waits_only_where_a_stop_string_may_have_begun() -> None:
    """As many characters as the longest stop string has waited."""
    tokenizer = byte_tokenizer()
    text = Detokenizer(tokenizer, ["stop", "a longer one"])
    pieces = [text.push(tokenizer.encode(letter)) for letter in "x st stop!"]
    assert pieces == ["x", " ", "", "", "st ", "", "", "", "", ""]


def test_a_stream_leaves_gradients_alone() -> None:
    """Between the events of a stream the caller's own computations keep their gradients."""
    for _ in SpecGenerator(tiny("llama"), "suffix").stream([[5, 9, 12]], **COMMON):
        assert torch.is_grad_enabled()
    out = SpecGenerator(tiny("llama")).generate([[5, 9, 12]], **COMMON, output_logits=True)
    assert not out.logits[0].requires_grad
