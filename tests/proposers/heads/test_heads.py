"""EAGLE-3 heads: the text stays the target's, and guesses are what the formulas say of the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import SpecGenerator
from specdec.errors import LoadError, OptionError, UnsupportedError
from specdec.models import LanguageModel
from specdec.models.backends.packed_layers import PackedEmbedding
from specdec.options.load import Loading
from specdec.proposers.growth import Feed
from specdec.proposers.heads import load_head
from specdec.proposers.heads.proposer import HeadProposer
from tests.heads import IDS, RUN, THREE, Eagle, Proposals, changed, eagle_folder, reweighed, states_of, target
from tests.matrix import slow
from tests.tiny import tiny

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwen3": {"kind": "qwen3", "norm_before_residual": True},
    "fc": {"norm_before_fc": True, "draft_vocab_size": 20},
    "each": {"fc_norm": True, "norm_output": True},
    "two": {"num_hidden_layers": 2, "draft_vocab_size": 40, "norm_before_residual": True},
    "windows": {
        "kind": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
}


SURE = {"schedule": "confidence", "num_assistant_tokens": 4, "assistant_confidence_threshold": 1e-9}


def check(proposals: Proposals, model: Any, reference: Eagle) -> None:
    """Many proposals, whose guesses and confidence are what the formulas say."""
    assert len(proposals) >= 20
    layers = reference.config["eagle_aux_hidden_state_layer_ids"]
    for text, tree in proposals:
        guesses, logits = reference.chain(text, states_of(model, text[:-1], layers), len(tree))
        assert tree.tokens == guesses
        chances = [float(one.softmax(-1)[token]) for one, token in zip(logits, guesses, strict=True)]
        assert tree.confidence == pytest.approx(chances, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_what_the_formulas_say(kind: str, tmp_path: Path, proposals: Proposals) -> None:
    """In ragged batches, over chunked prompts, after rejections: all as if computed anew from the text."""
    folder = eagle_folder(tmp_path / "head", **KINDS[kind])
    model, reference = target(), Eagle(folder)
    plain = SpecGenerator(model).generate(IDS, **RUN)
    out = SpecGenerator(model, folder).generate(IDS, **RUN, **SURE, prefill_chunk_size=3)
    assert out.sequences.tolist() == plain.sequences.tolist()
    check(proposals, model, reference)


def test_a_recorded_head_makes_all_guesses_in_one_call(tmp_path: Path, proposals: Proposals, chains: list[int]) -> None:
    """What the formulas say, in one row and in several."""
    folder = eagle_folder(tmp_path / "head", **KINDS["windows"], **KINDS["fc"])
    model, reference = tiny("llama", **THREE, tie_word_embeddings=True), Eagle(folder)
    reference.weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
    language = LanguageModel(model, backend="packed")
    assert isinstance(language.input_embeddings, PackedEmbedding)
    head = load_head(reweighed(folder, embed_tokens__weight=None), language, Loading(backend="packed"))
    generator, plain = SpecGenerator(language, head), SpecGenerator(language)
    for ids in (IDS, IDS[:1]):
        out = generator.generate(ids, **RUN, **SURE, prefill_chunk_size=3)
        assert out.sequences.tolist() == plain.generate(ids, **RUN).sequences.tolist()
    assert {1, 3} <= {*chains}
    check(proposals, model, reference)


@pytest.mark.parametrize("kind", ["plain", "two"])
def test_branches_are_read_with_the_target_s_states(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a head says after every leaf of a beam search is what it says of that text alone."""
    folder = eagle_folder(tmp_path / "head", **KINDS[kind])
    model, reference, compared = target(), Eagle(folder), 0
    run = HeadProposer._run

    def checked(self: HeadProposer, feeds: Sequence[Feed], level: int = 0) -> Any:
        nonlocal compared
        scores = run(self, feeds, level)
        for (cached, work), said in zip(feeds, scores, strict=True):
            row = cached.seq
            for leaf in row.leaves if row.tree.tokens and not level else ():
                tokens = row.tokens + [row.tree.tokens[node] for node in row.tree.path(leaf)]
                [expected] = reference.chain(tokens, states_of(model, tokens[:-1]), 1)[1]
                node = work.num_text + cached.branch_of[leaf]
                torch.testing.assert_close(said.logits[node - said.work.first], expected, rtol=1e-3, atol=1e-4)
                compared += 1
        return scores

    monkeypatch.setattr(HeadProposer, "_run", checked)
    SpecGenerator(model, folder).generate(IDS, **RUN, num_beams=3, schedule="constant", num_assistant_tokens=3)
    assert compared > 30


@pytest.mark.parametrize("name", ["gemma2", "gpt2", slow("qwen3_next"), "bloom"])
def test_targets_of_all_kinds(name: str, tmp_path: Path) -> None:
    """Any model that tells hidden states can have a head."""
    model = tiny(name)
    folder = eagle_folder(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    changed(folder, speculators_config={"verifier": {"architectures": [type(model).__name__]}})
    for given in ({}, {"num_beams": 2}):
        out = SpecGenerator(model, folder).generate(IDS[:2], **RUN, **given)
        assert out.sequences.tolist() == SpecGenerator(model).generate(IDS[:2], **RUN, **given).sequences.tolist()
        assert out.stats.num_draft_tokens > 0


def test_a_head_that_is_right(tmp_path: Path) -> None:
    """Of a target that goes by its last token alone, which the head does as well, every guess is accepted."""
    model = target()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[:, 16:] = 0  # two heads of keys and values pass no more
    sizes = {"layer_types": ["sliding_attention"], "sliding_window": 1, "norm_before_residual": True}
    folder = eagle_folder(tmp_path / "head", kind="qwen3", **sizes)
    weights, first = load_file(folder / "model.safetensors"), "layers.0."
    for name in ("hidden_norm", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj"):
        weights[f"{first}{name}.weight"].zero_()  # nothing passes but attention, of every token to itself
    weights[f"{first}input_layernorm.weight"].fill_(1)
    weights[f"{first}self_attn.v_proj.weight"][:, :16] = torch.eye(16)
    weights[f"{first}self_attn.o_proj.weight"][:8, :8] = torch.eye(8)  # the first and the third head of queries
    weights[f"{first}self_attn.o_proj.weight"][8:16, 16:24] = torch.eye(8)
    weights["norm.weight"] = model.model.norm.weight.data.clone()
    weights["lm_head.weight"] = model.lm_head.weight.data.clone()
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
    save_file(weights, folder / "model.safetensors")
    plain = SpecGenerator(model).generate(IDS, **RUN)
    generator = SpecGenerator(model, folder)
    out = generator.generate(IDS, **RUN, schedule="constant", num_assistant_tokens=5)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.draft_acceptance_rate == 1.0
    assert out.stats.num_target_passes <= 5
    beams = generator.generate(IDS, **RUN, num_beams=2, schedule="constant", num_assistant_tokens=5)
    assert beams.stats.num_target_passes <= 8


VERIFIER = {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/another-model"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"target_hidden_size": 48}, "was made for another target: its hidden states are 48 wide, the target's 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, r"this one has 3 layers: it reads \[1, 2, 7\]"),
        ({"speculators_config": {"verifier": VERIFIER}}, "was made for 'somebody/another-model', and the target is"),
        (
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            "was made for 'Qwen3ForCausalLM'",
        ),
        ({"speculators_model_type": "hydra"}, "is a head of kind 'hydra'; known are eagle3"),
    ],
)
def test_heads_of_other_targets(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder, model = changed(eagle_folder(tmp_path / "head"), **fields), target()
    model.config.name_or_path = "somebody/this-model"
    with pytest.raises(OptionError, match=match):
        SpecGenerator(model, folder)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"fc__weight": None}, "1 weights are missing, fc.weight…"),
        ({"norm__weight": torch.ones(31)}, r"`norm.weight` is \[31\], and by its config \[32\]"),
        ({"d2t": torch.full((30,), 40)}, "`d2t` must name 30 different tokens of 64"),
        ({"d2t": torch.zeros(30, dtype=torch.long)}, "`t2d` contradicts `d2t`"),
        ({"d2t": None}, "it guesses 30 of 64 tokens, but has no `d2t`"),
        ({"d2t": torch.full((30,), -1)}, "`d2t` must name 30 different tokens of 64"),
        ({"d2t": torch.zeros(29, dtype=torch.long)}, "`d2t` must name 30 different tokens of 64"),
        ({"t2d": torch.ones(63, dtype=torch.bool)}, "`t2d` contradicts `d2t`"),
        ({"layers__1__norm__weight": torch.ones(3)}, "it has unknown weights layers.1.norm.weight…"),
        (
            {"embed_tokens__weight": torch.ones(63, 32)},
            r"`embed_tokens.weight` is \[63, 32\], and a target of 64 tokens",
        ),
        ({"embed_tokens__weight": torch.ones(64, 31)}, "embeddings are 31 wide, its layers 32"),
        ({"embed_tokens__weight": torch.ones(64)}, r"`embed_tokens.weight` is \[64\]"),
    ],
)
def test_broken_heads(weights: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Weights that are missing, left over, or of another shape; ids that the target lacks.

    (Of embeddings with too few rows a pass told first, as an IndexError.)
    """
    folder = reweighed(eagle_folder(tmp_path / "head", draft_vocab_size=30), **weights)
    with pytest.raises((LoadError, UnsupportedError), match=match):
        SpecGenerator(target(), folder)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"eagle_aux_hidden_state_layer_ids": 3}, "its config.json, or the index of its files, makes no sense"),
        ({"speculators_config": "vLLM"}, "makes no sense"),
        ({"speculators_model_type": ["eagle3"]}, "is a head of kind"),
        ({"transformer_layer_config": None}, "no `transformer_layer_config`"),
        ({"num_hidden_layers": 0}, "its `num_hidden_layers` must be a whole number of at least 1, got 0"),
        ({"num_attention_heads": 0}, "makes no sense"),
        ({"hidden_size": "wide"}, "makes no sense"),
    ],
)
def test_configs_that_make_no_sense(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path / "head")
    inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    of_layers = {name: value for name, value in fields.items() if name in inner}
    fields = {"transformer_layer_config": {**inner, **of_layers}} if of_layers else fields
    with pytest.raises((LoadError, UnsupportedError), match=match) as caught:
        SpecGenerator(target(), changed(folder, **fields))
    assert "`draft`" in str(caught.value)


def test_truncated_files(tmp_path: Path) -> None:
    """As with any model: weights, config, an index of several files and one of these."""
    folder, model = eagle_folder(tmp_path / "head"), target()
    file, config = folder / "model.safetensors", folder / "config.json"
    weights, fields = file.read_bytes(), config.read_text()
    file.write_bytes(weights[:5000])
    with pytest.raises(LoadError, match="its files are broken or incomplete"):
        SpecGenerator(model, folder)
    config.write_text(fields[:100])
    with pytest.raises(LoadError, match=r"`draft`.*its files are broken or incomplete"):
        SpecGenerator(model, folder)
    config.write_text(fields)
    file.unlink()
    with pytest.raises(OptionError, match="cannot be loaded"):
        SpecGenerator(model, folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(LoadError, match="the index of its files, makes no sense"):
        SpecGenerator(model, folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "a.safetensors", "norm.weight": "b.safetensors"}}))
    (folder / "a.safetensors").write_bytes(weights)
    with pytest.raises(LoadError, match=r"b\.safetensors"):
        SpecGenerator(model, folder)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "a.safetensors"}}))
    assert SpecGenerator(model, folder).draft is not None


def test_heads_beside_names(tmp_path: Path) -> None:
    """`from_pretrained` brings in target and head; the head shares embeddings that it lacks."""
    model = target()
    model.save_pretrained(tmp_path / "target")
    folder = reweighed(eagle_folder(tmp_path / "head"), embed_tokens__weight=None)
    generator = SpecGenerator.from_pretrained(str(tmp_path / "target"), str(folder))
    out = generator.generate(IDS, **RUN)
    assert out.sequences.tolist() == SpecGenerator(model).generate(IDS, **RUN).sequences.tolist()
    assert out.stats.num_draft_tokens > 0
    assert generator.generate(IDS, **RUN, assistant_model=str(folder)).stats.num_draft_tokens > 0
