"""Published forms of heads: each is told by its files, and guesses what its formulas or its own package say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import SpecGenerator
from specdec.errors import LoadError, UnsupportedError
from specdec.proposers.heads import head_kind
from tests.heads import (
    IDS,
    RUN,
    THREE,
    DFlash,
    Eagle,
    Proposals,
    changed,
    check_blocks,
    dflash_folder,
    eagle_folder,
    native,
    reweighed,
    states_of,
    target,
    z_lab,
)
from tests.proposers.heads.test_heads import SURE, check
from tests.tiny import tiny

OUTPUTS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def pickled(folder: Path) -> Path:
    """The checkpoint with its weights in PyTorch's own format."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def renamed(folder: Path, old: str, new: str) -> Path:
    """The checkpoint with other names of weights."""
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new): tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def drafts(model: Any, draft: Any) -> None:
    """The text is the target's, and the draft guesses."""
    out = SpecGenerator(model, draft).generate(IDS, **RUN, **SURE)
    assert out.sequences.tolist() == SpecGenerator(model).generate(IDS, **RUN).sequences.tolist()
    assert out.stats.num_draft_tokens > 0


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small vocabulary": {"draft_vocab_size": 20},
    "norms": {"norm_before_fc": True, "norm_before_residual": True},
    "turned": {"rope_theta": 500.0},
    "turned as newer": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "other name": {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": None},
    "no name": {"architectures": ["LlamaForCausalLM"]},
}


@pytest.mark.parametrize("way", WAYS)
def test_native_eagle(way: str, tmp_path: Path, proposals: Proposals) -> None:
    """EAGLE-3 in its own form. (It was loaded as a model, and refused as one with broken files.)"""
    fields = WAYS[way]
    kept = {name: fields[name] for name in fields if "norm" in name or fields[name] == 20}
    made, model = eagle_folder(tmp_path / "made", **OUTPUTS, **kept), target()
    reference = Eagle(made, theta=500.0 if "turned" in way else 10000.0)
    reference.weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data
    folder = native(tmp_path / "head", made, **fields)
    drafts(model, pickled(folder) if way == "plain" else folder)
    check(proposals, model, reference)


def test_native_eagle_without_layers_of_its_own_choice(tmp_path: Path, proposals: Proposals) -> None:
    """It reads a low, a middle and a high layer; `layers.0` and `model.` are other names of the same weights."""
    made, model = eagle_folder(tmp_path / "made", eagle_aux_hidden_state_layer_ids=[2, 1, 0]), target()
    folder = renamed(native(tmp_path / "head", made, eagle_config=None), "midlayer.", "model.layers.0.")
    reference = Eagle(made)
    reference.weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data
    drafts(model, folder)
    check(proposals, model, reference)


@pytest.mark.parametrize("windows", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}])
def test_blocks_of_z_lab(windows: dict[str, Any], tmp_path: Path, proposals: Proposals) -> None:
    """DFlash in its own form. (It was loaded as a model, and refused as one with broken files.)"""
    model = target()
    made = dflash_folder(tmp_path / "made", model, aux_hidden_state_layer_ids=[1, 2, 3], **windows)
    drafts(model, z_lab(tmp_path / "head", made))
    check_blocks(proposals, model, DFlash(made, model, anchored=False), [1, 2, 3])


def test_blocks_with_scales(tmp_path: Path, proposals: Proposals) -> None:
    """Scaled embeddings, scaled and bounded logits, and numbers in `dflash_config` alone."""
    model = target()
    made = dflash_folder(tmp_path / "made", model, aux_hidden_state_layer_ids=[1, 2, 3])
    scales = {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    more = {"mask_token_id": 63, "target_layer_ids": [0, 1, 2], "block_size": 5}
    drafts(model, changed(z_lab(tmp_path / "head", made, block_size=16), dflash_config={**more, **scales}))
    scaled = target()
    scaled.model.embed_tokens.weight.data *= 4
    check_blocks(proposals, model, DFlash(made, scaled), [1, 2, 3])


def test_kinds_and_what_is_none(tmp_path: Path) -> None:
    """The kind is in the files; what nobody can draft with is named."""
    model = target()
    made, blocks = eagle_folder(tmp_path / "a"), dflash_folder(tmp_path / "b", model)
    own, lab = native(tmp_path / "c", made), z_lab(tmp_path / "d", blocks)
    assert [head_kind(folder) for folder in (made, own, blocks, lab)] == ["eagle3", "eagle3", "dflash", "dflash"]
    model.save_pretrained(tmp_path / "model")
    assert head_kind(tmp_path / "model") is None
    assert head_kind(changed(tmp_path / "model", architectures=3)) is None
    assert head_kind(model) is None
    for kind, fields in (
        ("peagle", {"speculators_model_type": "peagle"}),
        ("eagle", {"speculators_model_type": None, "architectures": ["LlamaForCausalLMEagle"]}),
        ("dflash2", {"architectures": ["DFlash2DraftModel"]}),
    ):
        with pytest.raises(UnsupportedError, match=f"is a head of kind '{kind}'; known are eagle3, dflash, gemma4"):
            SpecGenerator(model, changed(made, **fields))
    with pytest.raises(UnsupportedError, match=r"unknown weights candidate_selector\.hidden_projection\.weight"):
        SpecGenerator(model, reweighed(lab, candidate_selector__hidden_projection__weight=torch.ones(4, 32)))
    (tmp_path / "c" / "model.safetensors").unlink()
    (tmp_path / "c" / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(LoadError, match="its files are broken or incomplete"):
        SpecGenerator(model, own)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("embeddings", [False, True])
def test_what_speculators_converts(embeddings: bool, tmp_path: Path, proposals: Proposals) -> None:
    """EAGLE-3 and DFlash as the package's converter writes them."""
    convert = pytest.importorskip("speculators.convert.entrypoints").convert_model
    model = target()
    model.save_pretrained(tmp_path / "target")
    made = eagle_folder(tmp_path / "made", draft_vocab_size=40)
    own = native(tmp_path / "own", made, eagle_config=None, target_hidden_size=32)
    weights = load_file(made / "model.safetensors")
    if embeddings:
        reweighed(own, embed_tokens__weight=weights["embed_tokens.weight"])
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    convert(str(own), str(tmp_path / "target"), "eagle3", str(tmp_path / "eagle"), **layers)
    reference = Eagle(made)
    if not embeddings:
        reference.weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data
    drafts(model, tmp_path / "eagle")
    check(proposals, model, reference)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blocks_that_speculators_converts(tmp_path: Path, proposals: Proposals) -> None:
    convert = pytest.importorskip("speculators.convert.entrypoints").convert_model
    model = target()
    model.save_pretrained(tmp_path / "target")
    made = dflash_folder(tmp_path / "made", model, aux_hidden_state_layer_ids=[1, 2])
    convert(str(z_lab(tmp_path / "own", made)), str(tmp_path / "target"), "dflash", str(tmp_path / "head"))
    drafts(model, tmp_path / "head")
    check_blocks(proposals, model, DFlash(made, model), [1, 2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("windows", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}])
def test_what_dflash_writes(windows: dict[str, Any], tmp_path: Path, proposals: Proposals) -> None:
    """A checkpoint that z-lab's package wrote guesses what the package's own model says."""
    package = pytest.importorskip("dflash.model")
    model = tiny("llama", **THREE)
    made = dflash_folder(tmp_path / "made", model, aux_hidden_state_layer_ids=[1, 2, 3], **windows)
    theirs = package.DFlashDraftModel.from_pretrained(z_lab(tmp_path / "own", made)).eval()
    theirs.save_pretrained(tmp_path / "head")
    drafts(model, tmp_path / "head")
    assert len(proposals) >= 20
    embed, mask = model.get_input_embeddings(), theirs.mask_token_id
    for text, tree in proposals:
        states = states_of(model, text[:-1], [1, 2, 3]).flatten(1)[None]
        noise = embed(torch.tensor([[text[-1], *[mask] * (theirs.block_size - 1)]]))
        positions = torch.arange(len(text) - 1 + noise.shape[1])[None]
        with torch.no_grad():
            hidden = theirs(positions, noise_embedding=noise, target_hidden=states)
            guesses = theirs.compute_logits(hidden[:, 1:], model.lm_head).argmax(-1)[0].tolist()
        assert tree.tokens == guesses[: len(tree)]
