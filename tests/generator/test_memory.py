"""A memory that outlives a call: it changes how many passes a text takes, never the text."""

from pathlib import Path
from typing import Any

import pytest

from specdec import OptionError, SpecGenerator
from specdec.core.stats import Stats
from specdec.generator.memories import DEFAULT
from specdec.models import LanguageModel
from specdec.proposers import HybridDraft, ModelDraft, SuffixDraft
from tests.folders import WIDTH, byte_tokenizer
from tests.matrix import endless, some
from tests.tiny import tiny

IDS = [[5, 6, 7], [9, 8, 4, 3]]
PLAIN = endless(16)
RUN: dict[str, Any] = {**PLAIN, "schedule": "constant", "num_assistant_tokens": 11}
TEXT = "def reverse(word):\n    return word[::-1]\n"


def share(stats: Stats | None) -> float:
    """The share of new tokens that were guessed."""
    assert stats is not None
    return stats.num_accepted_draft_tokens / stats.num_new_tokens


@pytest.mark.parametrize(
    "draft",
    ["suffix", "ngram", ("suffix", tiny("llama", seed=1)), SuffixDraft()],
    ids=["suffix", "ngram", "hybrid", "own"],
)
def test_a_prompt_that_comes_again_is_answered_from_memory(draft: Any) -> None:
    """The second call guesses nearly all tokens; a generator without a memory guesses what it guessed before."""
    [text] = SpecGenerator(tiny("llama")).generate(IDS[:1], **PLAIN).new_tokens()
    remembers, forgets = (SpecGenerator(tiny("llama"), draft, memory=memory) for memory in (True, False))
    shares = {}
    for name, generator in (("first", remembers), ("second", remembers), ("other", forgets), ("again", forgets)):
        out = generator.generate(IDS[:1], **RUN)
        assert out.new_tokens() == [text]
        shares[name] = share(out.stats)
    assert shares["second"] > 0.8 > shares["first"]
    assert isinstance(draft, tuple) or shares["again"] == shares["other"] == shares["first"]


def test_every_draft_that_copies_remembers() -> None:
    """A HybridDraft object and `prompt_lookup_num_tokens` had no memory, and nothing told so."""
    pair = HybridDraft(SuffixDraft(), ModelDraft(LanguageModel(tiny("llama", seed=1))))
    for draft, how in ((pair, {}), (None, {"prompt_lookup_num_tokens": 9})):
        generator = SpecGenerator(tiny("llama"), draft, memory=True)
        first, again = (share(generator.generate(IDS[:1], **PLAIN, **how).stats) for _ in range(2))
        assert again > first, draft
    assert pair.text.memory is None


@pytest.mark.parametrize("how", some("coupled", "beams", "ranked").values(), ids=str)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_every_strategy_takes_one(how: dict[str, Any], family: str) -> None:
    """Texts stay what they are while the memory fills with right and with wrong answers."""
    prompts = [*IDS, [5, 6, 8], IDS[0]]
    expected = [SpecGenerator(tiny(family)).generate([ids], **PLAIN, **how).new_tokens() for ids in prompts]
    generator = SpecGenerator(tiny(family), "suffix", memory=True)
    for ids, text in zip(prompts, expected, strict=True):
        assert generator.generate([ids], **RUN, **how).new_tokens() == text


def test_another_model_s_answers_change_nothing() -> None:
    """A memory full of wrong continuations of the very prompt is a draft that is always wrong."""
    plain = SpecGenerator(tiny("llama")).generate(IDS, **PLAIN).new_tokens()
    generator = SpecGenerator(tiny("llama"), "suffix", memory=True)
    assert generator.memory is not None
    for ids, text in zip(IDS, plain, strict=True):
        wrong = [*ids]
        for token in text:
            wrong.append((token + 1) % 32)
            generator.memory.remember(wrong, "")
    out = generator.generate(IDS, **RUN)
    assert out.new_tokens() == plain


def test_salts_do_not_see_each_other() -> None:
    """A second caller's first call guesses like a first call. Closing forgets all texts."""
    generator = SpecGenerator(tiny("llama"), "suffix", memory=True)
    first, again, other = (
        share(generator.generate(IDS[:1], **RUN, cache_salt=salt).stats) for salt in ("one", "one", "two")
    )
    assert other == first < 0.5 < again
    assert generator.memory is not None
    generator.close()
    assert not generator.memory.nbytes


def test_files_and_folders_are_known_from_the_start(tmp_path: Path) -> None:
    """Hidden files and those that are no text are left out of a folder; every salt sees the others."""
    (tmp_path / ".git").mkdir()
    for name, content in (("a.py", TEXT.encode()), ("b.bin", b"\0\xff"), (".git/c", b"hidden")):
        (tmp_path / name).write_bytes(content)
    tokenizer = byte_tokenizer()
    model, ids = tiny("llama", vocab=WIDTH), tokenizer.encode(TEXT, add_special_tokens=False)
    for memory in (tmp_path, [str(tmp_path / "a.py")]):
        generator = SpecGenerator(model, "suffix", tokenizer=tokenizer, memory=memory)
        assert generator.memory is not None
        assert generator.memory.lookup(ids[:9], "salt", 5).tokens == ids[9:14]
        assert generator.memory.lookup(tokenizer.encode("hid", add_special_tokens=False), "", 5) is None
        plain = SpecGenerator(model, tokenizer=tokenizer).generate("def reverse(", **PLAIN)
        assert generator.generate("def reverse(", **RUN).texts == plain.texts


@pytest.mark.parametrize("draft", [None, "none"])
def test_files_without_a_draft(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is loaded. (They were refused after minutes of loading.)"""
    monkeypatch.setattr("specdec.generator.generator.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(OptionError, match="`memory` names files for drafts that copy"):
        SpecGenerator("zoo:python-code", draft, memory=__file__)


def test_files_make_a_small_draft_model_copy() -> None:
    """A model below 32 MiB copies nothing by itself, and who names files wants copies."""
    model, tokenizer = tiny("llama", vocab=WIDTH), byte_tokenizer()
    draft = SpecGenerator(model, tiny("llama", vocab=WIDTH, seed=1), tokenizer=tokenizer, memory=__file__).draft
    assert type(draft).__name__ == "HybridDraft"


def test_more_files_than_fit_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones stay. (All were read before the first were dropped.)"""
    monkeypatch.setattr("specdec.generator.memories.MEMORY_BYTES", 20_000)
    (tmp_path / "large").write_text("x" * 20_001)
    for number in range(20):
        (tmp_path / f"{number:02}").write_text(f"{number:02}" * 30)
    with pytest.warns(UserWarning, match="not all files fit"):
        memory = SpecGenerator(tiny("llama", vocab=WIDTH), "suffix", tokenizer=byte_tokenizer(), memory=tmp_path).memory
    assert memory is not None
    assert memory.lookup(byte_tokenizer().encode("00000", add_special_tokens=False), "", 1) is not None


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (-1, "a number of bytes"), ([], "files and folders"), ([3, "a"], "files and folders"),
        (1.5, "files and folders"), ("missing", "missing has no text in UTF-8 \\(No such file"),
        (__file__, "pass draft='suffix'"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_memories_are_told(memory: Any, words: str) -> None:
    """The error names the argument, and what can be passed; files without a draft that copies are refused."""
    with pytest.raises(OptionError, match=words):
        SpecGenerator(tiny("llama", vocab=WIDTH), tokenizer=byte_tokenizer(), memory=memory)


@pytest.mark.parametrize("draft", [None, "none", tiny("llama", seed=1)], ids=["nothing", "none", "a model"])
def test_a_memory_that_nothing_reads_is_told(draft: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A line of the log names the draft and the way out, unless the memory is a program's default. (Nothing did.)"""
    caplog.set_level("INFO", "specdec")
    for memory, lines in ((DEFAULT, 0), (False, 0), (True, 1), (2**20, 1)):
        caplog.clear()
        SpecGenerator(tiny("llama"), draft, memory=memory)
        told = [
            line for line in caplog.messages if line.startswith("`memory` is for drafts that copy, and the draft is ")
        ]
        assert len(told) == lines
        assert all(line.endswith("pass draft='suffix', or leave out `memory`") for line in told)
    caplog.clear()
    SpecGenerator(tiny("llama"), "suffix", memory=True)
    assert not any("`memory`" in line for line in caplog.messages)


def test_bad_files_are_told(tmp_path: Path) -> None:
    """Empty folders and files that are no text, and files that nothing can read into tokens."""
    (empty := tmp_path / "empty").mkdir()
    (binary := tmp_path / "binary").write_bytes(b"a\xff")
    for memory, words in (
        (empty, "no file in it"),
        (tmp_path, "can't decode"),
        (binary, "can't decode"),
        (__file__, "pass `tokenizer=`"),
    ):
        with pytest.raises(OptionError, match=words):
            SpecGenerator(tiny("llama"), "suffix", memory=memory)
