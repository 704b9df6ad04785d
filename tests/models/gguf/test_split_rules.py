"""Rules that split texts: known pieces for each of them, and an error for a value that nobody knows.

The slow tests beside llama.cpp compare ids of two hundred texts for every value.
"""

from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from specdec import SpecGenerator, UnsupportedError
from specdec.kernels import Mapped
from specdec.models.gguf.split_rules import RULES, split_rule
from specdec.models.gguf.tokenizer import read_tokenizer
from tests.folders import byte_tokenizer
from tests.models.gguf.files import byte_vocabulary, reader
from tests.models.gguf.models import KINDS, model_of, saved
from tests.models.gguf.texts import SPLIT

pytest.importorskip("gguf")
THREES = "He|'LL| pay| | $|123|45|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| 中文| 한국어|!!| "
ONES = "He|'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| 中文| 한국어|!!| "
PIECES = {
    "default": "He|'|LL| pay|  |$|123|45|.|6| |(|x|²|)| CamelCase|_|9|\n\n|\t|naïve| 中文| 한국어|!!| ",
    "gpt-2": "He|'|LL| pay| | $|12345|.|6| (|x|²|)| CamelCase|_|9|\n\n|\t|naïve| 中文| 한국어|!!| ",
    "smollm": "He|'|LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n\n|\t|naïve| 中文| 한국어|!!| ",
    **dict.fromkeys(("llama-bpe", "minicpm5", "jais-2"), THREES),
    **dict.fromkeys(("qwen2", "laguna", "ufakzeka", "seed-coder", "qwen35", "bailingmoe"), ONES),
    "exaone-moe": "He|'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve 中文 한국어|!!| ",
    "tekken": "He|'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| Camel|Case|_|9|\n\n|\tnaïve| 中文| 한국어|!!| ",
    "gpt-4o": "He'LL| pay| | $|123|45|.|6| (|x|²|)| Camel|Case|_|9|\n\n|\tnaïve| 中文| 한국어|!!| ",
    "granite-embed-multi-97m": "He'LL| pay| | $|123|45|.|6| (|x|²|)| Camel|Case|_|9|\n\n|\tnaïve| 中文| 한국어|!!| ",
    "tiny_aya": "He'LL| pay| | $|12|345|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| 中文| 한국어|!!| ",
    "youtu": "He'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| |中文| |한국어|!!| ",
    "deepseek-v3": "He|'LL| pay| | $|123|45|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| |中文| 한국어|!!| ",
    "spark2_5": "He|'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n|\n|\tnaïve| |中文| 한국어|!!| ",
    "afmoe": "He|'LL| pay| | $|12|345|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| |中文| |한국어|!!| ",
    "kimi-k2": "He'LL| pay| | $|123|45|.|6| (|x|²|)| CamelCase|_|9|\n\n|\tnaïve| |中文| 한국어|!!| ",
    "deepseek-llm": "He|'|LL| pay| | $|12345|.|6| (|x|²|)| CamelCase|_|9|\n|\n|\tna|ï|ve| |中文| |한국어|!!| ",
    "deepseek-coder": "He|'|LL| pay|  $|1|2|3|4|5|.|6| (|x|²|)| CamelCase|_|9|\n|\n|\tnaïve| |中文| |한국어|!!| ",
    "falcon": "He|'|LL| pay|  |$|123|45|.|6| |(|x|²|)| CamelCase|_|9|\n\n|\t|naïve| 中文| 한국어|!!| ",
    "bloom": "He'LL| pay| | $12345|.|6| (|x²|)| CamelCase_9|\n\n\t|naïve| 中文| 한국어|!! ",
    "viking": "He'LL| pay| | $|1|2|3|4|5|.|6| (|x|²|)| CamelCase_|9|\n\n\t|naïve| 中文| 한국어|!! ",
    "superbpe": "He'LL pay  $|12|345|.|6| (x|²|) CamelCase_|9|\n\n\tnaïve 中文 한국어!! ",
    "chameleon": "He|'|LL| pay|  |$|1|2|3|4|5|.|6| |(|x|²|)| CamelCase|_|9|\n|\n|\t|naïve| 中文| 한국어|!|!| ",
    "gemma4": "He'LL pay  $12345.6 (x²) CamelCase_9|\n\n|\tnaïve 中文 한국어!! ",
    "whitespace": "He'LL| |pay|  |$12345.6| |(x²)| |CamelCase_9|\n\n\t|naïve| |中文| |한국어!!| ",
}
"""A value of each rule -> the pieces of `SPLIT`, with strokes between them."""


def test_every_rule_has_its_pieces_here() -> None:
    assert {RULES[name].regexes for name in PIECES} == {rule.regexes for rule in RULES.values()}
    assert len(RULES) == 91


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    """transformers' loader split 28 values as GPT-2 does."""
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in split_rule(name).regexes]
    assert [text for text, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(SPLIT)] == PIECES[name].split("|")


def test_two_spaces_stay_one_token(tmp_path: Path) -> None:
    """SmolLM2's own file made two tokens of the spaces in `x =  10`, as GPT-2 splits the last one off."""
    keys = byte_vocabulary(["  ", "=  1"], 400)
    ids = {}
    for name in ("smollm", "gpt-2"):
        tokenizer = read_tokenizer(reader(tmp_path / "a.gguf", "llama", {**keys, "tokenizer.ggml.pre": name}))
        ids[name] = tokenizer.tokenize("x =  10")
    assert ids["smollm"] == ["x", "Ġ", "=", "ĠĠ", "1", "0"]
    assert ids["gpt-2"] == ["x", "Ġ", "=", "Ġ", "Ġ", "1", "0"]


def test_a_value_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, and the way out, which works; no model is loaded before. (It took the time of loading two.)"""
    kind = KINDS["llama"]
    keys = byte_vocabulary([], 256) | {"tokenizer.ggml.pre": "latest-v9"}
    path = saved(tmp_path / "a.gguf", kind, model_of(kind, vocab_size=256), keys)
    with monkeypatch.context() as patch:
        patch.setattr(Mapped, "forget", lambda _: pytest.fail("tensors were read"))
        for target, draft in ((path, None), (path, path), ("zoo:python-code", path)):
            with pytest.raises(UnsupportedError, match=r"tokenizer.ggml.pre = 'latest-v9', .* as `tokenizer=`"):
                SpecGenerator.from_pretrained(target, draft)
        with pytest.raises(UnsupportedError, match=r"tokenizer.ggml.pre = 'latest-v9'"):
            SpecGenerator(path)
    tokenizer = byte_tokenizer()
    assert SpecGenerator(path, tokenizer=tokenizer).tokenizer is tokenizer
