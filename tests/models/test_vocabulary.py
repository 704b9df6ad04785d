"""A draft with a vocabulary of its own guesses from it alone, and the text stays the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specdec import OptionError, SpecGenerator, UnsupportedError
from specdec.models import load
from specdec.models.vocabulary import CutHead, cut_vocabulary
from specdec.options.load import Vocabulary
from specdec.proposers import DRAFTS, MtpDraft
from specdec.proposers.model import ModelProposer
from tests.folders import byte_tokenizer, saved, saved_model
from tests.heads import dflash_folder, eagle_folder, target
from tests.matrix import endless
from tests.proposers.heads.test_blocks import PEAGLE, assistant
from tests.proposers.heads.test_mtp import checkpoint
from tests.tiny import tiny_inputs
from tests.versions import OLD

RUN = endless(16)
IDS = [[5, 9, 12, 5], [7, 8]]


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """All tokens that a draft model guesses."""
    seen: set[int] = set()
    propose = ModelProposer.propose

    def spied(self: ModelProposer, rows: Any, plans: Any) -> Any:
        trees = propose(self, rows, plans)
        seen.update(token for tree in trees for token in tree.tokens)
        return trees

    monkeypatch.setattr(ModelProposer, "propose", spied)
    return seen


WAYS: list[dict[str, Any]] = [
    {},
    {"num_assistant_branches": 3},
    {"do_sample": True, "seed": 2},
    {"num_beams": 2},
    {"do_sample": True, "seed": 2, "sampling": "rejection", "num_assistant_branches": 3},
]


@pytest.mark.parametrize("given", WAYS, ids=lambda given: "-".join(given) or "greedy")
def test_the_first_tokens(given: dict[str, Any], tmp_path: Path, guessed: set[int]) -> None:
    """A number means so many of the tokenizer's first tokens, and those that end a text."""
    target, draft = saved("llama", tmp_path / "t"), saved("llama", tmp_path / "d", seed=1)
    generator = SpecGenerator.from_pretrained(target, draft, draft_options={"vocabulary": 12})
    out = generator.generate(IDS, **RUN, **given)
    assert guessed
    assert max(guessed) < 12
    if "sampling" not in given:
        plain = {name: value for name, value in given.items() if name != "num_assistant_branches"}
        expected = SpecGenerator.from_pretrained(target).generate(IDS, **RUN, **plain)
        assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_checkpoint_with_a_vocabulary(tmp_path: Path, guessed: set[int]) -> None:
    """Its config lists the tokens that it guesses; `vocabulary` cannot name others."""
    target, draft = saved("llama", tmp_path / "t"), saved("llama", tmp_path / "d", seed=1, draft_vocabulary=[2, 5, 9])
    out = SpecGenerator.from_pretrained(target, draft).generate(IDS, **RUN)
    assert guessed
    assert guessed <= {2, 5, 9}
    assert out.sequences.tolist() == SpecGenerator.from_pretrained(target).generate(IDS, **RUN).sequences.tolist()
    with pytest.raises(OptionError, match="comes with its own vocabulary"):
        SpecGenerator.from_pretrained(target, draft, draft_options={"vocabulary": 9})


@pytest.mark.usefixtures("built")
def test_packed_layers(tmp_path: Path, guessed: set[int]) -> None:
    """Passes in a line have the smaller head too. (They ran over the whole one.)"""
    folder = saved("llama", tmp_path / "m")
    generator = SpecGenerator.from_pretrained(folder, folder, draft_options={"vocabulary": 12, "backend": "packed"})
    generator.generate(IDS, **RUN)
    assert guessed
    assert max(guessed) < 12
    [draft] = generator.draft.models  # type: ignore[union-attr]
    assert any(isinstance(module, CutHead) for module in draft.ragged.model.modules())


def test_tokens_of_a_text(tmp_path: Path, guessed: set[int]) -> None:
    """They are counted, the likeliest come first; a text alone gives all that come in it."""
    target, draft = saved_model(tmp_path / "t"), saved_model(tmp_path / "d", seed=1)
    text, tokenizer = tmp_path / "text", byte_tokenizer()
    text.write_text("abba cab")
    for vocabulary, letters in ((str(text), "abc "), ((3, text), "ab")):
        guessed.clear()
        generator = SpecGenerator.from_pretrained(target, ("suffix", draft), draft_options={"vocabulary": vocabulary})
        out = generator.generate("ba", **RUN)
        assert out.sequences.tolist() == SpecGenerator.from_pretrained(target).generate("ba", **RUN).sequences.tolist()
        assert guessed
        assert guessed <= {2, *tokenizer(letters)["input_ids"]}


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "whisper"])
def test_heads_of_all_kinds(name: str, tmp_path: Path) -> None:
    """Tied ones, with a bias added afterwards, scaled ones: what is left of them says what it said."""
    folder = saved(name, tmp_path / name)
    whole, cut = load(folder), load(folder)
    cut_vocabulary(cut, Vocabulary(20), None)
    inputs = {"input_ids": torch.tensor(IDS[:1])} if name == "gpt2" else tiny_inputs(name)
    if name != "gpt2":
        inputs["decoder_input_ids"] = torch.tensor(IDS[:1])
    with torch.no_grad():
        expected, logits = whole.model(**inputs).logits, cut.model(**inputs).logits
    torch.testing.assert_close(logits[..., :20], expected[..., :20])
    assert logits[..., 20:].max() == float("-inf")


def test_what_is_refused(tmp_path: Path) -> None:
    """Before anything is decoded; what is no model is loaded in no other way, and what copies knows all tokens."""
    folders = {name: saved(name, tmp_path / name) for name in ("llama", "gemma2")}
    (text := tmp_path / "text").write_text("a")
    refused: list[tuple[str, str, dict[str, Any], str]] = [
        ("llama", "llama", {"vocabulary": True}, "`vocabulary` must be a number of tokens"),
        ("llama", "llama", {"vocabulary": 0}, "`vocabulary` must be a number of tokens"),
        ("llama", "llama", {"vocabulary": 1000}, "`vocabulary` must be at most the 64 tokens of the draft, got 1000"),
        ("llama", "llama", {"vocabulary": "nowhere.txt"}, "there is no such file"),
        ("llama", "llama", {"vocabulary": text}, "needs the draft's tokenizer"),
        ("gemma2", "gemma2", {"vocabulary": 8}, "caps its logits"),
        ("llama", "mtp", {"vocabulary": 8, "dtype": "float16"}, "`draft` is no id or path: leave them out"),
        ("llama", "suffix", {"vocabulary": 8}, "`draft` is no id or path: leave them out"),
    ]
    for name, draft, options, match in refused:
        with pytest.raises((OptionError, UnsupportedError), match=match):
            SpecGenerator.from_pretrained(folders[name], folders.get(draft, draft), draft_options=options)
    with pytest.raises(OptionError, match="vocabulary"):
        SpecGenerator.from_pretrained(folders["llama"], folders["llama"], vocabulary=8)
    with pytest.raises(UnsupportedError, match="a head of kind Bilinear"):
        CutHead(nn.Bilinear(2, 2, 2), torch.tensor([0]), 4)


def head(kind: str, folder: Path) -> tuple[str, str]:
    """A target and a head for it, both in folders, or the word for its own."""
    if kind == "mtp":
        if OLD:
            pytest.skip("transformers cannot tell the layers for prediction from the others")
        return str(checkpoint(folder / "target")[0]), "mtp"
    model = target()
    model.save_pretrained(folder / "target")
    made = folder / "head"
    if kind == "assistant":
        assistant().save_pretrained(made)
    elif kind == "dflash":
        dflash_folder(made, model)
    else:
        eagle_folder(made, draft_vocab_size=30 if kind == "d2t" else 64, **(PEAGLE if kind == "peagle" else {}))
    return str(folder / "target"), str(made)


@pytest.mark.parametrize(
    "kind",
    [
        "d2t",
        "mtp",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "peagle", "dflash", "assistant")),
    ],
)
def test_heads_have_one_too(kind: str, tmp_path: Path, guessed: set[int]) -> None:
    """A number of tokens, of those that the head knows; the text stays the target's."""
    folder, draft = head(kind, tmp_path)
    known = list(range(64))
    if kind == "d2t":
        offsets = load_file(Path(draft) / "model.safetensors")["d2t"]
        known = (offsets + torch.arange(30)).tolist()
    generator = SpecGenerator.from_pretrained(folder, draft, draft_options={"vocabulary": 12})
    for given in ({}, {"do_sample": True, "seed": 2, "num_assistant_branches": 3}):
        out = generator.generate(IDS, **RUN, **given)
        plain = {name: value for name, value in given.items() if name != "num_assistant_branches"}
        expected = SpecGenerator.from_pretrained(folder).generate(IDS, **RUN, **plain)
        assert out.sequences.tolist() == expected.sequences.tolist()
    assert len(guessed) > 1
    assert guessed <= {2, *known[:12]}
    widest = generator.draft.models[0].model  # type: ignore[union-attr]
    assert len(widest.vocabulary) == 12
    with pytest.raises(OptionError, match=f"`vocabulary` must be at most the {len(known)} tokens of the draft, got 65"):
        SpecGenerator.from_pretrained(folder, draft, draft_options={"vocabulary": 65})


def test_the_head_of_another_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word's own class is made, whichever head it is."""

    class Other(MtpDraft):
        pass

    monkeypatch.setitem(DRAFTS, "other", Other)
    folder, _ = head("mtp", tmp_path)
    generator = SpecGenerator.from_pretrained(folder, "other", draft_options={"vocabulary": 12})
    assert isinstance(generator.draft, Other)


def test_a_head_s_tokens_of_a_text(tmp_path: Path, guessed: set[int]) -> None:
    """They are counted by the target's tokenizer, which must be there; the head must know some of them."""
    text, tokenizer = tmp_path / "text", byte_tokenizer()
    text.write_text("ABBACAB")
    model, draft = target(), eagle_folder(tmp_path / "head", draft_vocab_size=30)
    model.save_pretrained(tmp_path / "t")
    with pytest.raises(OptionError, match="needs the draft's tokenizer beside it; a head needs its target's"):
        SpecGenerator.from_pretrained(str(tmp_path / "t"), draft, draft_options={"vocabulary": text})
    tokenizer.save_pretrained(tmp_path / "t")
    known = (load_file(draft / "model.safetensors")["d2t"] + torch.arange(30)).tolist()
    counted = [token for token in tokenizer("ABC")["input_ids"] if token in known]
    generator = SpecGenerator.from_pretrained(
        str(tmp_path / "t"), ("suffix", draft), draft_options={"vocabulary": str(text)}
    )
    plain = SpecGenerator.from_pretrained(str(tmp_path / "t")).generate("CAB", **RUN)
    assert generator.generate("CAB", **RUN).sequences.tolist() == plain.sequences.tolist()
    cut = generator.draft.models[0].model.vocabulary.tolist()  # type: ignore[union-attr]
    assert counted
    assert set(counted) <= set(cut) <= {2, *counted}
    text.write_text("".join(chr(30 + token) for token in range(3, 64) if token not in known))
    with pytest.raises(OptionError, match="`vocabulary` must be a text of tokens that the draft knows, 30 in all"):
        SpecGenerator.from_pretrained(str(tmp_path / "t"), draft, draft_options={"vocabulary": text})
