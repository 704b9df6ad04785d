"""A draft that asks for hidden states hears of every token that became text, however that came about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from specdec import SpecGenerator, UnsupportedError
from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Draft, Proposer, SequenceView, path_limit
from specdec.core.tree import Tree
from specdec.errors import OptionError
from tests.matrix import endless, slow, some
from tests.tiny import tiny, tiny_inputs
from tests.versions import OLD

LAYERS = (2, 0, 1)
IDS = [[5, 9, 12, 5, 9, 33, 21], [7, 8, 7]]
RUN = endless(14)


class Listener(Draft):
    """Guesses so that some tokens are right, and keeps the hidden states that it is told, text by text."""

    def __init__(self, text: Sequence[Sequence[int]] = (), *, width: int = 1) -> None:
        self.text, self.width = text, width
        self.hidden_layers = LAYERS
        self.heard: list[tuple[list[int], Tensor]] = []

    def start(self, vocab_size: int) -> Listening:
        return Listening(self)


class Listening(Proposer):
    def __init__(self, draft: Listener) -> None:
        self.draft = draft
        self.text: dict[int, Tensor] = {}
        self.branches: dict[int, list[Tensor]] = {}

    def propose(self, rows: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        return [self._guess(row, path_limit(row, budget)) for row, budget in zip(rows, budgets, strict=True)]

    def _guess(self, row: SequenceView, limit: int) -> Tree:
        """After every leaf a right chain, and a wrong token beside its first one."""
        tokens: list[int] = []
        parents: list[int] = []
        for i, leaf in enumerate(row.leaves if limit > 0 else ()):
            known = row.tokens + [row.tree.tokens[node] for node in row.tree.path(leaf)]
            after = next((t[len(known) :] for t in self.draft.text if t[: len(known)] == known), [3, 4, 3])
            guess = [*after[: limit - 1], 6][:limit]
            parents += [-1 - i, *range(len(tokens), len(tokens) + len(guess) - 1)]
            tokens += guess
            for other in range(1, self.draft.width):
                tokens.append((guess[0] + other) % 64)
                parents.append(-1 - i)
        return Tree(tokens, parents, [0.5] * len(tokens), source="listener")

    def update(self, commits: Sequence[Commit]) -> None:
        for row, path, text, hidden in commits:
            if hidden is None:
                continue
            known = self.text.get(row.id, hidden.states[:0])
            fresh = [node for node in path if node >= hidden.num_cached]
            unread = len(hidden.states) - len(fresh)
            assert hidden.first <= len(known)
            known = torch.cat([known[: hidden.first], hidden.states[:unread]]) if unread else known
            of = dict(zip(fresh, hidden.states[unread:], strict=True))
            of |= {node: self.branches[row.id][node] for node in path if node < hidden.num_cached}
            kept = [of[node] for node in path]
            self.text[row.id] = torch.cat([known, *(one[None] for one in kept[:text])])
            self.branches[row.id] = kept[text:]
            self._check(row)

    def _check(self, row: SequenceView) -> None:
        """The text is read as far as it goes without its leaves, and all branches that are no leaves are."""
        known, branches = self.text[row.id], self.branches[row.id]
        assert len(known) <= len(row.tokens)
        assert all(node in row.leaves for node in range(len(branches), len(row.tree)))
        texts = [(row.tokens[: len(known)], known)]
        if branches and len(known) == len(row.tokens):
            for node in range(len(branches)):
                path = row.tree.path(node)
                states = torch.cat([known, torch.stack([branches[n] for n in path])])
                texts.append((row.tokens + [row.tree.tokens[n] for n in path], states))
        self.draft.heard += texts

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.text.pop(seq_id, None)
            self.branches.pop(seq_id, None)


def check(model: Any, draft: Listener, **inputs: Tensor) -> None:
    """What was heard is what the model says of the whole texts."""
    assert draft.heard
    longest = {}
    for tokens, states in draft.heard:
        assert states.shape == (len(tokens), len(LAYERS), 32)
        longest[tuple(tokens)] = states
    heard = list(longest.items())
    for tokens, states in [*heard[:4], *heard[-8:]]:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            given = {"decoder_input_ids": ids, **inputs} if inputs else {"input_ids": ids}
            out = model(**given, output_hidden_states=True, use_cache=False)
        layers = out.get("hidden_states") or out["decoder_hidden_states"]
        expected = torch.stack([layers[layer][0] for layer in LAYERS], dim=1)
        torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-4)


WAYS = {
    **some("greedy", "coupled", "copies", "beams", "groups", "guided"),
    "chunks": {"prefill_chunk_size": 2},
    # The text is read before the negative prompt is: passes over that one alone tell the draft nothing.
    "guided in chunks": {"guidance_scale": 2.0, "prefill_chunk_size": 4, "negative_prompt_ids": [[7] * 20, [8] * 18]},
}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_all_text_is_heard_of(way: str, width: int) -> None:
    """Strategies, trees, ragged batches and chunked prompts: the same texts as without a draft, and true states."""
    model, given = tiny("llama"), {**RUN, **WAYS[way]}
    plain = SpecGenerator(model).generate(IDS, **given)
    draft = Listener(plain.sequences.tolist(), width=width)
    schedule = "heuristic" if width > 1 else "constant"
    out = SpecGenerator(model, draft).generate(IDS, **given, schedule=schedule)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.num_accepted_draft_tokens < out.stats.num_draft_tokens
    assert out.stats.num_accepted_draft_tokens > 0 or "num_beams" in given  # searches need every leaf guessed
    check(model, draft)


@pytest.mark.parametrize(
    ("name", "beams"),
    [
        *((name, beams) for name in ("gemma2", "gpt2", "mamba") for beams in (1, 2)),
        *(slow(name, beams) for name in ("qwen3_next", "bloom", "falcon_alibi") for beams in (1, 2)),
        *((name, 1) for name in ("t5", "bart", "whisper")),
    ],
)
def test_models_of_all_kinds(name: str, beams: int) -> None:
    """Also those whose rows run one after another, and are restored and read again; of an encoder-decoder the decoder's
    states.
    """
    model, given = tiny(name), {**RUN, "num_beams": beams, "max_new_tokens": 8}
    inputs = tiny_inputs(name) if model.config.is_encoder_decoder else {}
    prompt = inputs or {"prompt": IDS}
    plain = SpecGenerator(model).generate(**prompt, **given)
    draft = Listener(plain.sequences.tolist(), width=2)
    assert SpecGenerator(model, draft).generate(**prompt, **given).sequences.tolist() == plain.sequences.tolist()
    check(model, draft, **inputs)


def test_a_draft_that_shares_nothing() -> None:
    """Copies of a prompt and later calls read all of it, so that the draft hears of all of it."""
    model, prompt = tiny("llama"), [list(range(5, 45))]
    draft = Listener()
    generator = SpecGenerator(model, draft, prefix_cache=True)
    generator.generate(prompt, **RUN, num_return_sequences=3, do_sample=True, seed=1)
    out = generator.generate(prompt, **RUN)
    assert out.stats.cached_prompt_tokens == 0
    assert out.sequences.tolist() == SpecGenerator(model).generate(prompt, **RUN).sequences.tolist()
    check(model, draft)


def test_states_that_somebody_else_wants_too() -> None:
    """The caller's hidden states are all there, as without a draft."""
    model, given = tiny("llama"), {**RUN, "output_hidden_states": True, "return_dict_in_generate": True}
    plain = SpecGenerator(model).generate(IDS, **given)
    draft = Listener(plain.sequences.tolist())
    out = SpecGenerator(model, draft).generate(IDS, **given)
    for mine, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)
    check(model, draft)
    quiet = SpecGenerator(model, draft).generate(IDS, **RUN)
    assert quiet.hidden_states is None


@pytest.mark.skipif(OLD, reason="transformers keeps them all")
def test_only_what_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass keeps the layers of its drafts, and nothing where no draft asks."""
    from specdec.models.backends import padded

    monkeypatch.setattr(padded, "_extras", extras := Mock(wraps=padded._extras))
    draft = Listener()
    draft.hidden_layers = (1,)
    SpecGenerator(tiny("llama"), draft).generate(IDS, **RUN)
    states = [call.args[0].get("hidden_states") for call in extras.call_args_list]
    assert states
    assert all([layer is not None for layer in layers] == [False, True, False] for layers in states)


@pytest.mark.parametrize("layers", [[0, 3], 2, "2"])
def test_layers_that_there_are_not(layers: Any) -> None:
    """The error comes before any pass, and names what there is. (A number was a TypeError.)"""
    draft = Listener()
    draft.hidden_layers = layers
    words = f"`hidden_layers` must be a list of layers from 0 to 2 of the target, got {layers!r}"
    with pytest.raises(OptionError, match=re.escape(words)):
        SpecGenerator(tiny("llama"), draft).generate(IDS, **RUN)


def test_models_without_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that returns none is told of before any pass."""
    from specdec.models import language_model

    monkeypatch.setattr(language_model, "gives_hidden_states", lambda decoder: False)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM returns no hidden states"):
        SpecGenerator(tiny("llama"), Listener()).generate(IDS, **RUN)
