"""Passes over nodes in a line: whatever rows they belong to, each sees what it should, in one forward."""

import functools
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers.modeling_outputs import BaseModelOutput

from specdec.core.work import Work
from specdec.models import LanguageModel
from specdec.models.backends.padded import PaddedPasses
from specdec.models.cache.cross_attention import CrossAttention
from specdec.models.hf.derived import shallow_copy
from tests.matrix import slow
from tests.models.exact import Twin, twin_of
from tests.tiny import never, tiny

pytestmark = [pytest.mark.usefixtures("built"), pytest.mark.filterwarnings("ignore:.*generation flags")]

COMMON = ("llama", "gpt2", "gemma2", "mistral", "llama4_text", "whisper", "m2m_100", "t5")
RECORDED = ("llama", "gemma2", "whisper", "t5")
RAGGED = (
    "llama", "qwen2", "stablelm", "cohere", "olmo", "olmo2", "granite", "smollm3", "mistral", "phi3", "starcoder2",
    "qwen3", "gemma", "glm4", "gpt_neox", "phi", "gpt2", "gpt_bigcode", "gemma2", "gemma3_text", "opt", "mixtral",
    "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe", "cohere2", "llama4_text", "deepseek_v3", "biogpt",
    "bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100", "whisper", "t5", "mt5",
)  # fmt: skip
if version.parse(transformers.__version__) >= version.parse("5.23"):  # in 5.17 its attention is its own
    RAGGED += ("umt5",)
CASES = [name if name in COMMON else slow(name) for name in RAGGED]


@functools.lru_cache(maxsize=2)
def _language(name: str) -> LanguageModel:
    # transformers 5.17 lets sdpa leave the bound on scores out.
    options = {"attn_implementation": "eager"} if name == "gemma2" else {}
    return LanguageModel(tiny(name, **options), backend="packed")


@pytest.mark.parametrize("name", CASES)
def test_rows_of_all_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, trees, held branches, rows that join, leave and are forked, and a text far beyond windows and buffers.

    No pass is padded; where passes are recorded, Python runs none.
    """
    ragged = _language(name).ragged
    assert ragged is not None
    assert ragged.recorded is not None or name not in RECORDED
    monkeypatch.setattr(PaddedPasses, "run", never)
    if ragged.recorded is not None:
        monkeypatch.setattr(ragged.fused, "output", None)
    twin = twin_of(_language(name), 3)
    twin.wander()
    before = twin.session.passes
    twin.add(0)
    trees = [twin.chain(2), twin.tree(), twin.chain(0), twin.chain(150)]
    twin.step(trees, [2, 7, 0, 2], [[0], [0, 1], [], list(range(150))])
    assert twin.session.passes == before + 1
    twin.truncate([1, 0, 3, 140])
    twin.some([3, 0])
    twin.select([3, 1, 3])
    twin.branch(2)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("llama", "packed"), ("llama", "eager"), ("bart", "eager"), ("mamba2", "eager")),
        *(slow(n, "packed") for n in ("gemma2", "whisper", "bart")),
    ],
)
def test_hidden_states(name: str, backend: str) -> None:
    twin = twin_of(_language(name) if backend == "packed" else LanguageModel(tiny(name)), 2)
    encoding = twin.encoding
    trees = [twin.chain(9), twin.chain(4)]
    for row, scores in enumerate(twin.forward(trees, [1, 1], hidden=True)):
        ids, inputs = torch.tensor([trees[row].tokens]), dict[str, Any]()
        if encoding is not None:
            own = encoding.select([row])
            inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=own.hidden), "decoder_input_ids": ids}
            inputs |= {} if own.mask is None else {"attention_mask": own.mask}
        with torch.no_grad():
            output = twin.language.model(**inputs or {"input_ids": ids}, output_hidden_states=True)
        expected = output.get("hidden_states") or output.get("decoder_hidden_states")
        assert len(scores.hidden_states) == len(expected)
        for found, layer in zip(scores.hidden_states, expected, strict=True):
            torch.testing.assert_close(found, layer[0], atol=1e-4, rtol=1e-4)


def test_encoders_with_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose encoders are shorter, longer than a word of bits, or have holes, and forks that share one."""
    language, source = _language("m2m_100"), torch.Generator().manual_seed(0)
    monkeypatch.setattr(PaddedPasses, "run", never)
    ids = torch.randint(3, 64, (3, 80), generator=source)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    mask[2, 0], mask[2, 3:7], mask[2, 41], mask[2, 75:] = 0, 0, 0, 0
    twin = Twin(language, 3, language.encode({"input_ids": ids, "attention_mask": mask}))
    twin.join(1, language.encode({"input_ids": ids[:1, :5]}))
    twin.prefill(7, 3, 5, 2)
    for row in (2, 1):
        twin.fork(row)
    assert len(set(twin.session.cross.encoder_rows)) == 4  # shared by forks
    twin.step([twin.tree(), *(twin.chain(2) for _ in range(5))], [7, 2, 2, 1, 2, 2], [[0]] * 6)
    twin.leave(0, 2)
    twin.step([twin.chain(2) for _ in range(4)], [2] * 4, [[0, 1]] * 4)
    twin.leave(0, 2)
    twin.step([twin.tree(), twin.chain(1)], [7, 1], [[0], [0]])


def test_encoders_outlive_others() -> None:
    """When most rows have left, buffers shrink, but never below what an encoder said. (They shrank to 128 frames.)"""
    language = _language("m2m_100")
    cross, source = CrossAttention(language), torch.Generator().manual_seed(0)
    cross.buffers.spare_bytes, cross.buffers._lazy = 0, False  # as on a GPU
    for _ in range(12):
        cross.add(language.encode({"input_ids": torch.randint(3, 64, (1, 400), generator=source)}))
    cross.project(range(12))
    kept = [side[0].clone() for pair in cross.buffers.pairs() for side in pair]
    for index in range(11, 0, -1):
        cross.remove(index)
    assert cross.buffers.row_capacity < 12
    for side, before in zip((side for pair in cross.buffers.pairs() for side in pair), kept, strict=True):
        assert torch.equal(side[0, :, :400], before[:, :400])


def test_a_small_vocabulary() -> None:
    """Tokens that a model is tried with are its own. (Those of a tiny vocabulary were not, and it ran padded.)"""
    assert LanguageModel(tiny("llama", vocab=10), backend="packed").ragged is not None


def test_a_shallow_copy_of_a_running_model() -> None:
    """A twin that is made while passes run looks its own positions up. (It kept what stood in for those passes.)"""
    language = LanguageModel(tiny("bart"), backend="eager")
    embed = language.decoder.embed_positions
    with language.lookup(torch.tensor([[3]]), torch.tensor([[3]])):
        other = shallow_copy(language.model).get_decoder().embed_positions
        assert "forward" in vars(embed)
        assert "forward" not in vars(other)
    assert torch.equal(other.weight, embed.weight)


def test_hooks_are_not_shared() -> None:
    """What hooks into a twin does not hook into the model. (The library's put every hidden state in twice.)"""
    model, ids = tiny("llama"), torch.tensor([[5, 6, 7]])
    session = LanguageModel(model, backend="packed").session()
    session.run([Work.text(session.add(), [5, 6, 7])], hidden=True)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
