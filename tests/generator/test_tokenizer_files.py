"""The tokenizer beside a model: none, a broken one, and files that are a tokenizer's."""

import re
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig

from specdec import SpecGenerator
from specdec.generator.tokenizers import FILES, tokenizer_beside
from tests.folders import saved, saved_model
from tests.matrix import endless
from tests.tiny import tiny_inputs


@pytest.mark.parametrize("name", ["marian", "m2m_100", "biogpt", "t5", "llama", "gpt2", "xglm", "bart"])
def test_a_model_without_a_tokenizer_takes_ids(name: str, tmp_path: Path) -> None:
    """Marian, M2M-100 and Speech2Text ended in a TypeError, BioGPT and XLM in an ImportError; GPT-2 and BART got a
    tokenizer without words.
    """
    generator = SpecGenerator.from_pretrained(saved(name, tmp_path), "suffix")
    assert generator.tokenizer is None
    prompt = tiny_inputs(name)["input_ids"].tolist()
    assert generator.generate(prompt, **endless(3)).sequences.shape[0] == 1


@pytest.mark.parametrize(
    "name", ["speech_to_text", "xlm", "fsmt", "prophetnet", "ctrl", "roformer", "cpmant", "pegasus"]
)
def test_no_files_are_no_tokenizer(name: str, tmp_path: Path) -> None:
    """What classes raise without their files are TypeErrors, ValueErrors and ImportErrors of all kinds."""
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    assert tokenizer_beside(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["llama", "marian", "biogpt", "gpt2", "t5", "fsmt"])
def test_a_broken_tokenizer_is_said(name: str, tmp_path: Path) -> None:
    """A tokenizer with a damaged file vanished, or ended in an error that named no way out."""
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "source.spm", "vocab-src.json"):
        (tmp_path / file).write_text("{")
    with pytest.warns(UserWarning, match=r"the tokenizer of \S+ cannot be read \(.*\): pass `tokenizer=`"):
        assert tokenizer_beside(str(tmp_path)) is None


def test_a_model_with_a_broken_tokenizer_takes_ids(tmp_path: Path) -> None:
    """The reason is said when the model is loaded; texts are refused as without a tokenizer."""
    source = saved_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        generator = SpecGenerator(source, "suffix")
    assert generator.generate([[5, 6]], **endless(3)).sequences.shape == (1, 5)


def test_files_of_every_tokenizer_are_known() -> None:
    """A class with a file of another name would lose its tokenizer."""
    root = Path(transformers.__file__).parent
    tables = [
        table
        for path in (root / "models").glob("*/tokenization_*.py")
        for table in re.findall(r"^VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text(), re.DOTALL | re.MULTILINE)
    ]
    named = {name for table in tables for name in re.findall(r': "([^"]+)"', table)}
    assert len(tables) > 40
    assert named <= set(FILES)
