"""Passes that C++ repeats as they were recorded: the same numbers as by Python, and chains in one call."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec import Loading, SpecGenerator
from specdec.core.budget import Budget
from specdec.core.drafts import ChainRule, Choice, Filter
from specdec.core.work import Work
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedySampler
from specdec.errors import UnsupportedError
from specdec.models import LanguageModel, Session, load_model
from specdec.models.backends.ragged import RaggedForward
from specdec.models.backends.recorded import Sizes, example
from tests.folders import saved, saved_gguf
from tests.models.exact import Twin, twin_of
from tests.proposers.fakes import FakeSequence, choosing
from tests.tiny import ENCODER_DECODERS, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
NAMES = ("llama", "gemma2", "whisper", "t5")

CONFIDENT = Budget(9, edges=(2.0,), bases=(0.0, 0.0), rates=(1.0, 1.0))  # guesses are as good as the draft believes


def chained(session: Session, row: int, text: list[int], rule: ChainRule) -> list[tuple[int, float]]:
    """The chain of one row, which holds as much text as before."""
    before = session.length(row)
    [found] = session.draft_chain([row], [text], [rule]).guesses
    assert session.length(row) == before + len(text) + len(found) - 1
    session.truncate([row], [before])
    return found


def same_guesses(found: Any, expected: Any) -> bool:
    """The same tokens, and nearly the same probabilities."""
    (tokens, sure), (others, beliefs) = zip(*found, strict=True), zip(*expected, strict=True)
    return tokens == others and sure == pytest.approx(beliefs, rel=1e-4)


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
    def test_passes(self, language: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chains, trees and rows of any number, past the first capacity, and none of it in the backend below."""
        twin = twin_of(language, 3)
        with monkeypatch.context() as patch:
            patch.setattr(language.ragged.fused, "output", None)
            twin.wander()
            twin.step([twin.chain(150), twin.chain(1), twin.tree()], [2, 1, 1], [list(range(150)), [0], [5, 6]])
            twin.leave(0, 2)
            for size in (1, 1, 2, 1):
                twin.step([twin.chain(size)], [size], [[0]])

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

    @pytest.mark.parametrize("prompt", [9, 40])
    def test_chains(self, language: LanguageModel, prompt: int) -> None:
        """A chain in one call makes the guesses of passes one by one, ends where those would, and leaves as much."""
        twin = twin_of(language, 2)
        twin.prefill(prompt, 4)
        session, row, text = twin.session, twin.rows[0], [7, 12, 5]
        pick = partial(GreedySampler(Processors(), 64).pick, FakeSequence([0]))
        whole = [(token, sure) for token, sure, _ in self.picked(twin, row, text, 6, pick)]
        passes = session.passes
        for most in (1, 6):
            assert same_guesses(chained(session, row, text, ChainRule(most, 64, budget=CONFIDENT)), whole[:most])
        assert session.passes == passes + 7
        assert chained(session, row, text, ChainRule(6, 64)) == [(token, 1.0) for token, _ in whole]
        tokens, sure = zip(*whole, strict=True)
        # The chances of the first two are enough, of three not.
        at_least = math.prod(sure[:2]) * 0.9999
        assert len(chained(session, row, text, ChainRule(6, 64, budget=replace(CONFIDENT, node_cost=at_least)))) == 3
        last = tokens.index(tokens[2])
        assert len(chained(session, row, text, ChainRule(6, 64, ends={tokens[2]}))) == last + 1
        assert all(token < 9 for token, _ in chained(session, row, text, ChainRule(6, 9)))
        twin.step([twin.chain(2), twin.chain(1)], [2, 1], [[0, 1], [0]])  # as if nothing had been

    def test_chains_of_several_rows(self, language: LanguageModel) -> None:
        """Each row's guesses are those of its own chain alone, however long the others are and however they end."""
        twin = twin_of(language, 5)
        twin.prefill(9, 40, 4, 7, 12)
        session, rows, texts = twin.session, twin.rows, [[7, 12, 5], [9], [20, 21], [3], [8, 4]]
        drawn = Choice([Filter("temperature", (0.7,)), Filter("top", (9, 1.0, 1))], 1 << 63, 3)
        rules = [
            ChainRule(5, 64, budget=CONFIDENT),
            ChainRule(1, 64),
            ChainRule(7, 64, drawn, CONFIDENT),
            ChainRule(6, 60, budget=Budget(6, None, (0.5,), (0.1, 0.0), (0.7, 1.0), node_cost=0.2)),
            ChainRule(6, 64, ends={*range(0, 64, 2)}),
        ]
        alone = [chained(session, *given) for given in zip(rows, texts, rules, strict=True)]
        passes = session.passes
        found = session.draft_chain(rows, texts, rules).guesses
        assert len({*map(len, alone)}) > 2
        for mine, own, held, text, row in zip(found, alone, twin.texts, texts, rows, strict=True):
            assert same_guesses(mine, own)
            assert session.length(row) == len(held) + len(text) + len(mine) - 1
        assert session.passes == passes + max(map(len, found))
        session.truncate(rows, [0, *(len(text) for text in twin.texts[1:])])  # one row begins anew beside the others
        anew = session.draft_chain(rows, [twin.texts[0] + texts[0], *texts[1:]], rules).guesses
        assert [[token for token, _ in mine] for mine in anew] == [[token for token, _ in mine] for mine in found]
        session.truncate(rows, [len(text) for text in twin.texts])
        firsts = session.draft_chain(rows, texts, [ChainRule(1, 64, budget=CONFIDENT)] * 5).guesses
        together = sum(sure for [(_, sure)] in firsts)  # what they gain
        for share, longest in ((0.9, 2), (1.1, 1)):
            session.truncate(rows, [len(text) for text in twin.texts])
            budget = replace(CONFIDENT, pass_cost=share * together)
            shared = session.draft_chain(rows, texts, [ChainRule(2, 64, budget=budget)] * 5).guesses
            assert {*map(len, shared)} == {longest}
        session.truncate(rows, [len(text) for text in twin.texts])
        twin.step([twin.chain(2) for _ in rows], [2] * 5, [[0, 1]] * 5)  # as if nothing had been

    @pytest.mark.parametrize("sampler", choosing(64).values(), ids=choosing(64))
    def test_chosen_in_chains(self, language: LanguageModel, sampler: GreedySampler) -> None:
        """As the sampler picks them and their siblings, whatever it suppresses, cuts off or draws."""
        twin = twin_of(language, 1)
        twin.prefill(9)
        session, row, text = twin.session, twin.rows[0], [7, 12, 5]
        fake = FakeSequence([*range(9), *text], prompt_length=4)
        beside: list[dict[int, float]] = []

        def pick(guesses: list[int], logits: torch.Tensor, confident: bool) -> tuple[int, float, torch.Tensor | None]:
            token, sure, q = sampler.pick(fake, guesses, logits, confident=confident)
            others = [(other, chance) for other, chance in sampler.likeliest(fake, guesses, logits, 4) if chance]
            beside.append(dict([(other, chance) for other, chance in others if other != token][:3]))
            return token, sure, q

        for confident in (True, False):
            whole = self.picked(twin, row, text, 6, partial(pick, confident=confident))
            budget, count = CONFIDENT if confident else Budget(9), 3 if confident else 0
            given = ChainRule(6, 64, sampler.choice(fake), budget, needs_q=sampler.needs_q, siblings=count)
            [found], [drawn_from], [siblings] = session.draft_chain([row], [text], [given])
            for pairs, expected in zip(siblings, beside, strict=False):
                assert dict(pairs) == (pytest.approx(expected, rel=1e-3) if count else {})
            session.truncate([row], [9])
            assert same_guesses(found, [(token, sure) for token, sure, _ in whole])
            assert (drawn_from is None) != sampler.needs_q
            if drawn_from is not None:
                torch.testing.assert_close(drawn_from, torch.stack([q for *_, q in whole]), rtol=1e-3, atol=1e-5)

    def picked(
        self, twin: Twin, row: int, text: list[int], count: int, pick: Callable[..., Any]
    ) -> list[tuple[int, float, torch.Tensor | None]]:
        """What is picked of passes over one token each."""
        session, before = twin.session, twin.session.length(row)
        [out] = session.run([Work.text(row, text)])
        session.commit([row], [list(range(len(text)))])
        logits, found = out.logits[-1], list[tuple[int, float, torch.Tensor | None]]()
        for _ in range(count):
            found.append(pick([token for token, *_ in found], logits))
            logits = session.run([Work.text(row, [found[-1][0]])])[0].logits[0]
            session.commit([row], [[0]], final=False)
        session.truncate([row], [before])
        return found

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
            chained(twin.session, twin.rows[0], [7], ChainRule(2, 64, Choice([Filter(name, numbers)])))

    def test_a_chain_of_numbers_that_are_none(self, language: LanguageModel) -> None:
        """A model that overflows has no guess, and says so."""
        twin = twin_of(language, 1)
        twin.prefill(9)
        weight = next(language.model.get_output_embeddings().buffers())
        before = weight.clone()
        weight.fill_(math.nan)
        try:
            [[token, sure]] = chained(twin.session, twin.rows[0], [7], ChainRule(6, 64, budget=CONFIDENT))
        finally:
            weight.copy_(before)
        assert token == 0
        assert math.isnan(sure)

    def test_generation_is_the_same(self, language: LanguageModel) -> None:
        name = language.config.model_type
        eager = SpecGenerator(tiny(name), tiny(name, seed=1), backend="eager")
        given = tiny_inputs(name, 2) if name in ENCODER_DECODERS else {"input_ids": torch.tensor([[5, 9, 33, 7, 12]])}
        given |= {"max_new_tokens": 60, "do_sample": False}
        expected = eager.generate(**given)
        for backend in ("eager", "packed"):
            draft = LanguageModel(tiny(name, seed=1), backend=backend)
            fast = SpecGenerator(language, draft).generate(**given)
            assert torch.equal(fast.sequences, expected.sequences)
            assert fast.stats.num_accepted_draft_tokens == expected.stats.num_accepted_draft_tokens
