"""Drafts of the caller's own in a benchmark: heads, those that read hidden states, faulty ones, and their modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specdec import DraftError, OptionError, SpecGenerator
from specdec.bench import exit_state, read_suite
from specdec.bench.parts import Drafting, Mode
from specdec.bench.runner import in_words
from specdec.bench.suite import Cell, digests, import_modules
from specdec.bench.systems import Systems
from specdec.core.drafts import Draft
from specdec.proposers import DRAFTS, FunctionDraft
from tests.folders import WIDTH, byte_tokenizer
from tests.heads import eagle_folder
from tests.tiny import tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target of three layers."""
    folder = tmp_path_factory.mktemp("target")
    byte_tokenizer().save_pretrained(folder)
    tiny("llama", vocab=WIDTH, num_hidden_layers=3).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def keys(keys: dict[str, Any], target: str) -> dict[str, Any]:
    """One prompt, once."""
    Path(keys["prompts"]).write_text("abab" * 20)
    return {**keys, "targets": target, "max_new_tokens": 8, "repeats": 1}


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_head_is_measured(chunk: int | None, measured: Any, tmp_path: Path) -> None:
    """A folder of a head is a draft, with a prompt in chunks too. (It was loaded as a target.)"""
    head = str(eagle_folder(tmp_path / "head", vocab_size=WIDTH, draft_vocab_size=WIDTH))
    found = measured(drafts=head, options={"eos_token_id": [], "prefill_chunk_size": chunk})
    assert exit_state(found) == "ok"
    (group,) = found["groups"]
    assert group["systems"][1]["mean_acceptance_length"] is not None


class Nothing(FunctionDraft):
    @classmethod
    def of(cls, target: Any, argument: str | None, name: str = "draft") -> Any:
        FunctionDraft(lambda tokens, k: [])


class Bare:
    pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Nothing, r"`of` of the draft 'mine' must return .*Draft`, got NoneType"),
        (Bare, r"DRAFTS\['mine'\] must be a function .* or a subclass of .*Draft`"),
        (3, r"DRAFTS\['mine'\] must be .* got 3"),
    ],
)
def test_a_wrong_entry_is_refused(kind: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `of` without `return` was measured as plain decoding; the others were AttributeErrors."""
    monkeypatch.setitem(DRAFTS, "mine", kind)
    with pytest.raises(DraftError, match=words):
        SpecGenerator(tiny("llama"), "mine")


def test_a_function_is_a_word(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No class is needed; it takes no argument."""
    monkeypatch.setitem(DRAFTS, "echo", lambda tokens, k: tokens[-1:] * k)
    assert exit_state(measured(drafts="echo")) == "ok"
    with pytest.raises(OptionError, match="`draft` must be a word without an argument, got ':3'"):
        SpecGenerator(tiny("llama"), "echo:3")


def memory() -> Any:
    """A function that guesses the text that it saw last, where that begins like the current one."""
    seen: list[list[int]] = [[]]

    def guess(tokens: list[int], k: int) -> list[int]:
        if seen[-1][: len(tokens)] != tokens:
            seen.append(tokens)
        return seen[-1][len(tokens) :][:k]

    return guess


def test_a_draft_that_remembers(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary says it. (Repeats were the answers.)"""
    monkeypatch.setitem(DRAFTS, "mine", memory())
    result = measured(max_new_tokens=16, repeats=3, warm_up=0, drafts="mine")
    by_repeat = result["groups"][0]["systems"][1]["acceptance_length_by_repeat"]
    [line] = [line for line in result["summary"] if "The draft remembers the answers" in line]
    assert by_repeat[2] > 2 * by_repeat[0]
    assert f"{by_repeat[0]:.2f}, {by_repeat[1]:.2f}, {by_repeat[2]:.2f} by repeat" in line


def test_a_memory_of_files(measured: Any, tmp_path: Path) -> None:
    """Words for drafts that copy know the files in every repeat, and no answer of the repeat before."""
    (file := tmp_path / "file").write_text("def add(a, b):\n    return a + b\n")
    how = {"max_new_tokens": 16, "repeats": 3, "warm_up": 0, "drafts": ["suffix", "early_exit:1"]}
    found = measured(**how, modes=[{"memory": str(file)}])
    lengths = [system["acceptance_length_by_repeat"] for system in found["groups"][0]["systems"][1:]]
    assert [len({*by_repeat}) for by_repeat in lengths] == [1, 1]


@pytest.mark.parametrize("drafts", ["sufix", "suffix+sufix"])
def test_a_misspelt_draft(drafts: str, keys: dict[str, Any]) -> None:
    """Before anything is loaded it is compared with the words. (The error was about `target`.)"""
    with pytest.raises(OptionError, match=r"`drafts` must be .* did you mean 'suffix'"):
        read_suite({**keys, "drafts": drafts})


@pytest.mark.parametrize("drafts", ["markof", "table:9", "suffix+markof"])
def test_a_word_that_nothing_registered(drafts: Any, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a model is loaded. (The hub was asked for it, and plain decoding measured.)"""
    monkeypatch.setattr(SpecGenerator, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(OptionError, match=r"`drafts` must be a registered word, .*--import` the module"):
        measured(drafts=["suffix", drafts])


def test_a_draft_that_its_class_refuses(measured: Any) -> None:
    """Where nothing is left to compare, plain decoding is not measured."""
    found = measured(drafts="early_exit:99")
    assert (exit_state(found), found["groups"][0]["systems"]) == ("failed", [])


def test_an_error_has_its_place() -> None:
    """The file and line, unless specdec raises it on purpose."""
    with pytest.raises(ZeroDivisionError) as mistake:
        _ = 1 / 0
    assert in_words(mistake.value).startswith(f"ZeroDivisionError: division by zero ({__file__}:")
    with pytest.raises(OptionError) as refusal:
        read_suite({})
    assert in_words(refusal.value) == f"OptionError: {refusal.value}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, in which modules are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("own_absent", None, "run the command in its folder, or install it"),
        ("own_needs", "import own_absent", r"\(ModuleNotFoundError: .*own_absent.*failed at .*own_needs.py:1"),
        ("own_broken", "\n\nx = (", r"\(SyntaxError: .*its own code failed at .*own_broken.py:3"),
        ("./own_good.py", "", "`imports` must be the name of a module, got './own_good.py': pass 'own_good'"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_module_that_cannot_be_imported(name: str, code: str | None, words: str) -> None:
    """Only for one that is not found the folder is the advice. (It was for all.)"""
    if code is not None:
        Path(f"{Path(name).stem}.py").write_text(code)
    with pytest.raises(OptionError, match=words):
        import_modules([name])


@pytest.mark.usefixtures("here")
def test_digests_cover_the_code_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module, its package, and the modules of registered drafts. (Only the file of the module that was named.)"""
    monkeypatch.setitem(DRAFTS, "mine", FunctionDraft)  # what the module sets is undone
    package = Path("own_package")
    package.mkdir()
    files = {
        Path("own_entry.py"): "from own_kind import DRAFTS, Kind\nDRAFTS['mine'] = Kind",
        Path("own_kind.py"): "from specdec.proposers import DRAFTS, FunctionDraft\nclass Kind(FunctionDraft): pass",
        package / "__init__.py": "",
        package / "helper.py": "x = 1",
    }
    for file, text in files.items():
        file.write_text(text)
    names = ["own_entry", "own_package.helper"]
    import_modules(names)
    before = digests(names)
    assert before.keys() == {"own_entry", "own_kind", "own_package"}
    for file, text in files.items():
        file.write_text(f"{text}\n# other")
        assert digests(names) != before
        file.write_text(text)
    assert digests(names) == before
    assert digests([]) == {}
    for name in ("own_entry", "own_kind", "own_package.helper", "own_package"):
        del sys.modules[name]


def test_a_draft_describes_itself() -> None:
    """By its class, where it does not say more. (It was an address.)"""

    class Mine(Draft):
        def start(self, vocab_size: int) -> Any: ...

    assert repr(Mine()) == "Mine()"


def test_no_system_keeps_prompts(target: str) -> None:
    """Each reads its prompt in every repeat. (Plain decoding kept it, and was compared with drafts that did not.)"""
    systems = Systems(target, Mode())
    for cell in (None, Cell("suffix", Drafting(schedule="constant"))):
        generator = systems.generator("group", cell)
        outs = [generator.generate([list(range(3, 40))], max_new_tokens=2) for _ in range(2)]
        assert [out.stats.cached_prompt_tokens for out in outs] == [0, 0]
