"""One spelling of a draft, for Python, the command line, files and benchmarks."""

from pathlib import Path

import pytest

from specdec import OptionError
from specdec.options import bundled_models
from specdec.options.drafts import DraftName, read_draft

ZOO = str(bundled_models.pair().draft)
SPELLED = {
    "none": DraftName(),
    "suffix": DraftName("suffix"),
    "early_exit:3": DraftName("early_exit", "3"),
    "suffix+quantized": DraftName("suffix", "quantized"),
    "auto": DraftName(),
    "org/model": DraftName(model="org/model"),
    "zoo:python-code": DraftName(model=ZOO),
    "suffix+org/model": DraftName("suffix", model="org/model"),
    "ngram+zoo:python-code": DraftName("ngram", model=ZOO),
    "ngram+./a+b": DraftName("ngram", model="./a+b"),
    "./suffix": DraftName(model="./suffix"),
    "./suffix+model": DraftName(model="./suffix+model"),
    "model:org/model": DraftName("model", model="org/model"),
    "long" * 2000: DraftName(model="long" * 2000),  # no file can have this name
}
WRONG = {
    "": "got ''", "sufix": "did you mean 'suffix'", "sufix+org/model": "did you mean 'suffix'",
    "suffix+ngarm": "did you mean 'ngram'", "early-exit:2": "did you mean 'early_exit'", "early_exit": "early_exit:N",
    "early_exit:x": "early_exit:N", "early_exit:1+d": "early_exit:N", "zoo:nope": "zoo:python-code",
    "suffix:3": "early_exit:N", "mtp+org/model": "before the", "suffix+": "a model after it",
    "suffix+none": "a model after it", "suffix+ngram": "a model after it", "suffix+ngram+org/model": "a model after it",
    "suffix+zoo:nope": "zoo:python-code",
}  # fmt: skip


@pytest.mark.parametrize("text", SPELLED)
def test_what_a_spelling_names(text: str) -> None:
    assert read_draft(text) == SPELLED[text]


@pytest.mark.parametrize("text", WRONG)
def test_what_names_no_draft(text: str) -> None:
    """The error names the argument and what it takes, before a hub is asked."""
    with pytest.raises(OptionError, match=f"^`--draft` must be .*{WRONG[text]}"):
        read_draft(text, "--draft")


def test_an_existing_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a + in its name, or a name like that of a word; a word itself stays a word."""
    monkeypatch.chdir(tmp_path)
    for name in ("suffix+model", "sufix", "suffix"):
        (tmp_path / name).mkdir()
    assert read_draft("suffix+model") == DraftName(model="suffix+model")
    assert read_draft("suffix+suffix+model") == DraftName("suffix", model="suffix+model")
    assert read_draft("sufix") == DraftName(model="sufix")
    assert read_draft("suffix") == DraftName("suffix")


def test_registered_words() -> None:
    """A caller's word takes any argument, and is no part of a hybrid."""
    words = {"suffix", "mine"}
    assert read_draft("mine:a+b", words=words) == DraftName("mine", "a+b")
    with pytest.raises(OptionError, match="before the"):
        read_draft("mine+org/model", words=words)
