"""Beside llama.cpp itself: the same ids for the same texts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.models.gguf import GgufReader, read_config, read_model
from specdec.models.gguf.end_tokens import special_ids
from specdec.models.gguf.split_rules import RULES
from specdec.models.gguf.tokenizer import read_tokenizer
from tests.models.gguf.files import (
    byte_vocabulary,
    character_vocabulary,
    reader,
    sentencepiece_vocabulary,
    word_vocabulary,
)
from tests.models.gguf.models import KINDS, model_of, saved
from tests.models.gguf.texts import TEXTS

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.slow
BYTES = byte_vocabulary(TEXTS)


def theirs(path: str) -> Any:
    """llama.cpp's function from a text to ids."""
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return lambda text, first=False: model.tokenize(text.encode(), add_bos=first, special=True)


WORDS = sentencepiece_vocabulary(TEXTS)
RAW = {name: rule for name, rule in RULES.items() if rule.space is not None}


def differ(file: Any, texts: tuple[str, ...] = TEXTS, special: bool = False) -> list[str]:
    """The texts with other ids than llama.cpp's."""
    mine, other = read_tokenizer(file), theirs(file.path)
    return [text for text in texts if mine(text, add_special_tokens=special)["input_ids"] != other(text, special)]


@pytest.mark.parametrize("name", [name for name in RULES if name not in RAW])
def test_split_rules(name: str, tmp_path: Path) -> None:
    assert not differ(reader(tmp_path / "a.gguf", "llama", {**BYTES, "tokenizer.ggml.pre": name}))


@pytest.mark.parametrize("name", RAW)
def test_split_rules_of_characters(name: str, tmp_path: Path) -> None:
    """In lines of their own, as llama.cpp stops at line ends that are no tokens."""
    tokens, merges = character_vocabulary(TEXTS)
    keys = word_vocabulary([(text, 0.0, 1) for text in tokens]) | {"tokenizer.ggml.model": "gpt2"}
    keys |= {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}
    lines = tuple({line for text in TEXTS for line in re.split(r"\s" if name == "whitespace" else "\n", text)})
    assert not differ(reader(tmp_path / "a.gguf", "llama", keys), lines)


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize(("first", "last"), [(None, None), (True, True), (False, False), (False, True)])
def test_sentencepiece(prefix: bool | None, first: bool | None, last: bool | None, tmp_path: Path) -> None:
    """The space before a text, runs of spaces, bytes of what no word has, and the tokens around."""
    keys = {"add_space_prefix": prefix, "add_bos_token": first, "add_eos_token": last}
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}
    texts = (*TEXTS, "", "\u4e01\u4e02", "</s> a", "a<s>  b", "a </s></s>b")
    file = reader(tmp_path / "a.gguf", "llama", {**WORDS, **keys})
    assert not differ(file, texts, special=True)
    assert not differ(file, texts)


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("merged", [None, True])
def test_unigrams(prefix: bool | None, merged: bool | None, tmp_path: Path) -> None:
    tokens, _ = character_vocabulary(TEXTS)
    keys = word_vocabulary([(text, -3.0 - rank / 300, 1) for rank, text in enumerate(tokens)])
    keys |= {"tokenizer.ggml.model": "t5", "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eos_token_id": 2}
    more = {"add_space_prefix": prefix, "remove_extra_whitespaces": merged}
    keys |= {f"tokenizer.ggml.{name}": value for name, value in more.items() if value is not None}
    texts = tuple(text for text in TEXTS if text.strip())
    assert not differ(reader(tmp_path / "a.gguf", "llama", keys), (*texts, "a\u4e01\u4e02b"), special=True)


@pytest.mark.parametrize("name", ["smollm", "llama-bpe", "qwen2"])
def test_tokens_of_users(name: str, tmp_path: Path) -> None:
    """Runs of spaces, and others that are whole wherever they stand."""
    users = ["    ", "        ", "<tool>", "<tool_call>", "\n\n", "<é>"]
    keys = BYTES | {"tokenizer.ggml.tokens": [*BYTES["tokenizer.ggml.tokens"], *users], "tokenizer.ggml.pre": name}
    keys["tokenizer.ggml.token_type"] = [*BYTES["tokenizer.ggml.token_type"], *[4] * len(users)]
    texts = ("a     b", "<tool><tool_call>x</tool_call>", "def f():\n\n\n            return", "<é>lan\n\n \n")
    assert not differ(reader(tmp_path / "a.gguf", "llama", keys), (*TEXTS, *texts))


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "tekken", "chameleon", "gemma4"])
@pytest.mark.parametrize("first", [None, True, False])
def test_beginnings(name: str, first: bool | None, tmp_path: Path) -> None:
    """Without a key, the split rule says whether a text begins with a token."""
    keys = BYTES | {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 6}
    keys |= {} if first is None else {"tokenizer.ggml.add_bos_token": first}
    assert not differ(reader(tmp_path / "a.gguf", "llama", keys), ("a", "b c"), special=True)


ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>", "<eos>", "<|eom_id|>", "[EOT]")


@pytest.mark.parametrize(
    "texts",
    [
        *((text,) for text in ENDS),
        *(
            ENDS,
            ("<|end|>", "<|return|>", "<|call|>"),
            ("<|end|>", "<|calls|>", "<|flush|>"),
            ("</s>", "<|tool_response>"),
        ),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"),
    ],
)
@pytest.mark.parametrize("kind", [1, 3])
def test_end_tokens(texts: tuple[str, ...], kind: int, tmp_path: Path) -> None:
    """By their texts, also where the file calls them ordinary."""
    keys = dict(BYTES)
    keys["tokenizer.ggml.tokens"] = [*BYTES["tokenizer.ggml.tokens"], *texts, "<|other|>", "<|eos_of_this|>"]
    keys["tokenizer.ggml.token_type"] = [*BYTES["tokenizer.ggml.token_type"], *[kind] * len(texts), 3, 3]
    count = len(keys["tokenizer.ggml.tokens"])
    keys |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": count - 1, "tokenizer.ggml.eot_token_id": 7}
    file = reader(tmp_path / "a.gguf", "llama", keys)
    model = llama_cpp.Llama(file.path, vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    expected = [number for number in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, number)]
    assert sorted(special_ids(file).ends) == expected
    assert special_ids(file).ends[0] == count - 1
    assert not differ(file, tuple(f"a{text} b" for text in texts))


LINEAR = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
YARN = {**LINEAR, ".rope.scaling.type": "yarn", ".rope.scaling.original_context_length": 32}
FACTORS = np.array([1.0, 1.5, 3.0, 4.0])
ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (LINEAR, {}),
    "yarn": (YARN, {}),
    "factors": ({}, {"rope_freqs.weight": FACTORS}),
    "factors and linear": (LINEAR, {"rope_freqs.weight": FACTORS}),
    "longrope": (
        {
            ".rope.scaling.original_context_length": 16,
            ".rope.scaling.attn_factor": 1.2,
            ".rope.scaling.type": "longrope",
        },
        {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": 2 * FACTORS},
    ),
}
IDS = torch.randint(3, 64, (1, 120), generator=torch.Generator().manual_seed(0))


def computed(path: str) -> Any:
    """llama.cpp's logits at every position, as a tensor [positions, vocabulary]."""
    model = llama_cpp.Llama(path, verbose=False, n_ctx=256, logits_all=True)
    model.eval(IDS[0].tolist())
    return torch.tensor(model.scores[: IDS.shape[1]])


def check_computed(path: str) -> None:
    """Raises AssertionError if a likeliest token is another one, or logits are far from llama.cpp's."""
    file = GgufReader(path)
    with torch.no_grad():
        mine = read_model(file, read_config(file), torch.float32)(IDS).logits[0]
    expected = computed(path)
    assert (mine.argmax(1) == expected.argmax(1)).sum() >= 118  # of 120; llama.cpp rounds activations of float16
    assert torch.nn.functional.cosine_similarity(mine, expected).median() > 0.999


# llama.cpp has no windows of these two, and norms only in the largest Command R.
OTHERWISE = {"mistral", "phi3", "command-r, norms"}


@pytest.mark.parametrize("name", sorted(KINDS.keys() - OTHERWISE))
def test_likeliest_tokens(name: str, tmp_path: Path) -> None:
    check_computed(saved(tmp_path / "a.gguf", KINDS[name], model_of(KINDS[name])))


@pytest.mark.parametrize("name", ROPE)
def test_likeliest_tokens_with_scaled_positions(name: str, tmp_path: Path) -> None:
    """None of these files was scaled: the likeliest token agreed at 5 to 45 of 120 positions."""
    keys, tensors = ROPE[name]
    check_computed(saved(tmp_path / "a.gguf", KINDS["llama"], model_of(KINDS["llama"]), keys, tensors))
