"""`specdec summarize`: files and stdin in, summaries on stdout, everything else on stderr."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.commands import run_command
from specdec.cli.terminal import Bar
from specdec.options import bundled_models
from specdec.pipelines import Summarizer
from tests.pipelines.models import NEW, UNPRINTABLE, model, tokenizer

TEXT = "The cat sat on the mat. It was warm there. Ünïcödé 版。"
LONG = " ".join(f"Sentence number {i} says nothing much." for i in range(40))
CLEAN = f"suppress_tokens={UNPRINTABLE}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that disagrees with it, and texts."""
    root = tmp_path_factory.mktemp("summaries")
    for name, seed in (("target", 0), ("draft", 1)):
        model("t5", seed, prefix="s: ").save_pretrained(root / name)
        tokenizer(ends=True, most=300).save_pretrained(root / name)
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    (root / "long.txt").write_text(LONG, encoding="utf-8")
    (root / "bom.txt").write_text(TEXT, encoding="utf-8-sig")
    (root / "empty.txt").write_text(" \n")
    (root / "latin.txt").write_bytes("Höhe".encode("latin-1"))
    (root / "binary").write_bytes(b"ELF\0\0text")
    return root


@pytest.fixture
def summarize(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `specdec summarize` on files of the folder: exit code, stdout, stderr."""

    def call(*arguments: str, model: str | None = "target") -> tuple[int, str, str]:
        named = [str(folder / a) if (folder / a).exists() else a for a in arguments]
        own = ["--model", str(folder / model)] if model else []
        code = run_command(["summarize", *named, *own, "--max-new-tokens", str(NEW), "--set", CLEAN, "-q"])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The target's own summaries."""
    own = Summarizer(str(folder / "target"), max_new_tokens=NEW, suppress_tokens=UNPRINTABLE)
    return {text: own(text)[0]["summary_text"] for text in (TEXT, LONG)}


@pytest.mark.parametrize("draft", ["none", "suffix", "{}", "suffix+{}", "early_exit:1"])
def test_one_file(draft: str, summarize: Any, expected: dict[str, str], folder: Path) -> None:
    """Stdout is the summary alone, long text or short, with every draft."""
    for name, text in (("text.txt", TEXT), ("long.txt", LONG)):
        assert summarize(name, "--draft", draft.format(folder / "draft")) == (0, expected[text] + "\n", "")


def test_several_files(summarize: Any, expected: dict[str, str], folder: Path) -> None:
    """Each under its name, in any batch; a byte order mark is no text."""
    names = [str(folder / name) for name in ("text.txt", "long.txt", "bom.txt")]
    texts = [expected[TEXT], expected[LONG], expected[TEXT]]
    out = "".join(f"── {name} ──\n{text}\n" for name, text in zip(names, texts, strict=True))
    assert summarize(*names) == (0, out, "")
    assert summarize(*names, "--batch-size", "1") == (0, out, "")


def test_the_share_of_the_work(summarize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all texts, a long one by its pieces. (It began anew with every batch, and short texts had none.)"""
    heard = list[tuple[float, int, str]]()
    monkeypatch.setattr(Bar, "__call__", lambda _, *step: heard.append(step))
    summarize("text.txt", "bom.txt", "long.txt", "--batch-size", "1", "--chunk-tokens", "150")
    shares = [(done, whole) for done, whole, doing in heard if doing.startswith("summarizing")]
    assert shares[:3] == [(0, 3), (1, 3), (2, 3)]
    assert all(2 <= done < 3 == whole for done, whole in shares[3:])
    assert len({*shares}) > 5


def test_files_of_their_own(summarize: Any, expected: dict[str, str], tmp_path: Path) -> None:
    """--output-dir holds one file per text, and nothing goes to standard output."""
    folder = tmp_path / "out"
    assert summarize("text.txt", "long.txt", "--output-dir", str(folder)) == (0, "", "")
    for name, text in (("text", TEXT), ("long", LONG)):
        assert (folder / f"{name}.txt").read_text(encoding="utf-8") == expected[text] + "\n"
    assert summarize("text.txt", "--format", "json", "--output-dir", str(folder)) == (0, "", "")
    assert json.loads((folder / "text.json").read_text(encoding="utf-8"))["summary_text"] == expected[TEXT]
    (tmp_path / "text.md").write_text(TEXT)
    code, out, err = summarize("text.txt", str(tmp_path / "text.md"), "--output-dir", str(folder))
    assert (code, out, "twice" in err) == (2, "", True)
    code, out, err = summarize(str(folder / "text.txt"), "--output-dir", str(folder))
    assert (code, out, "would write over" in err) == (2, "", True)
    assert (folder / "text.txt").read_text(encoding="utf-8") == expected[TEXT] + "\n"


def test_an_interrupt_names_the_folder(summarize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before Ctrl-C lies there; the line told a number alone."""
    decode, calls = Summarizer.summarize, list[Any]()

    def interrupted(self: Summarizer, texts: Any, **options: Any) -> Any:
        calls.append(texts)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return decode(self, texts, **options)

    monkeypatch.setattr(Summarizer, "summarize", interrupted)
    code, _, err = summarize("text.txt", "long.txt", "--batch-size", "1", "--output-dir", str(tmp_path))
    assert (code, f"1 of 2 are done and in {tmp_path}; leave these files out to resume" in err) == (130, True)


def test_folders(expected: dict[str, str], folder: Path, tmp_path: Path, called: Any) -> None:
    """Their texts are summarized, unreadable ones told and left out. (A folder was an error, and one ended all.)"""
    inside = tmp_path / "texts" / "more"
    inside.mkdir(parents=True)
    for name, content in (("a.MD", TEXT.encode()), ("b.txt", b"\xff"), ("more/c.rst", TEXT.encode()), ("d.py", b"x")):
        (inside.parent / name).write_bytes(content)
    flags = ["--model", folder / "target", "--max-new-tokens", NEW, "--set", CLEAN]
    out, err = called("summarize", inside.parent, *flags, code=1)
    names = [inside.parent / "a.MD", inside / "c.rst"]
    assert out == "".join(f"── {name} ──\n{expected[TEXT]}\n" for name in names)
    assert "b.txt is not text in UTF-8" in err
    assert f"note: 2 of 2 summaries are cut at {NEW} tokens: raise --max-new-tokens" in err


def test_stdin(summarize: Any, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads it, alone or among files."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert summarize("-") == (0, expected[TEXT] + "\n", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert f"── - ──\n{expected[TEXT]}\n" in summarize("long.txt", "-")[1]


def test_json(summarize: Any, expected: dict[str, str], folder: Path) -> None:
    """One object: every file's summary and parts, statistics, settings and versions."""
    files = ("text.txt", "long.txt")
    code, out, err = summarize(*files, "--stats")
    assert (code, expected[TEXT] in out) == (0, True)
    assert "target passes" in err
    code, out, err = summarize(*files, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"documents", "stats", "settings", "versions"}
    assert [d["summary_text"] for d in found["documents"]] == [expected[TEXT], expected[LONG]]
    assert [d["file"] for d in found["documents"]] == [str(folder / "text.txt"), str(folder / "long.txt")]
    assert [d["finish_reasons"] for d in found["documents"]] == [["length"]] * 2
    first, second = (d["parts"] for d in found["documents"])
    assert first == [1]
    assert second[0] > second[-1] == 1
    assert found["stats"]["num_new_tokens"] == NEW * (sum(second) + 1)
    assert [found["settings"][name] for name in ("draft", "draft_kind")] == ["auto", "suffix"]


def test_pieces_and_truncation(summarize: Any) -> None:
    """Smaller pieces are more of them, and a truncated text is one."""
    parts = {
        flag: json.loads(summarize("long.txt", *flag, "--format", "json")[1])["documents"][0]["parts"]
        for flag in ((), ("--chunk-tokens", "150"), ("--truncate",), ("--template", "Sum up: {text}"))
    }
    assert parts[("--chunk-tokens", "150")][0] > parts[()][0] > 1
    assert parts[("--template", "Sum up: {text}")][0] > 1
    assert parts[("--truncate",)] == [1]


def test_the_checkpoints_length(folder: Path, called: Any) -> None:
    """It is the limit where no flag sets one, and 128 where it has none either."""
    target = folder / "limited"
    model("t5", max_length=21).save_pretrained(target)
    tokenizer(ends=True).save_pretrained(target)
    for name, length in ((target, 20), (folder / "target", 128)):
        flags = ["--model", str(name), "--format", "json", "--set", "eos_token_id=[]"]
        out = called("summarize", folder / "text.txt", *flags).out
        assert json.loads(out)["stats"]["num_new_tokens"] == length


def test_demo(called: Any) -> None:
    """The package's own functions, by its own model: each summary begins with the signature."""
    out, err = called("summarize", "--demo", "--format", "json")
    found = json.loads(out)
    assert err == ""
    assert [d["file"] for d in found["documents"]] == list(bundled_models.functions())
    for document, text in zip(found["documents"], bundled_models.functions().values(), strict=True):
        assert document["summary_text"].startswith(text.splitlines()[0])
    assert found["settings"]["draft"] == "zoo:python-summary"


ERRORS = [
    (["-"], "error: standard input is empty: there is nothing to summarize\n"),
    ([], "no file was named: pass FILE, - to read stdin, or --demo for bundled texts"),
    (["no-such-file.txt"], "no-such-file.txt cannot be read"),
    (["target"], "target has no txt, md or rst file (a model is named with --model)"),
    (["empty.txt"], "empty.txt is empty: there is nothing to summarize"),
    (["latin.txt"], "latin.txt is not text in UTF-8"),
    (["binary"], "binary contains zero bytes, so it is no text file"),
    (["text.txt", "text.txt"], "text.txt was named twice"),
    (["text.txt", "--demo"], "--demo has its own texts"),
    (["text.txt", "--format", "xml"], "xml"),
    (["text.txt", "--batch-size", "0"], "--batch-size"),
    (["text.txt", "--chunk-tokens", "0"], "--chunk-tokens"),
    (["text.txt", "--template", "Summarize!"], "`template` must be text with {text} in it"),
    (["text.txt", "--draft", "sufix"], "did you mean 'suffix'?"),
]


@pytest.mark.parametrize(("arguments", "words"), ERRORS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_usage_errors(arguments: list[str], words: str, summarize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, nothing on stdout, one line on stderr."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    code, out, err = summarize(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_no_model(folder: Path, called: Any) -> None:
    """The error names the flag."""
    asked = "summarize", folder / "text.txt"
    assert "no target was named: pass --model" in called(*asked, code=2).err
    assert "`--model` must be a hub id, a folder or one of zoo:" in called(*asked, "--model", "zoo:nope", code=2).err
