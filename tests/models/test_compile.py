"""The second backend: one compiled function for all passes, made in a process of its own and kept on disk."""

import importlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdec import SpecGenerator, kernels
from specdec.core.budget import Budget
from specdec.core.drafts import ChainRule, Choice, Filter
from specdec.core.work import Work
from specdec.decoding.processors import Processors
from specdec.decoding.samplers import GreedySampler
from specdec.errors import UnsupportedError
from specdec.kernels.kept import put
from specdec.models import LanguageModel, Session
from specdec.models.backends import compiled as compiled_module
from specdec.models.backends.compiled import CompiledForward, code_key
from specdec.models.backends.compiler import KeptCode, _explained, _without_weights
from specdec.models.backends.ragged import RaggedForward
from tests.models.exact import Twin, twin_of
from tests.proposers.fakes import FakeSequence, choosing
from tests.tiny import ENCODER_DECODERS, tiny, tiny_inputs

pytestmark = pytest.mark.usefixtures("built")
NAMES = ("llama", "gemma2", "whisper", "t5")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing was compiled before."""
    place = tmp_path / "compiled"
    monkeypatch.setenv("SPECDEC_COMPILED", str(place))
    compiled_module._tell.cache_clear()
    return place


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets what the process that compiles in `$folder` does, a line of shell; `$failed` is for the reason."""

    def set_to(line: str) -> None:
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nfolder="$3"; failed="$(dirname "$3")/failed"\n{line}\n')
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return set_to


def compiled(model: nn.Module) -> CompiledForward:
    made = LanguageModel(model, backend="compiled").ragged.compiled
    made.wait(600)
    return made


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


def ragged(name: str = "llama", **options: object) -> RaggedForward:
    return RaggedForward(LanguageModel(tiny(name, **options)))


def key(own: RaggedForward) -> str:
    return code_key(own.model)


# --- around the compiler


def test_a_compiler_that_fails(cache: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """Passes stay as they were, a warning ends with the reason, once, and the next load tries again."""
    compiler(f'echo hello > "$failed"; echo no such compiler >> "$failed"; echo once >> {cache}/count; rm -r "$folder"')
    for _ in range(2):
        language = LanguageModel(tiny("llama"), backend="compiled")
        assert not language.ragged.compiled.wait(60)
    [line] = [message for message in caplog.messages if "not compiled" in message]
    assert line.endswith("they run as before: no such compiler")
    assert (cache / "count").read_text() == "once\n" * 2
    twin = Twin(language, 2)
    twin.prefill(9, 4)
    twin.step([twin.tree(), twin.chain(1)], [7, 1], [[0], [0]])
    assert [path.name for path in cache.glob("*/*")] == ["failed"]


def test_a_killed_compiler(cache: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """As when memory runs out: a warning says so, and the next one deletes what it left."""
    compiler('touch "$folder"/passes.pt2; kill -9 $$')
    for _ in range(2):
        assert not compiled(tiny("llama")).ready
        assert caplog.messages[-1].endswith("they run as before: their compiler was killed")
        assert len([*cache.glob("*/*")]) == len([*cache.glob("*/tmp*/passes.pt2")]) == 1
        compiled_module._tell.cache_clear()


@pytest.mark.parametrize(
    ("line", "program", "told"),
    [
        ("", "nosuchcompiler", "CXX names nosuchcompiler, which is not here: name a C\\+\\+ compiler, or unset it"),
        ('$CXX and more > "$failed"', "echo 'with arguments'", "with arguments and more"),  # as of ccache
        # files of others may be broken
        ('echo "$TORCHINDUCTOR_CACHE_DIR" > "$failed"', "", "/compiled/[0-9a-f]+/tmp.*"),
    ],
)
def test_what_compilers_are_told(
    line: str,
    program: str,
    told: str,
    cache: Path,
    compiler: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line with the way out where there is none, a program with its arguments, and a folder of its own."""
    if program:
        monkeypatch.setenv("CXX", program)
    compiler(line)
    assert not compiled(tiny("llama")).ready
    assert re.search(f"as before: .*{told}$", caplog.messages[-1])


def test_a_broken_compiler() -> None:
    """torch's error names its own options."""
    error = 'InductorError: InvalidCxxCompiler: No working C++ compiler found: (None, "x")'
    assert _explained(error).endswith("does not compile: mend it, or name another compiler in CXX")


def test_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, homeless: None) -> None:
    """Nothing is kept, and one line says which folder is missing. (The model could not be loaded.)"""
    for name in ("SPECDEC_COMPILED", "SPECDEC_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    assert not compiled(tiny("llama")).ready
    assert "there is no home folder to keep them in: name one in SPECDEC_KERNELS" in caplog.messages[-1]


def test_a_model_that_cannot_be_sent(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class that no other process could import."""

    class Local(nn.SiLU):
        pass

    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = Local()
    assert not compiled(model).ready
    assert "Local" in caplog.messages[-1]


@pytest.mark.parametrize("broken", ["calls.pt", "passes.pt2"])
def test_code_of_no_use(
    broken: str, cache: Path, compiler: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not as it was put there goes, and is made anew. (Code that was cut short could kill the process.)"""
    compiler('echo no > "$failed"')
    place = cache / key(ragged())
    place.mkdir(parents=True)
    for name in ("calls.pt", "passes.pt2"):
        (tmp_path / name).write_bytes(b"a whole file")
        put(tmp_path / name, place / name)
    (place / broken).write_bytes(b"a whole")
    made = compiled(tiny("llama"))
    assert any(re.search(f"are deleted: {broken} is broken", message) for message in caplog.messages)
    assert caplog.messages[-1].endswith("they run as before: no")
    assert not made._code.exists


def test_code_that_says_something_else(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its logits are compared with those of the passes that it takes the place of."""

    def load(*_: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda given: [torch.ones(1, len(given[2]), 64)])

    def begin(code: KeptCode, *_: object) -> None:
        code.folder.mkdir()
        for name in ("calls.pt", "passes.pt2"):
            torch.save({"constants": {}, "held": [], "calls": [], "outputs": []}, tmp_path / name)
            put(tmp_path / name, code.folder / name)

    monkeypatch.setattr(KeptCode, "begin", begin)
    monkeypatch.setattr(kernels, "passes", load)
    assert not compiled(tiny("llama")).ready
    assert caplog.messages[-1].endswith("compiled code gives other logits")


def test_not_on_other_devices() -> None:
    """The code is made for the CPU, and somebody who asks for it elsewhere is told so."""
    language = LanguageModel(tiny("llama"))
    language.device = torch.device("cuda")
    with pytest.raises(UnsupportedError, match="does not compute on the CPU, for which passes are compiled"):
        RaggedForward(language)


def test_what_code_depends_on() -> None:
    """Not on weights, but on sizes, dtype, options, and numbers that the compiler writes into the code."""
    keys = [key(own) for own in (ragged(), ragged(seed=1), ragged(name_or_path="moved"))]
    assert len(set(keys)) == 1
    half = RaggedForward(LanguageModel(tiny("llama").bfloat16()))
    others = [
        half,
        ragged(vocab=70),
        ragged(rms_norm_eps=1e-3),
        ragged("gpt2"),
        ragged(rope_parameters={"rope_theta": 50.0, "rope_type": "default"}),
    ]
    assert len({keys[0], *map(key, others)}) == 6


def module(folder: Path, activation: str) -> nn.Module:
    """Of a class from a file of its own, imported anew; the file beside it says what it computes."""
    package = folder / "transformers_modules"
    package.mkdir(exist_ok=True)
    (package / "helper.py").write_text(f"from torch.nn.functional import {activation} as act\n")
    code = "from torch import nn\nfrom . import helper\nclass Own(nn.Module):\n  forward = staticmethod(helper.act)\n"
    (package / "modeling.py").write_text(code)
    for known in [one for one in sys.modules if one.startswith(package.name)]:
        del sys.modules[known]
    importlib.invalidate_caches()
    return importlib.import_module(f"{package.name}.modeling").Own()  # type: ignore[no-any-return]


def first_hook(*_: object) -> None: ...


def second_hook(*_: object) -> None: ...


def test_what_code_depends_on_besides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code of models that came with their own, all Python of passes, and functions that were put into modules.

    (Only files of this package's modules counted, and five others.)
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def keyed(change: Callable[[Any], object]) -> str:
        model = tiny("llama")
        change(model.model.layers[0].mlp)
        return key(RaggedForward(LanguageModel(model)))

    remote = [
        keyed(lambda mlp, name=name: setattr(mlp, "act_fn", module(tmp_path, name)))
        for name in ("silu", "relu", "silu")
    ]
    assert remote[0] == remote[2] != remote[1]
    hooked = [keyed(lambda mlp, hook=hook: mlp.register_forward_hook(hook)) for hook in (first_hook, second_hook)]
    functions = [keyed(lambda mlp, own=own: setattr(mlp, "act", own)) for own in (F.silu, F.relu)]
    values = [
        ("scaling", {"one": 1.0}),
        ("scaling", {"one": 2.0}),
        ("_active", ["one"]),
        ("_active", ["two"]),
    ]  # PEFT's
    adapted = [keyed(lambda mlp, own=own: setattr(mlp, *own)) for own in values]
    assert len({key(ragged()), *remote, *hooked, *functions, *adapted}) == 11
    before, read, root = key(ragged()), Path.read_bytes, Path(kernels.__file__).parents[1]
    for name in ("kernels/ops.py", "models/hf/derived.py"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, own=root / name: read(path) + b"#" * (path == own))
            compiled_module._own_code.cache_clear()
            assert key(ragged()) != before, name
    compiled_module._own_code.cache_clear()
    assert key(ragged()) == before


def test_weights_are_not_sent() -> None:
    """The process that compiles gets shapes; the model keeps its own weights."""
    own, file = ragged(vocab=5000), io.BytesIO()
    weights = sum(p.numel() * p.element_size() for p in own.model.parameters())
    torch.save(_without_weights(own.model), file)
    assert file.tell() < weights / 4
    empty = _without_weights(own.model).model.model
    assert empty.embed_tokens.weight.is_meta
    assert empty.rotary_emb.inv_freq.is_meta
    assert not any(p.is_meta for p in own.model.parameters())


def test_models_that_have_given_hidden_states() -> None:
    """They can be sent as well, as those are that stop early. (Their hooks could not be pickled.)"""
    language = LanguageModel(tiny("llama"))
    language.model(torch.tensor([[5, 6]]), output_hidden_states=True)
    for own in (ragged(), RaggedForward(language), RaggedForward(language.early_exit(1))):
        torch.save(_without_weights(own.model), file := io.BytesIO())
        file.seek(0)
        sent = torch.load(file, weights_only=False)
        assert not any(module._forward_hooks for module in sent.modules())
    assert language.model(torch.tensor([[5, 6]]), output_hidden_states=True).hidden_states


@pytest.mark.parametrize(("name", "reason"), [("mamba", "buffers"), ("bloom", "added to"), ("gptj", "attend")])
def test_models_without_it(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{reason}.*leave out `backend`='compiled'"):
        LanguageModel(tiny(name), backend="compiled")


# --- the code itself


@pytest.fixture(scope="module", params=NAMES)
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    """One of each family, compiled for this module; some thirty seconds each."""
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_COMPILED", str(place))
        language = LanguageModel(tiny(request.param), backend="compiled")
        assert language.ragged.compiled.wait(280)
        yield language


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestCode:
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
        """They come from the same code: of all layers or some, those of the model's own, beside the same logits."""
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
        """As the sampler picks them, whatever it suppresses, cuts off or draws."""
        twin = twin_of(language, 1)
        twin.prefill(9)
        session, row, text = twin.session, twin.rows[0], [7, 12, 5]
        fake = FakeSequence([*range(9), *text], prompt_length=4)
        for confident in (True, False):
            whole = self.picked(twin, row, text, 6, partial(sampler.pick, fake, confident=confident))
            budget = CONFIDENT if confident else Budget(9)
            given = ChainRule(6, 64, sampler.choice(fake), budget, needs_q=sampler.needs_q)
            [found], [drawn_from] = session.draft_chain([row], [text], [given])
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
        weight = language.model.get_output_embeddings().weight.data  # written to so that no copy is told
        kept = weight[33].clone()
        weight[33] = math.nan
        try:
            [[token, sure]] = chained(twin.session, twin.rows[0], [7], ChainRule(6, 64, budget=CONFIDENT))
        finally:
            weight[33] = kept
        assert token == 0
        assert math.isnan(sure)

    def test_kept(self, language: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next model of this structure finds the code and compiles nothing; its weights are its own."""
        monkeypatch.setattr(KeptCode, "begin", None)
        again = LanguageModel(tiny(language.config.model_type, seed=1), backend="compiled")
        assert again.ragged.compiled.ready
        for one in (again, language):
            twin_of(one, 2).prefill(9, 4)

    def test_generation_is_the_same(self, language: LanguageModel) -> None:
        name = language.config.model_type
        eager = SpecGenerator(tiny(name), tiny(name, seed=1), backend="eager")
        given = tiny_inputs(name, 2) if name in ENCODER_DECODERS else {"input_ids": torch.tensor([[5, 9, 33, 7, 12]])}
        given |= {"max_new_tokens": 60, "do_sample": False}
        expected = eager.generate(**given)
        for backend in ("eager", "compiled"):
            draft = LanguageModel(tiny(name, seed=1), backend=backend)
            fast = SpecGenerator(language, draft).generate(**given)
            assert torch.equal(fast.sequences, expected.sequences)
            assert fast.stats.num_accepted_draft_tokens == expected.stats.num_accepted_draft_tokens


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "layers"), [("llama", "num_hidden_layers"), ("whisper", "decoder_layers")])
def test_layers_that_are_alike(name: str, layers: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one function, whose calls make passes and chains."""
    language = LanguageModel(tiny(name, **{layers: 12}), backend="compiled")
    assert language.ragged.compiled.wait(280)
    [file] = cache.glob("*/calls.pt")
    assert [function for function, *_ in torch.load(file)["calls"]] == [0, *[1] * 12, 2]
    TestCode().test_passes(language, monkeypatch)
    TestCode().test_chains(language, 9)
