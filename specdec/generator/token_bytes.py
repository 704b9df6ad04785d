"""The bytes that single tokens stand for, in vocabularies where a character may be written by several tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece


_LEADING = "\xe0"  # begins a character, as a byte


def _byte_level() -> Iterator[tuple[str, int]]:
    """The character that byte-level vocabularies write for each byte (GPT-2): a printable byte is its character."""
    beyond = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte), byte
        else:
            yield chr(beyond), byte
            beyond += 1


_BYTE_LEVEL = dict(_byte_level())


class TokenBytes:
    """The bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()  # the JSON of the decoder alone
        self._is_byte_level = b'"ByteLevel"' in state or hasattr(tokenizer, "byte_decoder")

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:
        """The same object for the same tokenizer."""
        try:
            return _BY_TOKENIZER.get(tokenizer) or _BY_TOKENIZER.setdefault(tokenizer, cls(tokenizer))
        except TypeError:  # without weak references or a hash
            return cls(tokenizer)

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that texts leave out."""
        return frozenset(getattr(self._tokenizer, "all_special_ids", ()))

    @cached_property
    def _literal(self) -> frozenset[int]:
        """Tokens beside the vocabulary proper, whose names are their texts."""
        return frozenset(getattr(self._tokenizer, "added_tokens_decoder", ()))

    def name(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return "" if convert is None else str(convert(token))

    def get(self, token: int) -> bytes | None:
        """The token's bytes; None where it always stands for whole characters, or its bytes are not known."""
        if token in self._literal or token in self.special:
            return None
        name = self.name(token)
        if fallback := _FALLBACK.fullmatch(name):
            return bytes.fromhex(fallback[1])
        if self._is_byte_level:
            numbers = [_BYTE_LEVEL.get(character) for character in name]
            return None if None in numbers else bytes(number for number in numbers if number is not None)
        if self.errors == "ignore" and len(name) == 1 and 128 <= ord(name) < 256:
            return bytes([ord(name)])
        return None

    @cached_property
    def errors(self) -> Literal["ignore", "replace"]:
        """How the tokenizer treats bytes that are no character; a vocabulary that is all bytes ignores them."""
        convert = getattr(self._tokenizer, "convert_tokens_to_ids", None)
        token = None if self._is_byte_level or convert is None else convert(_LEADING)
        is_byte = isinstance(token, int) and self.name(token) == _LEADING and not self._tokenizer.decode([token])
        return "ignore" if is_byte else "replace"

    def split(self, data: bytes) -> tuple[str, bytes]:
        """The text of `data` without the beginning of a character at its end, and the bytes of this beginning."""
        decoder = codecs.getincrementaldecoder("utf-8")(self.errors)
        return decoder.decode(data), decoder.getstate()[0]


_BY_TOKENIZER: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()
