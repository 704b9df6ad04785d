"""Ids to text: whole answers and streams alike, and the bytes of single tokens, for every kind of tokenizer."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from specdec.generator.tokenizers import Detokenizer, decode, pieces

TEXT = "the quick brown fox jumps over the lazy dog; größer, naïve café 日本語 กขค 🙂 " * 3
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def wrapped(tokenizer: Tokenizer, **more: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, **more)


def sentencepiece(*, prefix: bool, words: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: words with a mark for the blank before them, and bytes for all else."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names += ["\u2581the", "\u2581a", "a", "b", "é", "ö", "\u2581fox", "日"] if words else ["a"]
    tokenizer = Tokenizer(
        models.Unigram([(name, -float(len(names) - i)) for i, name in enumerate(names)], unk_id=0, byte_fallback=True)
    )
    marks = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return wrapped(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, with a word of the caller's that is no part of the vocabulary proper."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[*SPECIAL.values()])
    tokenizer.train_from_iterator([TEXT], trainer)
    made = wrapped(tokenizer)
    made.add_tokens(["Übung"])
    return made


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*SPECIAL.values()])
    tokenizer.train_from_iterator([TEXT], trainer)
    return wrapped(tokenizer)


@cache
def kinds() -> dict[str, Any]:
    return {
        "prefix": sentencepiece(prefix=True), "no prefix": sentencepiece(prefix=False),
        "bytes alone": sentencepiece(prefix=True, words=False), "byte level": byte_level(), "word piece": word_piece(),
        "byt5": ByT5Tokenizer(),
    }  # fmt: skip


KINDS = ("prefix", "no prefix", "bytes alone", "byte level", "word piece", "byt5")
anything = st.text(st.sampled_from("ab foxthe éößÜ日本กขค🙂\n\ufffd"), max_size=12)


def streamed(tokenizer: Any, ids: list[int], size: int = 1) -> str:
    text = Detokenizer(tokenizer)
    return "".join(text.push(ids[i : i + size], last=i + size >= len(ids)) for i in range(0, len(ids), size))


def test_a_limit_cuts_a_character() -> None:
    """The characters before it stay whole. (A whole answer was replacement characters only, and a stream had four.)"""
    tokenizer = kinds()["bytes alone"]
    ids = tokenizer("กขค", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1 + 9
    assert decode(tokenizer, ids[:9]) == streamed(tokenizer, ids[:9]) == "กข\ufffd"
    assert decode(tokenizer, ids) == streamed(tokenizer, ids) == "กขค"
    many = tokenizer("ก" * 14, add_special_tokens=False)["input_ids"][:41]
    assert decode(tokenizer, many) == streamed(tokenizer, many) == 13 * "ก" + "\ufffd"
    assert pieces(tokenizer, ids[:9], [False] * 9) == [("กข\ufffd", False)]


def test_stops_are_found_behind_a_part_of_a_character() -> None:
    """The end of a text may begin in the middle of one. (All its bytes were replacement characters.)"""
    tokenizer = kinds()["bytes alone"]
    ids = tokenizer("กขค", add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, ids[2:]) == "\ufffd" * 2 + "ขค"
    assert decode(tokenizer, ids, ["ค"]) == "กข"


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything, size=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_stream_is_the_whole_answer(kind: str, text: str, size: int, data: Any) -> None:
    """Wherever a limit cuts, and however many tokens come at once."""
    tokenizer = kinds()[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    assert streamed(tokenizer, ids, size) == decode(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything)
@settings(max_examples=60, deadline=None)
def test_bytes_of_tokens_join_to_the_answer(kind: str, text: str) -> None:
    """Whatever tokens a character is made of. (Those of a character in two tokens were unknown.)"""
    tokenizer = kinds()[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole, scorer, data, answer = decode(tokenizer, ids), Detokenizer(tokenizer), b"", ""
    for place, token in enumerate(ids, 1):
        spelling = scorer.spell(token)
        begins = len(answer)
        answer += scorer.push([token], last=place == len(ids))
        data += spelling.data or b""
        if spelling.data is not None and not spelling.text.startswith("bytes:"):
            assert whole[begins:].startswith(spelling.text)
            assert spelling.data == spelling.text.encode()
    assert data.decode() == whole


def test_special_tokens_have_names_and_no_bytes() -> None:
    """They are no part of the answer."""
    for kind in KINDS[:-1]:
        tokenizer = kinds()[kind]
        assert Detokenizer(tokenizer).spell(tokenizer.eos_token_id) == ("</s>", None)
        assert decode(tokenizer, [tokenizer.eos_token_id]) == ""
