"""GGUF files with a vocabulary, and anything else, as the package gguf writes them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from specdec.models.gguf import GgufReader


def written(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    experts: str = "F32",
) -> str:
    """A file with these keys, those that begin with a dot after the architecture's name, and float32 tensors.

    The weights of `experts` have this type.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, architecture)
    for name, value in keys.items():
        _add(writer, f"{architecture}{name}" if name.startswith(".") else name, value)
    for name, array in (tensors or {}).items():
        kind = GGMLQuantizationType[experts if np.ndim(array) == 3 else "F32"]
        writer.add_tensor(name, quants.quantize(np.asarray(array, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def reader(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Any:
    """The reader of a file that is written so."""
    return GgufReader(written(path, architecture, keys, tensors))


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_array(name, list(value))


def byte_vocabulary(texts: Iterable[str], size: int = 3000) -> dict[str, Any]:
    """Keys of a vocabulary of bytes, whose merges know nothing of words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges = _trained(bpe, texts, size, pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }


def character_vocabulary(texts: Iterable[str], size: int = 2000) -> tuple[list[str], list[str]]:
    """Tokens of characters, with U+2581 for spaces, whose merges know nothing of words; and these merges."""
    return _trained(Tokenizer(models.BPE()), [text.replace(" ", "\u2581") for text in texts], size, [])


def _trained(bpe: Tokenizer, texts: Iterable[str], size: int, alphabet: list[str]) -> tuple[list[str], list[str]]:
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    vocabulary = bpe.get_vocab()
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in merges]


def word_vocabulary(words: Sequence[tuple[str, float, int]]) -> dict[str, Any]:
    """Keys of SentencePiece's vocabulary with all bytes: text, score and type of its words after <unk>, <s>, </s>."""
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    every = [*special, *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in every],
        "tokenizer.ggml.scores": [score for _, score, _ in every],
        "tokenizer.ggml.token_type": [kind for _, _, kind in every],
    }


def sentencepiece_vocabulary(texts: Iterable[str]) -> dict[str, Any]:
    """Keys of SentencePiece's vocabulary with the words of `character_vocabulary`, the earliest with the best score."""
    tokens, _ = character_vocabulary(texts)
    return word_vocabulary([(text, -float(rank), 1) for rank, text in enumerate(tokens)])
