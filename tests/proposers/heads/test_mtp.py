"""Multi-token prediction: the same guesses as transformers', and the target's own text."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from specdec import OptionError, SpecGenerator, UnsupportedError
from specdec.errors import LoadError
from specdec.kernels import PackedLinear
from specdec.models import LanguageModel
from specdec.models.backends.padded import PaddedPasses
from specdec.models.hf.tiny_models import shake
from specdec.proposers.heads.mtp import MtpDraft
from tests.heads import IDS, Proposals, candidates_of
from tests.matrix import endless
from tests.tiny import GQA, tiny
from tests.versions import OLD

RUN = endless(12)
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **GQA, **MOE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "glm4_moe": {**GQA, **MOE, "head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "mellum": {**GQA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
               "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def with_layers(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> Any:
    """A tiny target, and in place of its checkpoint's layers for prediction random ones."""
    if OLD:
        pytest.skip("transformers cannot tell the layers for prediction from the others")
    config = AutoConfig.for_model(name, vocab_size=64, num_mtp_layers=count, **SIZES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        shake(model)
        layers = MtpModel(model, count).eval()
        for layer in layers.layers:
            shake(layer)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: copy.deepcopy(layers))
    return model


KINDS = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("backend", ["eager", "packed"])
@pytest.mark.parametrize(("name", "count"), KINDS)
def test_guesses_are_those_of_transformers(
    name: str, count: int, backend: str, monkeypatch: pytest.MonkeyPatch, proposals: Proposals
) -> None:
    """Text by text, after rejections too; of several layers, the first one makes all guesses.

    Over packed weights all passes stand in a line.
    """
    model = with_layers(monkeypatch, name, count)
    theirs = candidates_of(MTPCandidateGenerator, monkeypatch)
    expected = GenerationMixin.generate(
        model, torch.tensor(IDS[:1]), use_mtp=True, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    generator = SpecGenerator(model, backend=backend)
    padded, run = [], PaddedPasses.run
    monkeypatch.setattr(PaddedPasses, "run", lambda self, *given: padded.append(self) or run(self, *given))
    out = generator.generate(IDS[:1], **RUN, use_mtp=True, schedule="constant", num_assistant_tokens=4)
    assert out.sequences.tolist() == expected.tolist()
    assert bool(padded) == (backend == "eager")
    guesses = {tuple(text): tree.tokens for text, tree in proposals}
    common = [text for text in guesses if text in theirs]
    assert len(common) >= 4
    for text in common:
        assert guesses[text][:1] == theirs[text][:1]
    assert max(len(tokens) for tokens in guesses.values()) == 4


def checkpoint(folder: Path) -> tuple[Path, Any]:
    """A tiny checkpoint of Mellum, with the names that its layers for prediction have there."""
    config = AutoConfig.for_model("mellum", vocab_size=64, num_mtp_layers=1, **SIZES["mellum"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    shake(model)
    layers = MtpModel(model, 1)
    shake(layers.layers[0])
    model.save_pretrained(folder)
    names = {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm",
        "mtp_block": "layers.0",
    }  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    for name, tensor in layers.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        if "experts." in rest and tensor.dim() == 3:  # stored expert by expert
            for i, one in enumerate(tensor):
                for part, piece in (
                    zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)
                    if "gate_up" in rest
                    else (("down_proj", one),)
                ):
                    weights[f"mtp.layers.0.mlp.experts.{i}.{part}.weight"] = piece.contiguous()
            continue
        weights[f"mtp.{names[first]}.{rest}"] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, layers


@pytest.mark.skipif(OLD, reason="transformers cannot tell the layers for prediction from the others")
def test_layers_come_from_the_checkpoint(tmp_path: Path) -> None:
    """They are those that were stored; a checkpoint without them is told of."""
    folder, layers = checkpoint(tmp_path / "target")
    generator = SpecGenerator.from_pretrained(str(folder), "mtp")
    loaded = generator.draft.models[0].model.layer.state_dict()  # type: ignore[attr-defined]
    for name, tensor in layers.layers[0].state_dict().items():
        torch.testing.assert_close(loaded[name], tensor)
    out = generator.generate(IDS, **RUN)
    plain = SpecGenerator.from_pretrained(str(folder)).generate(IDS, **RUN)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.num_draft_tokens > 0
    file = folder / "model.safetensors"
    weights = load_file(file)
    without = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.fc")}
    save_file(without, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="weights are missing"):
        SpecGenerator.from_pretrained(str(folder), "mtp")
    save_file({**weights, "mtp.fc.weight": torch.ones(32, 63)}, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"`draft`.*its files are broken or incomplete"):
        SpecGenerator.from_pretrained(str(folder), "mtp")


@pytest.mark.skipif(OLD, reason="transformers cannot tell the layers for prediction from the others")
@pytest.mark.usefixtures("built")
def test_a_packed_target_shares_its_head(tmp_path: Path) -> None:
    """Embeddings and head lie in memory once. (They were missing in the checkpoint: nothing was loaded.)"""
    folder, _ = checkpoint(tmp_path / "target")
    generator = SpecGenerator.from_pretrained(str(folder), "mtp", backend="packed")
    [stage] = generator.draft.models
    assert stage.backend == "packed"
    assert stage.ragged is not None
    assert stage.model.shared_head is generator.target.output_embeddings
    assert isinstance(stage.model.shared_head, PackedLinear)
    handed = AutoModelForCausalLM.from_pretrained(folder).eval()
    lent = MtpDraft.of(LanguageModel(handed), None).models[0]
    assert lent.model.shared_head.weight is handed.lm_head.weight
    out = generator.generate(IDS, **RUN)
    assert out.sequences.tolist() == SpecGenerator(handed).generate(IDS, **RUN).sequences.tolist()
    assert out.stats.num_draft_tokens > 0


def test_targets_without_such_layers() -> None:
    with pytest.raises(UnsupportedError, match=r"`draft`: LlamaForCausalLM has no layers for multi-token prediction"):
        SpecGenerator(tiny("llama"), "mtp")
    with pytest.raises(UnsupportedError, match=r"`use_mtp`: LlamaForCausalLM has no layers"):
        SpecGenerator(tiny("llama")).generate(IDS, **RUN, use_mtp=True)
    with pytest.raises(OptionError, match="`use_mtp` must be True or False, got 3"):
        SpecGenerator(tiny("llama")).generate(IDS, **RUN, use_mtp=3)
    with pytest.raises(OptionError, match=r"`draft` must be suffix.*, got 'mtp:2'"):
        SpecGenerator(tiny("llama"), "mtp:2")
    assert SpecGenerator(tiny("llama")).generate(IDS, **RUN, use_mtp=False).stats.num_draft_tokens == 0
