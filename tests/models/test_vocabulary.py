"""A draft whose checkpoint names the tokens that it guesses: it guesses no others, and the text stays the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec import SpecGenerator, UnsupportedError
from specdec.models import load
from specdec.models.vocabulary import CutHead, cut_as_saved
from specdec.proposers.model import ModelProposer
from tests.folders import saved
from tests.matrix import endless
from tests.tiny import tiny_inputs

RUN = endless(16)
IDS = [[5, 9, 12, 5], [7, 8]]
KNOWN = [2, 5, 7, 8, 9, 12, 20, 33]


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """All tokens that a draft model guesses."""
    seen: set[int] = set()
    propose = ModelProposer.propose

    def spied(self: ModelProposer, rows: Any, plans: Any) -> Any:
        trees = propose(self, rows, plans)
        seen.update(token for tree in trees for token in tree.tokens)
        return trees

    monkeypatch.setattr(ModelProposer, "propose", spied)
    return seen


WAYS: list[dict[str, Any]] = [
    {},
    {"num_assistant_branches": 3},
    {"do_sample": True, "seed": 2},
    {"num_beams": 2},
    {"do_sample": True, "seed": 2, "sampling": "rejection", "num_assistant_branches": 3},
]


@pytest.mark.parametrize("given", WAYS, ids=lambda given: "-".join(given) or "greedy")
def test_it_guesses_these_tokens(given: dict[str, Any], tmp_path: Path, guessed: set[int]) -> None:
    """Whichever way of decoding asks for them."""
    target, draft = saved("llama", tmp_path / "t"), saved("llama", tmp_path / "d", seed=1, draft_vocabulary=KNOWN)
    out = SpecGenerator.from_pretrained(target, draft).generate(IDS, **RUN, **given)
    assert guessed
    assert guessed <= set(KNOWN)
    if "sampling" not in given:
        plain = {name: value for name, value in given.items() if name != "num_assistant_branches"}
        expected = SpecGenerator.from_pretrained(target).generate(IDS, **RUN, **plain)
        assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_checkpoint_with_a_vocabulary(tmp_path: Path, guessed: set[int]) -> None:
    """Its config lists the tokens that it guesses; `vocabulary` cannot name others."""
    target, draft = saved("llama", tmp_path / "t"), saved("llama", tmp_path / "d", seed=1, draft_vocabulary=[2, 5, 9])
    out = SpecGenerator.from_pretrained(target, draft).generate(IDS, **RUN)
    assert guessed
    assert guessed <= {2, 5, 9}
    assert out.sequences.tolist() == SpecGenerator.from_pretrained(target).generate(IDS, **RUN).sequences.tolist()
    with pytest.raises(OptionError, match="comes with its own vocabulary"):
        SpecGenerator.from_pretrained(target, draft, draft_options={"vocabulary": 9})


@pytest.mark.usefixtures("built")
def test_packed_layers(tmp_path: Path, guessed: set[int]) -> None:
    """Passes in a line have the smaller head too. (They ran over the whole one.)"""
    target, draft = saved("llama", tmp_path / "t"), saved("llama", tmp_path / "d", draft_vocabulary=KNOWN)
    generator = SpecGenerator.from_pretrained(target, draft, draft_options={"backend": "packed"})
    generator.generate(IDS, **RUN)
    assert guessed
    assert guessed <= set(KNOWN)
    [model] = generator.draft.models  # type: ignore[union-attr]
    assert any(isinstance(module, CutHead) for module in model.ragged.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "whisper"])
def test_heads_of_all_kinds(name: str, tmp_path: Path) -> None:
    """Tied ones, with a bias added afterwards, scaled ones: what is left of them says what it said."""
    folder = saved(name, tmp_path / name, draft_vocabulary=[*range(20)])
    whole, cut = load(folder), load(folder)
    cut_as_saved(cut)
    inputs = {"input_ids": torch.tensor(IDS[:1])} if name == "gpt2" else tiny_inputs(name)
    if name != "gpt2":
        inputs["decoder_input_ids"] = torch.tensor(IDS[:1])
    with torch.no_grad():
        expected, logits = whole.model(**inputs).logits, cut.model(**inputs).logits
    torch.testing.assert_close(logits[..., :20], expected[..., :20])
    assert logits[..., 20:].max() == float("-inf")


def test_an_unknown_kind_of_head() -> None:
    """Rows of its output cannot be taken out."""
    with pytest.raises(UnsupportedError, match="a language head of kind Bilinear"):
        CutHead(nn.Bilinear(2, 2, 2), torch.tensor([0]), 4)
