"""Heads that guess a whole block in one pass: DFlash."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, GenerationMixin
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specdec import SpecGenerator
from specdec.errors import LoadError, OptionError
from specdec.models.hf.tiny_models import shake
from tests.heads import (
    IDS,
    RUN,
    SIZES,
    THREE,
    DFlash,
    Proposals,
    candidates_of,
    changed,
    check_blocks,
    dflash_folder,
    reweighed,
    target,
)
from tests.tiny import tiny

CONSTANT = {"schedule": "constant", "num_assistant_tokens": 3}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "anchor": {"sample_from_anchor": True},
    "windows": WINDOWS,
    "both": {**WINDOWS, "sliding_window_non_causal": True},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_guesses_are_what_the_formulas_say(kind: str, tmp_path: Path, proposals: Proposals) -> None:
    """In ragged batches, over chunked prompts, after rejections: all as if computed anew from the text."""
    model = target()
    folder = dflash_folder(tmp_path / "head", model, **BLOCKS[kind])
    out = SpecGenerator(model, folder).generate(IDS, **RUN, **CONSTANT, prefill_chunk_size=3)
    assert out.sequences.tolist() == SpecGenerator(model).generate(IDS, **RUN).sequences.tolist()
    check_blocks(proposals, model, DFlash(folder, model))


def assistant(**given: Any) -> Any:
    """A tiny assistant as transformers has them."""
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = AutoConfig.for_model(
        "muse_glimmer_assistant", **sizes, block_size=5, mask_token_id=63, target_layer_ids=[0, 2],
        **{"layer_types": ["full_attention", "full_attention"], **given},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(config).eval()
        shake(model)
    return model


@pytest.mark.parametrize("given", [{}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}])
def test_guesses_are_those_of_transformers(
    given: dict[str, Any], proposals: Proposals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Text by text, of the same assistant, also where it comes from a folder."""
    model, draft = target(), assistant(**given)
    theirs = candidates_of(DFlashTokenCandidateGenerator, monkeypatch)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = GenerationMixin.generate(
        model, torch.tensor(IDS[:1]), assistant_model=draft, speculation_type="dflash", **options
    )
    draft.save_pretrained(tmp_path / "draft")
    for one in (draft, str(tmp_path / "draft")):
        proposals.clear()
        out = SpecGenerator(model, one).generate(
            IDS[:1], **{**RUN, "max_new_tokens": 12}, schedule="constant", num_assistant_tokens=4
        )
        assert out.sequences.tolist() == expected.tolist()
        common = [(text, tree) for text, tree in proposals if tuple(text) in theirs]
        assert len(common) >= 6
        for text, tree in common:
            assert tree.tokens == theirs[tuple(text)][: len(tree)]


@pytest.mark.parametrize(
    ("fields", "weights", "match"),
    [
        ({"mask_token_id": None}, {}, "`mask_token_id` must be a whole number from 0 to 63, got None"),
        ({"mask_token_id": 64}, {}, "`mask_token_id` must be a whole number from 0 to 63, got 64"),
        ({"block_size": 1}, {}, "`block_size` must be a whole number of at least 2, got 1"),
        ({"draft_vocab_size": 20}, {}, "it guesses 20 of 64 tokens, but has no `d2t`"),
        ({}, {"hidden_norm__weight": None}, "1 weights are missing, hidden_norm.weight…"),
    ],
)
def test_broken_blocks(fields: dict[str, Any], weights: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Mask tokens, blocks and weights that cannot be. (Masks beyond the embeddings ended a pass in an IndexError.)"""
    model = target()
    folder = dflash_folder(tmp_path / "head", model)
    with pytest.raises(LoadError, match=match):
        SpecGenerator(model, reweighed(changed(folder, **fields), **weights))


def test_blocks_of_other_targets(tmp_path: Path) -> None:
    model = target()
    with pytest.raises(OptionError, match="its hidden states are 48 wide, the target's 32"):
        SpecGenerator(model, changed(dflash_folder(tmp_path / "a", model), target_hidden_size=48))
    with pytest.raises(OptionError, match="its vocabulary are 64 wide, the target's 70"):
        SpecGenerator(tiny("llama", vocab=70, **THREE), dflash_folder(tmp_path / "b", model))
    with pytest.raises(OptionError, match=r"it reads \[1, 9\]"):
        SpecGenerator(model, changed(dflash_folder(tmp_path / "c", model), aux_hidden_state_layer_ids=[1, 9]))
    draft = assistant()
    draft.config.target_layer_ids = [0, 7]
    with pytest.raises(OptionError, match=r"it reads \[1, 8\]"):
        SpecGenerator(model, draft)
