"""Which tokens of a GGUF file have a meaning, and which of them end a text: by their ids in the file, or by their text.

Files name one end token, and chat models end their turns with others: llama.cpp knows these by their text (the function
`llama_vocab::impl::load` of its src/llama-vocab.cpp), and so does this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specdec.models.gguf.reader import GgufReader

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# Tokens for filling in the middle: the file's key -> texts; without the key, the first text that exists counts.
_MIDDLE: dict[str, tuple[str, ...]] = {
    "fim_pre_token_id": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf_token_id": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid_token_id": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_MIDDLE_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
# Ids where the file has no keys: beginning, end, unknown, padding.
_DEFAULTS: dict[str, tuple[int | None, ...]] = {
    "bert": (101, None, 100, 0),
    "llama": (1, 2, 0, None),
    "plamo2": (1, 2, 0, 3),
    "t5": (None, 1, 2, 0),
}


class SpecialIds(NamedTuple):
    """Ids of tokens with a meaning, None for a token that the file lacks.

    `ends`: all that end a text, `eos` first. `control`: tokens whose text alone says that they are no words.
    `turn_goes_on`: <|end|> where it ends a part of an answer, and other tokens end the answer.
    """

    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    ends: tuple[int, ...]
    control: tuple[int, ...]
    turn_goes_on: int | None


def special_ids(reader: GgufReader) -> SpecialIds:
    """The tokens of a file with a meaning; ids beyond the vocabulary count as missing, as in llama.cpp."""
    keys = reader.keys
    tokens = keys.get("tokenizer.ggml.tokens") or []
    by_text = {text: number for number, text in enumerate(tokens)}

    def token_id(key: str, default: int | None = None) -> int | None:
        numbers = (keys.get(f"tokenizer.ggml.{key}"), default)
        return next((int(number) for number in numbers if number is not None and 0 <= number < len(tokens)), None)

    model = keys.get("tokenizer.ggml.model", "")
    defaults = _DEFAULTS.get(model, (None, None, None, None))
    names = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    bos, eos, unknown, pad = (token_id(key, default) for key, default in zip(names, defaults, strict=True))
    ends = {by_text[text] for text in _ENDS if text in by_text}
    by_key = {key: token_id(key) for key in _MIDDLE}
    middle = {key: _first(texts, by_text) for key, texts in _MIDDLE.items() if by_key[key] is None}
    control = ends | {number for number in middle.values() if number is not None}
    middle_ends = ((by_key | middle)[key] for key in _MIDDLE_ENDS)
    numbers = (eos, token_id("eot_token_id"), token_id("eom_token_id"), *middle_ends)
    ends |= {number for number in numbers if number is not None}
    turn_goes_on = _part_end(ends, by_text)
    words = {turn_goes_on}
    if "</s>" in by_text and by_text.keys() & {"<|tool_response>", "<|plamo:eos|>"}:  # Gemma 4 and PLaMo: a word
        words.add(by_text["</s>"])
    ordered = sorted(ends - words, key=lambda number: (number != eos, number))
    return SpecialIds(bos, eos, unknown, pad, tuple(ordered), tuple(sorted(control - words)), turn_goes_on)


def _first(texts: tuple[str, ...], by_text: Mapping[str, int]) -> int | None:
    return next((by_text[text] for text in texts if text in by_text), None)


def _part_end(ends: set[int], by_text: Mapping[str, int]) -> int | None:
    """<|end|> of gpt-oss and Solar, whose answers have several parts."""
    end_texts = {text for text, number in by_text.items() if number in ends}
    calls = bool(end_texts & {"<|call|>", "<|calls|>"})
    parts = calls and bool(end_texts & {"<|return|>", "<|flush|>"})
    return by_text["<|end|>"] if parts and "<|end|>" in end_texts else None
