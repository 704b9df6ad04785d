"""Drafts made of the target, over the target's keys and values: its first layers, and the target in 4 bits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specdec import SpecGenerator, kernels
from specdec.errors import DraftError, OptionError, UnsupportedError
from specdec.models import LanguageModel
from specdec.models.backends.kv_session import KvSession
from specdec.models.hf.tiny_models import SIZES, random_model
from specdec.models.loading import lighten
from specdec.proposers import EarlyExitDraft, HybridDraft, QuantizedDraft, SuffixDraft
from specdec.proposers.self_drafts import SelfProposer
from tests.matrix import STRATEGIES, endless, in_pairs
from tests.speech import whisper
from tests.tiny import tiny, tiny_inputs
from tests.versions import OLD

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # groups of 32 weights
PROMPTS = [[5, 9, 12, 30, 31, 7], [8, 30, 31, 7, 22, 9, 41, 6, 11, 5], [11, 3]]


KINDS = ["early_exit:1", "quantized"]


def wide(seed: int = 0) -> Any:
    return tiny("llama", seed=seed, **WIDE)


def agreeing(name: str) -> Any:
    """A model whose layers after the first change little."""
    model = tiny(name)
    with torch.no_grad():
        for weight in (weight for part, weight in model.named_parameters() if ".1." in part and "encoder." not in part):
            weight.mul_(0.03)
    return model


@in_pairs(
    kind=KINDS,
    backend=["eager", "packed"],
    how=[
        {},
        {"do_sample": True, "seed": 3, "temperature": 1.3},
        {"do_sample": True, "seed": 4, "sampling": "rejection"},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"num_assistant_branches": 3},
        {"num_beams": 3},
        {"guidance_scale": 1.5},
    ],
)
def test_texts_are_the_targets(kind: str, backend: str, how: dict[str, Any]) -> None:
    """Of ragged rows together, twice, so that the second call continues kept prefixes."""
    model = LanguageModel(wide(), backend=backend, owned=True)
    options = endless(12, **how)
    plain = {name: value for name, value in options.items() if name != "num_assistant_branches"}
    generator = SpecGenerator(model, kind, schedule="constant", num_assistant_tokens=4)
    for prompts in (PROMPTS, [[*prompt, 4] for prompt in PROMPTS]):
        out = generator.generate(prompts, **options)
        if how.get("sampling") != "rejection":  # which draws other numbers with a draft
            assert out.sequences.tolist() == SpecGenerator(model).generate(prompts, **plain).sequences.tolist()
        assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("backend", ["eager", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_reads_no_prompt(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes begin behind the text in the target's rows, with one token of it, also in the next turn of a chat.

    (An early exit had a cache of its own, and read every prompt a second time.)
    """
    target = LanguageModel(wide(), backend=backend, owned=True)
    draft = EarlyExitDraft(target, 1) if kind != "quantized" else QuantizedDraft(target)
    passes: list[tuple[int, list[int]]] = []
    run = KvSession.run

    def watched(session: KvSession, works: Any, **how: Any) -> Any:
        if session._language is draft.model:
            passes.extend((session.length(work.row), work.tree.tokens) for work in works)
        return run(session, works, **how)

    monkeypatch.setattr(KvSession, "run", watched)
    monkeypatch.setattr(KvSession, "draft_chains", False)
    generator = SpecGenerator(target, draft, schedule="constant", num_assistant_tokens=3, prefix_cache=True)
    prompt = [5 + i % 40 for i in range(50)]
    out = generator.generate([prompt], **endless(12))
    text = out.sequences[0].tolist()
    assert {len(tokens) for _, tokens in passes} == {1}
    assert min(length for length, _ in passes) == 50
    assert len(passes) >= out.stats.num_draft_tokens > 0
    # What was kept of the text holds no key of a guess: the next turn gives the text of a fresh generator.
    turn = [*text, *range(20, 40)]
    passes.clear()
    again = generator.generate([turn], **endless(12))
    assert {len(tokens) for _, tokens in passes} == {1}
    assert min(length for length, _ in passes) == len(turn)
    assert again.stats.cached_prompt_tokens >= len(text) - 1
    assert again.sequences.tolist() == SpecGenerator(target).generate([turn], **endless(12)).sequences.tolist()


@in_pairs(
    name=["llama", "gpt2", "t5"],
    backend=["eager", "packed"],
    how=[{}, {"num_assistant_branches": 3}, {"num_beams": 3}, STRATEGIES["groups"]],
)
def test_guesses_leave_the_cache_as_it_was(
    name: str, backend: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and branches, bit for bit; guesses after branches that the target holds are right as well."""
    target, propose = LanguageModel(agreeing(name), backend=backend, owned=True), SelfProposer.propose

    def held(session: Any) -> tuple[Any, list[torch.Tensor]]:
        sides = [side for pair in session.buffers.pairs() for side in pair]
        rows = [(row.index, deepcopy(row.columns), row.tree.tokens, row.tree.parents) for row in session.rows]
        return rows, [side[index, :, : columns.top].clone() for index, columns, *_ in rows for side in sides]

    def watched(proposer: Any, *round_: Any) -> Any:
        rows, columns = held(proposer._session)
        trees = propose(proposer, *round_)
        after = held(proposer._session)
        assert rows == after[0]
        assert all(map(torch.equal, columns, after[1]))
        return trees

    monkeypatch.setattr(SelfProposer, "propose", watched)
    options = {**(tiny_inputs(name, 2) if name == "t5" else {"prompt": PROMPTS}), **endless(12)}
    plain = SpecGenerator(target).generate(**options, **({} if "num_assistant_branches" in how else how))
    out = SpecGenerator(target, "early_exit:1", schedule="constant", num_assistant_tokens=3).generate(**options, **how)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert 2 * out.stats.num_target_passes < plain.stats.num_target_passes


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_pass_leaves_the_target_sound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error amid a guess ends its request; requests beside it and later ones get their texts."""
    target = LanguageModel(wide(), owned=True)
    generator = SpecGenerator(target, kind, schedule="constant", num_assistant_tokens=3)
    expected = SpecGenerator(target).generate(PROMPTS, **endless(10)).sequences.tolist()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(KvSession, "draft_chain", fail)
        patch.setattr(KvSession, "commit", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            generator.generate(PROMPTS, **endless(10))
    assert generator.generate(PROMPTS, **endless(10)).sequences.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_shares_the_targets_memory(kind: str) -> None:
    """No bytes are set aside for keys and values of its own: a budget that fits the target fits both."""
    target = LanguageModel(wide(), owned=True)
    size = 40 * target.kv_bytes
    out = SpecGenerator(target, kind, kv_budget=size).generate([PROMPTS[0]], **endless(8))
    assert out.sequences.tolist() == SpecGenerator(target).generate([PROMPTS[0]], **endless(8)).sequences.tolist()
    with pytest.raises(OptionError, match="kv_budget"):
        SpecGenerator(target, wide(1), kv_budget=size // 2).generate([PROMPTS[0]], **endless(8))


def test_a_changed_model_is_copied_anew() -> None:
    """A caller's model drafts with what it is by now: a copy of the old one would guess for another text."""
    model = wide()
    generator = SpecGenerator(model, "quantized", schedule="constant", num_assistant_tokens=4)
    [copy] = generator.draft.models
    before = copy.model.get_output_embeddings().weight()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    generator.model_changed()
    assert not torch.equal(before, copy.model.get_output_embeddings().weight())
    out = generator.generate(PROMPTS, **endless(10))
    assert out.sequences.tolist() == SpecGenerator(model).generate(PROMPTS, **endless(10)).sequences.tolist()


@in_pairs(kind=KINDS, backend=["eager", "packed"], how=[{}, {"num_assistant_branches": 3}])
def test_prompts_of_embeddings(kind: str, backend: str, how: dict[str, Any]) -> None:
    """Their positions in the cache were taken for tokens, so that nothing was left to guess from: passes failed."""
    model = LanguageModel(wide(), backend=backend, owned=True)
    embeds = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(6))
    generator = SpecGenerator(model, kind, schedule="constant", num_assistant_tokens=4)
    out = generator.generate(inputs_embeds=embeds, **endless(12, **how))
    expected = SpecGenerator(model).generate(inputs_embeds=embeds, **endless(12))
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoder_decoder_shares_its_frames(name: str) -> None:
    model, inputs = tiny(name), tiny_inputs(name, 2)
    expected = SpecGenerator(model).generate(**inputs, **endless(12)).sequences.tolist()
    generator = SpecGenerator(model, "quantized", schedule="constant", num_assistant_tokens=4)
    assert generator.generate(**inputs, **endless(12)).sequences.tolist() == expected


@pytest.mark.skipif(OLD, reason="transformers has no such models")
def test_layers_of_different_widths() -> None:
    """The first layers of Gemma 4 are narrower than its widest, and were taken for layers of another model."""
    none = dict.fromkeys(["hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"], 0)
    sizes = {**SIZES["llama"], "head_dim": 8, "global_head_dim": 16, "vocab_size": 64, **none}
    layers = ["sliding_attention", "full_attention"]
    model = random_model(AutoConfig.for_model("gemma4_text", **sizes, layer_types=layers))
    out = SpecGenerator(model, "early_exit:1", schedule="constant").generate(PROMPTS, **endless(12))
    assert out.sequences.tolist() == SpecGenerator(model).generate(PROMPTS, **endless(12)).sequences.tolist()
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_that_reads_embeddings(kind: str) -> None:
    """A copy in 4 bits, which shares what the encoder says, was refused as if it had to read them."""
    model, embeds = tiny("t5"), torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(6))
    expected = SpecGenerator(model).generate(inputs_embeds=embeds, **endless(12)).sequences.tolist()
    out = SpecGenerator(model, kind, schedule="constant").generate(inputs_embeds=embeds, **endless(12))
    assert out.sequences.tolist() == expected
    assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["mamba2", "mpt"])
def test_an_early_exit_beside_other_caches(name: str) -> None:
    """It reads texts into a cache of its own where the target's cannot be shared."""
    draft = EarlyExitDraft(LanguageModel(tiny(name)), 1)
    assert draft.is_cached
    out = SpecGenerator(tiny(name), draft, schedule="constant").generate(PROMPTS, **endless(8))
    assert out.sequences.tolist() == SpecGenerator(tiny(name)).generate(PROMPTS, **endless(8)).sequences.tolist()
    assert out.stats.num_draft_tokens > 0


def test_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come beside a large model; "auto" takes it for owned floats of some size, and copies elsewhere."""
    assert isinstance(SpecGenerator(wide(), "quantized").draft, QuantizedDraft)
    owned = LanguageModel(wide(), owned=True)
    assert isinstance(SpecGenerator(owned, "auto").draft, SuffixDraft)
    monkeypatch.setattr(lighten, "_LEAST", 1)
    monkeypatch.setattr("specdec.generator.drafts_by_name._DEAR", 1)
    draft = SpecGenerator(owned, "auto").draft
    assert isinstance(draft, HybridDraft)
    assert draft.kind == SpecGenerator(owned, "suffix+quantized").draft.kind == "suffix+quantized"
    assert SpecGenerator(owned, ("ngram", "quantized")).draft.kind == "ngram+quantized"
    assert isinstance(SpecGenerator(wide(), "auto").draft, SuffixDraft)  # a caller's model is not copied unasked
    monkeypatch.setattr(lighten, "_LEAST_HEARING", 1)
    assert isinstance(SpecGenerator(LanguageModel(whisper(), owned=True), "auto").draft, QuantizedDraft)
    assert SpecGenerator(whisper(), "auto").draft is None


@pytest.mark.parametrize(("target", "source", "layers"), [("llama", "llama", 3), ("mpt", "gpt2", 2), ("gpt2", "t5", 2)])
def test_a_draft_of_another_target(target: str, source: str, layers: int) -> None:
    """It ended in words about buffers, of the kernels or of Python."""
    draft = QuantizedDraft(LanguageModel(tiny(source, num_hidden_layers=layers), owned=True))
    with pytest.raises(DraftError, match="make the draft of this target"):
        SpecGenerator(tiny(target), draft).generate([PROMPTS[0]], **endless(4))


def test_targets_that_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"Mamba\w+ does not run on .* name another draft"):
        SpecGenerator(tiny("mamba"), "quantized")
    with pytest.raises(UnsupportedError, match=r"no linear layers in \w+"):
        SpecGenerator(wide().half(), "quantized")
    rounded = lighten.quantized(wide())
    with pytest.raises(UnsupportedError, match="few bits already"):
        SpecGenerator(LanguageModel(rounded, owned=True), "quantized")
    monkeypatch.setattr(lighten, "free_bytes", lambda device: 10)
    with pytest.raises(UnsupportedError, match="no room for a copy"):
        SpecGenerator(wide(), "quantized")


@pytest.mark.parametrize("name", ["mamba", "mpt", "lfm2"])
def test_auto_copies_where_it_is_not_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model with another cache than keys and values had no default draft, but an error."""
    monkeypatch.setattr(lighten, "_LEAST", 1)
    assert isinstance(SpecGenerator(LanguageModel(tiny(name), owned=True), "auto").draft, SuffixDraft)


def test_a_copy_with_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding was undone, and a copy in the target's own numbers drafted, which takes as long as the target."""
    monkeypatch.setattr("specdec.models.backends.packed_layers._ALIKE", 2)
    with pytest.raises(UnsupportedError, match=r"other logits in 4 bits: .* name another draft"):
        SpecGenerator(wide(), "quantized")
    monkeypatch.setattr(lighten, "_LEAST", 1)
    assert isinstance(SpecGenerator(LanguageModel(wide(), owned=True), "auto").draft, SuffixDraft)


def test_a_target_in_8_bits() -> None:
    """Its copy has half the bits, and the text is the target's."""
    model = wide()
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, kernels.round_weight(layer.weight, 8))
    target = LanguageModel(model, owned=True)
    out = SpecGenerator(target, "quantized").generate(PROMPTS, **endless(12))
    assert out.sequences.tolist() == SpecGenerator(target).generate(PROMPTS, **endless(12)).sequences.tolist()
    assert out.stats.num_accepted_draft_tokens > 0
