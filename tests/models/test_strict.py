"""`exactness`="strict": plain and assisted texts are equal bit for bit, in every dtype and quantization."""

import functools
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec import LanguageModel, OptionError, SpecGenerator, UnsupportedError, kernels
from specdec.core.work import Work
from specdec.models.backends.experts import expert_stacks
from specdec.models.backends.packed_layers import replaced, tied_embeddings
from specdec.models.backends.ragged_model import Sigmoid, Tanh
from tests.heads import eagle_folder
from tests.matrix import endless, in_turn, slow
from tests.tiny import ENCODER_DECODERS, threads, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
KINDS = ("float32", "bfloat16", "int8", "int4")
COMMON = endless(16)
SCHEDULES = ("constant", "heuristic", "confidence", "cost")
HOWS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 5},
    {"do_sample": True, "seed": 6, "temperature": 2.0},
)


CASES = [
    *(("llama", "bfloat16"), ("llama", "int4"), ("gemma2", "int8"), ("whisper", "bfloat16"), slow("qwen2_moe", "int8")),
    *(slow(*case) for case in (("llama", "float32"), ("llama", "int8"), ("gpt2", "float32"), ("bart", "int4"))),
]


@functools.cache
def strict(name: str, kind: str) -> LanguageModel:
    """With its decoder's layers in this dtype or quantization."""
    return LanguageModel(quantized(name, kind), exactness="strict")


def quantized(name: str, kind: str) -> Any:
    """The model, whose integers are packed."""
    model = tiny(name)
    if kind == "bfloat16":
        model = model.bfloat16()
    if kind.startswith("int"):
        encoder = set(model.get_encoder().modules()) if name in ENCODER_DECODERS else set()
        tied = tied_embeddings(model)
        for layer, module in list(model.named_modules()):
            if type(module) is nn.Linear and module not in encoder:
                packed = kernels.round_weight(module.weight, int(kind[3:]), module.bias)
                replaced(model, layer, packed, tied.get(layer, ()))
        for stack in expert_stacks(model).values():
            stack.put(kernels.round_weight(stack.weight, int(kind[3:]), stack.bias))
    return model


def wild(tokens: list[int], k: int) -> list[int]:
    """Guesses that have nothing to do with the target."""
    source = random.Random(len(tokens))
    return [source.randrange(3, 64) for _ in range(min(k, source.randrange(6)))]


def drafts(name: str) -> list[Any]:
    other = tiny(name, seed=1)
    return [tiny(name), other, wild, "suffix", ("suffix", other), "early_exit:1"]


def prompts(rows: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 64) for _ in range(source.randrange(3, 40))] for _ in range(rows)]


def inputs(name: str, rows: int) -> dict[str, Any]:
    return dict(tiny_inputs(name, rows)) if name in ENCODER_DECODERS else {"input_ids": prompts(rows)}


def texts(out: Any) -> list[list[int]]:
    return out.sequences.tolist()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_any_draft_leaves_the_text_alone(name: str, kind: str) -> None:
    """Drafts, schedules, trees, rows and draws take turns: not one token differs."""
    target, turn = strict(name, kind), itertools.cycle(itertools.product(HOWS, SCHEDULES, (1, 2)))
    rows = 3 if name != "whisper" else 2
    plain = [texts(SpecGenerator(target).generate(**inputs(name, rows), **COMMON, **how)) for how in HOWS]
    for draft in [*drafts(name), *(["quantized"] if kind in kernels.FLOATS else [])]:
        generator = SpecGenerator(target, draft)
        for _ in range(2):
            how, schedule, branches = next(turn)
            wide = branches if generator.draft.guesses_trees else None
            out = generator.generate(
                **inputs(name, rows), **COMMON, **how, schedule=schedule, num_assistant_branches=wide
            )
            assert texts(out) == plain[HOWS.index(how)], (draft, schedule, branches)
            assert out.stats.exactness == "strict"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cached_beginning_leaves_logits_alone(name: str, kind: str) -> None:
    """Turns of a chat continue keys and values of other passes by default, and no bit of a logit differs."""
    target, prompt = strict(name, kind), [(7 * i) % 50 + 5 for i in range(40)]
    continues, reads = SpecGenerator(target, "suffix", prefix_cache=True), SpecGenerator(target, prefix_cache=False)
    for turn in range(3):
        out, expected = (one.generate([prompt], **COMMON, output_logits=True) for one in (continues, reads))
        assert (out.stats.cached_prompt_tokens > 35, expected.stats.cached_prompt_tokens) == (turn > 0, 0)
        assert texts(out) == texts(expected)
        assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits))
        prompt = [*texts(out)[0], 9, 10 + turn]


@in_turn(name=["llama", "gemma2", "gpt2", "bart", "qwen2_moe", "qwen3_moe", "gpt_oss"], kind=KINDS)
def test_logits_bit_for_bit(name: str, kind: str) -> None:
    """Whatever shares a pass, however many threads compute it, and wherever a value then stands."""
    language, source = strict(name, kind), random.Random(0)
    text = [source.randrange(3, 64) for _ in range(400)]
    session = language.session()
    encoding = language.encode(tiny_inputs(name, 1)) if name in ENCODER_DECODERS else None
    rows = [session.add(encoding) for _ in range(4)]
    with torch.no_grad():
        whole = session.run([Work.text(rows[0], text, len(text))])[0].logits
    found: dict[int, list[Tensor]] = {row: [] for row in rows[1:]}
    while any(session.length(row) < len(text) for row in found):
        here = [row for row in found if session.length(row) < len(text)]
        here = source.sample(here, source.randrange(1, len(here) + 1))
        sizes = [min(source.choice([1, 2, 5, 33, 170]), len(text) - session.length(row)) for row in here]
        texts = [text[(at := session.length(row)) : at + n] for row, n in zip(here, sizes, strict=True)]
        with threads(source.choice([1, 2, 3, 5])):
            for out in session.run(list(map(Work.text, here, texts, sizes))):
                found[out.work.row].append(out.logits)
        session.commit(here, [list(range(n)) for n in sizes])
    assert all(torch.equal(torch.cat(logits), whole) for logits in found.values())


def test_activations_do_not_depend_on_the_place() -> None:
    """One by one and all at once, over several threads: the same bits, and torch's function up to rounding.

    (torch's own differ in the last bit where vectors end, which a check with few tokens may not see.)
    """
    x = torch.randn(70_003, generator=torch.Generator().manual_seed(0)) * 4
    own = {
        Sigmoid(): nn.functional.silu,
        Sigmoid(1.702): lambda x: x * torch.sigmoid(1.702 * x),
        Tanh(): lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    for (steady, torchs), dtype in itertools.product(own.items(), (torch.float32, torch.bfloat16)):
        given = x.to(dtype)
        parts = torch.cat([steady(part.clone()) for part in given[-7000:].split(7)])
        for count in (1, 2, 3):
            with threads(count):
                whole = steady(given)
            assert torch.equal(whole[-7000:], parts)
        torch.testing.assert_close(whole, torchs(given.float()).to(dtype), atol=1e-5, rtol=2**-7)


@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind: str, tmp_path: Path) -> None:
    """A draft that reads hidden states changes no bit either, whatever its schedule and the way of choosing."""
    target = strict("llama", kind)
    generator = SpecGenerator(target, eagle_folder(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1]))
    given: dict[str, Any] = {"input_ids": prompts(3), **COMMON}
    for how, schedule, branches in zip(HOWS, SCHEDULES[1:], (2, 1, 4), strict=True):
        out = generator.generate(**given, **how, schedule=schedule, num_assistant_branches=branches)
        assert texts(out) == texts(SpecGenerator(target).generate(**given, **how))
        assert out.stats.num_draft_tokens > 0
        assert out.stats.exactness == "strict"


def test_recorded_passes_of_target_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all passes, those whose hidden states a head reads and those of which nobody asks for states."""
    target = LanguageModel(quantized("llama", "int8"), backend="packed", exactness="strict")
    folder = eagle_folder(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1], draft_vocab_size=30)
    generator = SpecGenerator(target, folder, backend="packed")
    [stage] = generator.draft.models  # type: ignore[union-attr]
    for model in (target, stage):
        assert model.ragged.recorded is not None
        monkeypatch.setattr(model.ragged.fused, "output", None)
    given: dict[str, Any] = {"input_ids": prompts(3), **COMMON}
    for how in HOWS:
        plain = texts(SpecGenerator(target).generate(**given, **how))
        for more in ({"schedule": "constant"}, {"schedule": "heuristic", "num_assistant_branches": 3}):
            out = generator.generate(**given, **how, **more)
            assert texts(out) == plain
            assert out.stats.num_draft_tokens > 0


# --- what cannot be strict


class Neighbourly(nn.Module):
    """A layer that looks at the whole pass, as quantization of activations does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + 1e-3 * x.abs().max())


def refused(model: Any, match: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{match}.*leave out `exactness`='strict'"):
        LanguageModel(model, exactness="strict")


def test_layers_that_look_at_their_neighbours() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.act_fn = Neighbourly(model.model.layers[1].mlp.act_fn)
    refused(model, "passes of other widths give other logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_are_not_packed(dtype: torch.dtype) -> None:
    """They are refused by kind, as half precision hides most of what trying should show. (Experts passed it.)"""
    refused(tiny("deepseek_v3").to(dtype), r"`model\.layers\.1\.mlp\.gate` is no packed layer")


@pytest.mark.parametrize("name", ["bloom", "gptj", "mamba"])
def test_models_without_attention_of_ours(name: str) -> None:
    with pytest.raises(UnsupportedError, match="leave out"):
        LanguageModel(tiny(name), exactness="strict")


def test_contradictions() -> None:
    """Its layers as they are promise nothing; embeddings and attentions have no passes of this kind."""
    with pytest.raises(OptionError, match="leave out `backend`='eager'"):
        LanguageModel(tiny("llama"), backend="eager", exactness="strict")
    language = LanguageModel(tiny("llama", attn_implementation="eager"), exactness="strict")
    session = language.session()
    work = Work.text(session.add(), [5, 6, 7])
    for given, how in ((replace(work, embeds=torch.zeros(3, 32)), {}), (work, {"attentions": True})):
        with pytest.raises(UnsupportedError, match="no embeddings and returns no attentions"):
            session.run([given], **how)


def test_a_short_position_table() -> None:
    """What is tried fits into it. (It did not: an index was out of range.)"""
    assert LanguageModel(tiny("gpt2", n_positions=128), exactness="strict").exactness == "strict"
