"""What comes back: every field with one entry per token, equal to transformers', assisted or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import oracle
from tiny import tiny, tiny_inputs
from transformers import TextStreamer

from specdec import SpecGenerator

FIELDS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
COMMON = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("draft", [None, "perfect", "half"])
def test_fields_equal_transformers(name: str, draft: str | None) -> None:
    """Scores, logits, hidden states and attentions, per token, for every layer."""
    model = tiny(name)
    model.set_attn_implementation("eager")
    inputs = tiny_inputs(name) if name in ("t5", "bart") else {"input_ids": torch.tensor([[5, 9, 12, 7, 9, 12]])}
    with torch.no_grad():
        expected = model.generate(**inputs, **COMMON, **FIELDS, eos_token_id=None, repetition_penalty=1.2)
    guess = None if draft is None else oracle(draft, expected.sequences.tolist(), 64)
    out = SpecGenerator(model, guess).generate(**inputs, **COMMON, **FIELDS, eos_token_id=[], repetition_penalty=1.2)
    assert out[0].tolist() == out.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(out[name]) == len(expected[name]) == 12
        assert all(close(a, b) for a, b in zip(out[name], expected[name], strict=True))
    layered = ("attentions", "hidden_states", "decoder_attentions", "decoder_hidden_states", "cross_attentions")
    for name in layered:
        if expected.get(name) is None:
            assert out.get(name) is None
            continue
        for ours, theirs in zip(out[name], expected[name], strict=True):
            assert all(close(a, b) for a, b in zip(ours, theirs, strict=True)), name
    ours = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    theirs = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    assert close(ours, theirs)


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
    """Nothing is kept that nobody wants."""
    out = SpecGenerator(tiny("llama"), "suffix").generate([[5, 9]], **COMMON)
    assert out.scores is None
    assert out.logits is None
    assert out.hidden_states is None
    assert out.attentions is None
    assert out.to_tuple()[0] is out.sequences


def test_statistics_add_up() -> None:
    """Counts follow from each other, and seconds from their parts."""
    model = tiny("llama")
    generator = SpecGenerator(model, tiny("llama", seed=1))
    stats = generator.generate([[5, 9, 12], [7, 7]], **COMMON, eos_token_id=[]).stats
    assert stats.num_new_tokens == 24
    assert stats.num_new_tokens == sum(row.num_new_tokens for row in stats.per_row)
    assert stats.num_accepted_draft_tokens == sum(stats.per_step_accepted)
    assert stats.num_draft_tokens == sum(stats.per_step_drafted)
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_spec_steps
    assert stats.target_passes_per_token == stats.num_target_passes / 24
    assert 0 < stats.draft_seconds + stats.verify_seconds + stats.select_seconds < stats.seconds
    assert stats.settings == {"strategy": "greedy", "schedule": "heuristic"}


class Words:
    """A tokenizer that spells ids."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(f"<{int(i)}>" for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(64)}


def test_stream_events_make_up_the_text() -> None:
    """Events in order give the tokens and the text of generate, and tell which tokens came from the draft."""
    model = tiny("llama")
    expected = SpecGenerator(model, tokenizer=Words()).generate([[5, 9, 12]], **COMMON, eos_token_id=[])
    generator = SpecGenerator(model, oracle("half", expected.sequences.tolist(), 64), tokenizer=Words())
    events = list(generator.stream([[5, 9, 12]], **COMMON, eos_token_id=[]))
    assert [i for e in events for i in e.token_ids] == expected.sequences[0, 3:].tolist()
    assert "".join(e.text for e in events) == expected.texts[0]
    assert any(e.accepted for e in events)
    assert all(e.accepted <= len(e.token_ids) for e in events)


def test_transformers_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    """A transformers streamer gets the prompt, then the new text in pieces."""
    model = tiny("llama")
    out = SpecGenerator(model, "suffix", tokenizer=Words()).generate(
        [[5, 9, 12]], **COMMON, eos_token_id=[], streamer=TextStreamer(Words(), skip_prompt=True)
    )
    assert capsys.readouterr().out.strip() == out.texts[0]
