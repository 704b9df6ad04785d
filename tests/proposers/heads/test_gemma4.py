"""Gemma 4 assistants: the guesses of transformers' own, and the target's own text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from specdec import OptionError, SpecGenerator, UnsupportedError
from specdec.errors import LoadError
from specdec.models.hf.tiny_models import shake
from tests.heads import IDS, Proposals
from tests.matrix import endless, slow
from tests.tiny import tiny
from tests.versions import OLD

RUN = endless(8)
KINDS = ["sliding_attention", "full_attention"]
LAYERS: dict[str, Any] = {
    "vocab_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def pair(*, window: int = 64, unified: bool = False) -> tuple[Any, Any]:
    """A tiny target and its assistant; of the target's six layers the last two have no keys and values of their own.

    The assistant of the `unified` family looks at the likeliest clusters of tokens alone.
    """

    of = "Gemma4Unified" if unified else "Gemma4"
    layers, outer = getattr(transformers, f"{of}TextConfig"), getattr(transformers, f"{of}AssistantConfig")
    sizes = {**LAYERS, "sliding_window": window}
    extra = {} if unified else {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    none = {} if unified else dict.fromkeys(extra, 0)
    clusters = {"use_ordered_embeddings": unified, "num_centroids": 8, "centroid_intermediate_top_k": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes["num_kv_shared_layers"] = 2
        large = layers(**sizes, **extra, hidden_size=32, num_hidden_layers=6, layer_types=KINDS * 3)
        small = layers(**sizes, **none, hidden_size=24, num_hidden_layers=2, layer_types=KINDS)
        target = getattr(transformers, f"{of}ForCausalLM")(large).eval()
        config = outer(text_config=small, backbone_hidden_size=32, **clusters)
        assistant = getattr(transformers, f"{of}AssistantForCausalLM")(config).eval()
        for model in (target, assistant):
            shake(model)
        if unified:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(64))
    return target, assistant


def candidates(model: Any, draft: Any, text: list[int], count: int) -> list[int]:
    """What transformers guesses after a text that its target has just read."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Candidates

    ids = torch.tensor([text])
    with torch.no_grad():
        read = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    draft.generation_config.num_assistant_tokens = count
    own = Candidates(draft, model.get_input_embeddings(), GenerationConfig(max_length=len(text) + count + 1))
    found, _ = own.get_candidates(ids, {}, read, is_first_iteration=False, n_last_matches=0)
    return found[0, len(text) :].tolist()


@pytest.mark.skipif(OLD, reason="transformers drafts otherwise")
@pytest.mark.parametrize("unified", [False, slow(True)])
def test_guesses_are_those_of_transformers(unified: bool, proposals: Proposals, tmp_path: Path) -> None:
    """In ragged batches, over chunked prompts and windows, after rejections, of a model and of a folder.

    Each is compared with what transformers guesses after a text that was read at once: later in a call its cache lacks
    tokens that the window covers, and has some that were rejected.
    """
    model, draft = pair(window=5, unified=unified)
    draft.save_pretrained(tmp_path / "draft")
    for one, prompts in ((draft, IDS), (str(tmp_path / "draft"), IDS[:1])):
        proposals.clear()
        out = SpecGenerator(model, one).generate(
            prompts, **RUN, schedule="constant", num_assistant_tokens=4, prefill_chunk_size=3
        )
        assert out.sequences.tolist() == SpecGenerator(model).generate(prompts, **RUN).sequences.tolist()
        assert len(proposals) >= 5 * len(prompts)
        for text, tree in proposals:
            assert tree.tokens == candidates(model, draft, text, len(tree))


def test_what_does_not_fit(tmp_path: Path) -> None:
    """Targets of other families and widths, targets that are not all here, broken checkpoints."""
    model, draft = pair()
    folder = tmp_path / "draft"
    draft.save_pretrained(folder)
    with pytest.raises(UnsupportedError, match=r"`draft` is a Gemma 4 assistant.*the target is a LlamaForCausalLM"):
        SpecGenerator(tiny("llama"), draft)
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(UnsupportedError, match="which computes with layers of a whole Gemma 4 model"):
        SpecGenerator.from_pretrained(str(tmp_path / "target"), str(folder), offload="disk")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "model.layers.0.self_attn.k_norm.weight": torch.ones(8)}, folder / "model.safetensors")
    assert SpecGenerator(model, str(folder)).draft is not None
    save_file({k: t for k, t in weights.items() if k != "pre_projection.weight"}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"1 weights are missing, pre_projection\.weight"):
        SpecGenerator(model, str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 48}))
    with pytest.raises(OptionError, match="its hidden states are 48 wide, the target's 32"):
        SpecGenerator(model, str(folder))


def test_a_target_whose_last_layers_read_those_of_others() -> None:
    """A prompt continues one that was read before. (It was refused: layers without keys and values were missed.)"""
    model, prompt = pair()[0], [[(7 * i) % 50 + 5 for i in range(30)]]
    generator = SpecGenerator(model, prefix_cache=True)
    first, second = (generator.generate(prompt, **RUN) for _ in range(2))
    assert second.stats.cached_prompt_tokens == 29
    assert second.sequences.tolist() == first.sequences.tolist()
