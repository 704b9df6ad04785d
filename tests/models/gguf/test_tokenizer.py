"""Tokenizers of GGUF files: spaces, bytes, the tokens around a text, special tokens and chat templates."""

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from tokenizers import normalizers

from specdec import LoadError, SpecGenerator
from specdec.generator.tokenizers import decode, tokenizer_beside
from specdec.models.gguf import GgufReader
from specdec.models.gguf.tokenizer import read_tokenizer
from tests.folders import byte_tokenizer
from tests.models.gguf.files import byte_vocabulary, reader, word_vocabulary
from tests.models.gguf.models import KINDS, model_of, saved

pytest.importorskip("gguf")
WORDS = word_vocabulary(
    [
        *(("\u2581", -5.0, 1), ("a", -6.0, 1), ("b", -7.0, 1), ("\u2581\u2581", -1.0, 1), ("\u2581a", -2.0, 1)),
        *(("ab", -3.0, 1), ("<|im_end|>", -1000.0, 3), ("<tool>", -1000.0, 4), ("é", -8.0, 1)),
    ]
)
BYTES = byte_vocabulary([], 256)


def of(path: Path, keys: dict[str, Any]) -> Any:
    return read_tokenizer(reader(path / "a.gguf", "llama", keys))


def around(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def test_the_space_before_a_text(tmp_path: Path) -> None:
    """By default there is one, also behind special tokens; the key was not read.

    Of runs of spaces the best pair merges first, wherever it is.
    """
    with_one = of(tmp_path, WORDS)
    assert with_one.tokenize("ab") == ["\u2581a", "b"]
    assert with_one.tokenize("<|im_end|>ab") == ["<|im_end|>", "\u2581a", "b"]
    assert with_one.tokenize("") == []
    without = of(tmp_path, WORDS | around(add_space_prefix=False))
    assert without.tokenize("ab") == ["ab"]
    assert without.tokenize("   b") == ["\u2581\u2581", "\u2581", "b"]
    assert without.tokenize("   a") == ["\u2581\u2581", "\u2581a"]
    for tokenizer in (with_one, without):
        assert decode(tokenizer, tokenizer("ab  b", add_special_tokens=False)["input_ids"]) == "ab  b"


def test_bytes(tmp_path: Path) -> None:
    """What no word has is its bytes, and they are that text again."""
    tokenizer = of(tmp_path, WORDS)
    assert tokenizer.tokenize("éü\n")[1:] == ["é", "<0xC3>", "<0xBC>", "<0x0A>"]
    assert decode(tokenizer, tokenizer("aéü\nb")["input_ids"]) == "aéü\nb"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (WORDS, [1]),
        (WORDS | around(add_bos_token=False), []),
        (WORDS | around(add_eos_token=True), [1, 2]),
        (BYTES | around(pre="qwen2", bos_token_id=5, eos_token_id=6), []),
        (BYTES | around(pre="llama-bpe", bos_token_id=5, eos_token_id=6), [5]),
        (BYTES | around(pre="llama-bpe", bos_token_id=5, add_bos_token=False), []),
        (BYTES | around(pre="gpt-2", bos_token_id=5, eos_token_id=6, add_bos_token=True, add_eos_token=True), [5, 6]),
        (WORDS | {"tokenizer.ggml.model": "t5"}, [1]),
        (WORDS | {"tokenizer.ggml.model": "t5"} | around(add_bos_token=True, bos_token_id=3, eos_token_id=4), [3, 4]),
    ],
)
def test_the_tokens_around_a_text(keys: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    """By the keys, and without them by the kind of tokenizer and the split rule."""
    tokenizer = of(tmp_path, keys)
    inside = tokenizer("ab", add_special_tokens=False)["input_ids"]
    ids = tokenizer("ab")["input_ids"]
    assert [number for number in ids if number not in inside] == expected
    assert len(ids) == len(inside) + len(expected)


def test_special_tokens(tmp_path: Path) -> None:
    """Control tokens are left out of a text, those that users defined are not; both are whole in prompts."""
    tokenizer = of(tmp_path, WORDS)
    ids = tokenizer("a<tool>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581a", "<tool>", "\u2581", "b", "<|im_end|>"]
    assert decode(tokenizer, ids) == "a<tool> b"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_phi_3(tmp_path: Path) -> None:
    """Its special tokens take the blanks behind them, which no key says."""
    phi, other = of(tmp_path, WORDS | {"general.name": "Phi-3 Mini"}), of(tmp_path, WORDS)
    short, long = "<|im_end|>a", "<|im_end|>  \n a"
    assert phi(long)["input_ids"] == phi(short)["input_ids"] == other(short)["input_ids"] != other(long)["input_ids"]


def test_unigrams(tmp_path: Path) -> None:
    """The words with the best sum; several unknown characters are one unknown token."""
    words = [
        ("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("\u2581", -2.0, 1), ("a", -1.0, 1),
        ("\u2581aa", -3.5, 1),
    ]  # fmt: skip
    keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _, _ in words],
        "tokenizer.ggml.scores": [score for _, score, _ in words],
        "tokenizer.ggml.token_type": [kind for _, _, kind in words],
        "tokenizer.ggml.add_space_prefix": True,
    }
    assert of(tmp_path, keys)("aa aaa")["input_ids"] == [5, 5, 4, 1]
    assert of(tmp_path, keys)("xyz")["input_ids"] == [3, 2, 1]
    assert of(tmp_path, keys).tokenize("a  a") == ["\u2581", "a", "\u2581", "\u2581", "a"]
    merged = of(tmp_path, keys | {"tokenizer.ggml.remove_extra_whitespaces": True})
    assert merged.tokenize("  a  a ") == ["\u2581", "a", "\u2581", "a"]
    assert isinstance(merged.backend_tokenizer.normalizer, normalizers.Sequence)


@pytest.mark.parametrize("several", [False, True])
def test_chat_templates(several: bool, tmp_path: Path) -> None:
    """One, or several by their names."""
    keys = WORDS | {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    if several:
        keys |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = of(tmp_path, keys)
    said = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "ab"
    if several:
        assert tokenizer.apply_chat_template(said, tokenize=False, chat_template="tool_use") == "tools"
    assert of(tmp_path, WORDS).chat_template is None


@pytest.mark.parametrize("keys", [{"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}, {}])
def test_files_without_a_tokenizer(keys: dict[str, Any], tmp_path: Path) -> None:
    """Their models take ids."""
    kind = KINDS["llama"]
    none = dict.fromkeys([f"tokenizer.ggml.{name}" for name in ("model", "tokens")])
    path = saved(tmp_path / "a.gguf", kind, model_of(kind), none | keys)
    generator = SpecGenerator(path)
    assert generator.tokenizer is None
    assert generator.generate([[3, 4, 5]], max_new_tokens=2).sequences.shape == (1, 5)


@pytest.mark.parametrize("draft", [False, True])
def test_a_header_is_read_once(draft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the split rule, the model and the tokenizer, which read it one after the other, a third of a second each."""
    kind = KINDS["llama"]
    path = saved(tmp_path / "a.gguf", kind, model_of(kind, vocab_size=256), BYTES)
    monkeypatch.setattr(GgufReader, "_read", read := create_autospec(GgufReader._read, side_effect=GgufReader._read))
    generator = SpecGenerator("zoo:python-code", path, tokenizer=byte_tokenizer()) if draft else SpecGenerator(path)
    assert generator.tokenizer is not None
    assert [call.args[0].path for call in read.call_args_list] == [path]


def test_kinds_that_cannot_be_read(tmp_path: Path) -> None:
    """A warning that names the kind, as ids work."""
    path = reader(tmp_path / "a.gguf", "llama", WORDS | {"tokenizer.ggml.model": "rwkv"}).path
    with pytest.warns(UserWarning, match=r"is of the kind 'rwkv', which cannot be read: pass `tokenizer=`"):
        assert tokenizer_beside(path) is None


def test_broken_vocabularies(tmp_path: Path) -> None:
    broken = {
        "several tokens of one text": around(tokens=["a"] * 260),
        "no tokens": around(tokens=[]),
        "2 values in tokenizer.ggml.scores": around(scores=[0.5, 0.5]),
        "and has no such token": around(model="gpt2", pre="gpt-2", add_bos_token=True),
    }
    for words, keys in broken.items():
        with pytest.raises(LoadError, match=words):
            of(tmp_path, WORDS | keys)
