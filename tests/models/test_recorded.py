"""Passes that C++ repeats as they were recorded: the same numbers as by Python, and chains in one call."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Loading, SpecGenerator
from specdec.core.budget import Budget
from specdec.core.drafts import ChainRule, Choice, Filter
from specdec.errors import UnsupportedError
from specdec.models import LanguageModel, load_model
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.recorded import Sizes, example
from tests.folders import saved, saved_gguf
from tests.models.exact import twin_of
from tests.tiny import ENCODER_DECODERS, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
NAMES = ("llama", "gemma2", "whisper", "t5")


def packed(model: nn.Module) -> RaggedForward:
    ragged = LanguageModel(model, backend="packed").ragged
    assert ragged is not None
    return ragged


def check_numbers(ragged: RaggedForward | None, *sizes: Sizes) -> None:
    """A recorded pass gives the numbers of Python's, bit for bit."""
    assert ragged is not None
    for one in sizes or (Sizes(4, 2, 2, 80, 3, 9, 3),):
        given = example(ragged.fused, one)
        assert all(map(torch.equal, ragged.recorded.run(given.tensors), ragged.fused(*given)))


# --- what is recorded


@pytest.mark.parametrize("count", [1, 2, 6, 40])
@pytest.mark.parametrize("name", [*NAMES, "deepseek_v3", "mixtral", "gpt2", "phi3", "bart"])
def test_the_same_numbers(name: str, count: int) -> None:
    """Bit for bit those of Python, for any number of nodes, logits, rows, columns and frames."""
    check_numbers(packed(tiny(name)), Sizes(count, 1, 2, 80, 3, 9, 1), Sizes(count, count, 5, 120, 2, 30, count))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K"])
def test_files_of_blocks(kind: str, tmp_path: Path) -> None:
    """Whatever an embedding is packed in. (Those of fewer than 8 bits ran in Python.)"""
    wide = {"hidden_size": 256, "intermediate_size": 256} if kind.endswith("K") else {}
    check_numbers(load_model(saved_gguf(tmp_path / "a.gguf", (kind,), **wide), Loading(backend="packed")).ragged)


@pytest.mark.parametrize("quantization", ["int8-weight", "int4-weight"])
@pytest.mark.parametrize("name", NAMES)
def test_few_bits(name: str, quantization: str, tmp_path: Path) -> None:
    check_numbers(load_model(saved(name, tmp_path), Loading(backend="packed", quantization=quantization)).ragged)


class Peeking(nn.Module):
    """Doubles the last token's numbers if `peek` says so."""

    def __init__(self, inner: nn.Module, peek: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.peek = inner, peek

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * 2 if self.peek(x) else y


@pytest.mark.parametrize(
    "peek",
    [
        lambda x: x.isnan().any(), lambda x: x.shape[1] == 1, lambda x: len(torch.nonzero(x.isnan())) > 0,
        lambda x: len(x[x.isnan()]) > 0, lambda x: sum(x.isnan().flatten().tolist()) > 0,
        lambda x: x.isnan().numpy().any(),
    ],
    ids=["a value", "one", "nonzero", "chosen", "a list", "an array"],
)  # fmt: skip
def test_passes_that_depend_on_more(peek: Callable[[torch.Tensor], Any]) -> None:
    """A model whose Python looks at values, or at sizes otherwise than in proportion, keeps running in Python."""
    model = tiny("llama")
    model.model.layers[1].mlp = Peeking(model.model.layers[1].mlp, peek)
    language = LanguageModel(model, backend="packed")
    assert language.ragged.recorded is None
    assert not language.session().draft_chains
    twin = twin_of(language, 2)
    twin.prefill(9, 4)


def test_hooks_of_a_caller() -> None:
    """They are called in each pass, so nothing is recorded."""
    model, calls = tiny("llama"), list[int]()
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    language = LanguageModel(model, backend="packed")
    assert language.ragged.recorded is None
    generator = SpecGenerator(language, None)
    generator.generate(torch.tensor([[5, 9]]), max_new_tokens=3)
    assert len(calls) >= 3


def test_a_weight_that_changes() -> None:
    """Passes read the weights where they lie."""
    ragged = packed(tiny("llama"))
    given = example(ragged.fused, Sizes(3, 1, 2, 80, 3, 9, 2))
    before = ragged.recorded.run(given.tensors)[0]
    with torch.no_grad():
        ragged.fused.model.model.embed_tokens.weight.mul_(1.5)
    after = ragged.recorded.run(given.tensors)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, ragged.fused(*given)[0])


def test_errors_of_operators() -> None:
    """Inputs are counted; an operator that refuses raises as it does in Python, and later passes run."""
    ragged = packed(tiny("llama"))
    given = example(ragged.fused, Sizes(3, 1, 2, 80, 3, 9, 2))
    with pytest.raises(ValueError, match=f"a pass has {len(given.tensors)} inputs, got {len(given.tensors) - 1}"):
        ragged.recorded.run(given.tensors[1:])
    with pytest.raises(IndexError):
        ragged.recorded.run(given._replace(ids=torch.full((1, 3), 10**6)).tensors)
    check_numbers(ragged)


def test_not_on_other_devices() -> None:
    language = LanguageModel(tiny("llama"))
    language.device = torch.device("cuda")
    with pytest.raises(UnsupportedError, match="does not compute on the CPU, for which our operators are"):
        RaggedForward(language)


# --- sessions over recorded passes


@pytest.fixture(scope="module", params=NAMES)
def language(request: pytest.FixtureRequest) -> LanguageModel:
    language = LanguageModel(tiny(request.param), backend="packed")
    assert language.ragged.recorded is not None
    return language


class TestPasses:
    def test_hidden_states(self, language: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """They come from the same passes: of all layers or some, as the model gives them, beside the same logits."""
        twin, below = twin_of(language, 2), twin_of(LanguageModel(language.model, backend="eager"), 2)
        for one in (twin, below):
            one.prefill(20, 4)
        trees, keep = [twin.chain(3), twin.tree()], [2, 7]
        with monkeypatch.context() as patch:
            patch.setattr(language.ragged.fused, "output", None)
            plain, some, whole = (twin.forward(trees, keep, hidden=layers) for layers in (False, [0, 2], True))
        expected = below.forward(trees, keep, hidden=True)
        for row in range(2):
            assert plain[row].hidden_states is None
            assert torch.equal(some[row].logits, plain[row].logits)
            assert torch.equal(whole[row].logits, plain[row].logits)
            assert [state is not None for state in some[row].hidden_states] == [True, False, True]
            for mine, own, part in zip(
                whole[row].hidden_states, expected[row].hidden_states, some[row].hidden_states, strict=True
            ):
                torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-4)
                assert part is None or torch.equal(part, mine)

    @pytest.mark.parametrize(
        ("name", "numbers", "words"),
        [
            ("typical", (0.5,), "there is no filter typical"),
            ("top", (), "filter top has at least 3 numbers, got 0"),
            ("timestamps", (50, 3, -1, 1), "filter timestamps has at least 5 numbers, got 4"),
            ("top", (-1, 0.5, 1), "must be at least 0, got -1"),
            ("top", (0, 0.5, 0), "must be at least 1, got 0"),
            ("suppress", (0, math.inf, -3), "tokens must be at least 0, got -3"),
        ],
    )
    def test_filters_that_are_none(
        self, language: LanguageModel, name: str, numbers: tuple[float, ...], words: str
    ) -> None:
        """What a sampler of somebody's own may tell by mistake is an error."""
        twin = twin_of(language, 1)
        twin.prefill(9)
        with pytest.raises(ValueError, match=words):
            twin.session.draft_chain(twin.rows, [[7]], [ChainRule(2, 64, Choice([Filter(name, numbers)]))])

    def test_a_chain_of_numbers_that_are_none(self, language: LanguageModel) -> None:
        """A model that overflows has no guess, and says so."""
        twin = twin_of(language, 1)
        twin.prefill(9)
        weight = next(language.model.get_output_embeddings().buffers())
        before, budget = weight.clone(), Budget(9, edges=(2.0,), bases=(0.0, 0.0), rates=(1.0, 1.0))
        weight.fill_(math.nan)
        try:
            [[[token, sure]]] = twin.session.draft_chain(twin.rows, [[7]], [ChainRule(6, 64, budget=budget)]).guesses
        finally:
            weight.copy_(before)
        assert token == 0
        assert math.isnan(sure)

    def test_generation_is_the_same(self, language: LanguageModel) -> None:
        name = language.config.model_type
        eager = SpecGenerator(tiny(name), tiny(name, seed=1), backend="eager")
        given = tiny_inputs(name, 2) if name in ENCODER_DECODERS else {"input_ids": torch.tensor([[5, 9, 33, 7, 12]])}
        given |= {"max_new_tokens": 20, "do_sample": False}
        expected = eager.generate(**given)
        for backend in ("eager", "packed"):
            draft = LanguageModel(tiny(name, seed=1), backend=backend)
            fast = SpecGenerator(language, draft).generate(**given)
            assert torch.equal(fast.sequences, expected.sequences)
            assert fast.stats.num_accepted_draft_tokens == expected.stats.num_accepted_draft_tokens
