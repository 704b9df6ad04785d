"""Tokenizers: checked, or loaded from the folder or repository of a model; new ids to text, whole or piece by piece."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoProcessor, AutoTokenizer

from specdec.errors import OptionError
from specdec.generator.token_bytes import TokenBytes
from specdec.models.gguf.reader import GgufReader, open_gguf
from specdec.models.gguf.split_rules import split_rule
from specdec.models.gguf.tokenizer import read_tokenizer
from specdec.models.hf.private_api import cached
from specdec.models.loading.gguf import gguf_path
from specdec.options import bundled_models
from specdec.options.load import Loading, split_gguf

REPLACEMENT = "\ufffd"
"""The character that tokenizers write for bytes that are no character."""

# The files that transformers' classes of tokenizers name, the commonest first, as a hub is asked for each.
FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "spm.model", "sentencepiece.model", "spm_char.model", "bpe.codes"),
    *("source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "dict.txt", "emoji.json"),
    *("prophetnet.tokenizer", "byte_maps.json", "entity_vocab.json", "word_shape.json", "word_pronunciation.json"),
    *("normalizer.json", "tekken.json"),
)


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raises OptionError about the argument `name` unless `tokenizer` is None or can decode."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not hasattr(tokenizer, "decode")):
        way_out = "load it with transformers.AutoTokenizer.from_pretrained"
        raise OptionError.of(name, "a transformers tokenizer", tokenizer, way_out)


def ids_of(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """The ids of a text; raises OptionError for half of a character in it, which JSON and names of files may hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character (the lone surrogate {text[error.start]!r}, at {error.start})"
        raise OptionError(f"the text holds {half}: leave it out") from None
    ids: list[int] = tokenizer(text, **how)["input_ids"]
    return ids


def tokenizer_beside(
    source: str,
    *,
    reads_media: bool = False,
    gguf_file: str | PathLike[str] | None = None,
    reader: GgufReader | None = None,
    **options: Any,
) -> Any:
    """The tokenizer in the folder or hub repository of a model, or of a `zoo:` pair; None where none exists.

    For a GGUF file without a tokenizer beside it: the tokenizer in the file, which `reader` may have open. For a model
    that `reads_media`: the processor, if it works here. Without any of the `FILES` there is no tokenizer, although some
    classes would make an empty one. A tokenizer that cannot be read is a warning, and None: the model still takes
    ids. Raises UnsupportedError for a GGUF file whose rule for splitting texts is not known.
    """
    folder, file_name = split_gguf(bundled_models.locate(source, "target"))  # a pair has one tokenizer
    file = file_name or gguf_file
    if reads_media:
        with suppress(Exception):  # a processor may lack something here, and the tokenizer remains
            processor = AutoProcessor.from_pretrained(folder, **options)
            if hasattr(processor, "image_processor"):
                return processor
    if _has_tokenizer(folder, options.get("revision")):
        try:
            return AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # each class raises another error
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            way_out = "pass `tokenizer=`, or token ids alone"
            warnings.warn(f"the tokenizer of {source} cannot be read ({reason}): {way_out}", stacklevel=2)
    if file is not None:
        return _tokenizer_inside(source, reader or open_gguf(gguf_path(folder, str(file), options.get("revision"))))
    return None


def check_split_rule(source: Any, how: Loading) -> GgufReader | None:
    """Raises UnsupportedError for a GGUF file whose tokenizer splits texts by an unknown rule, before it is loaded.

    Returns the file's reader, None for other sources. Whoever holds it while the model and its tokenizer are loaded
    (`open_gguf`) has its header read once.
    """
    if not isinstance(source, str | PathLike):
        return None
    folder, file_name = split_gguf(bundled_models.locate(str(source), "target"))
    file = file_name or how.gguf_file
    if not file or _has_tokenizer(folder, how.revision) or not Path(folder, file).is_file():
        return None
    reader = open_gguf(gguf_path(folder, str(file), how.revision))
    if reader.keys.get("tokenizer.ggml.model") == "gpt2":
        split_rule(reader.keys.get("tokenizer.ggml.pre"))
    return reader


def _tokenizer_inside(source: str, reader: GgufReader) -> Any:
    """The tokenizer in a GGUF file; None for a file without one, and with a warning for kinds that cannot be read."""
    kind = reader.keys.get("tokenizer.ggml.model", "none")
    tokenizer = read_tokenizer(reader)
    if tokenizer is None and kind not in ("none", "no_vocab"):
        way_out = "pass `tokenizer=`, or token ids alone"
        warnings.warn(
            f"the tokenizer of {source} is of the kind {kind!r}, which cannot be read: {way_out}", stacklevel=4
        )
    return tokenizer


def _has_tokenizer(folder: str, revision: str | None) -> bool:
    """Whether a folder or hub repository has files of a tokenizer."""
    if Path(folder).is_dir():
        return any((Path(folder) / name).is_file() for name in FILES)
    for name in FILES:
        with suppress(OSError, ValueError):
            return bool(cached(folder, name, revision))
    return False


def decode(tokenizer: Any, ids: Sequence[int], cut_before: Sequence[str] = ()) -> str:
    """The text of `ids` without special tokens, cut before the first of `cut_before`, as in a stream of the ids."""
    text = _decoded(tokenizer, ids)
    if REPLACEMENT in text:  # bytes that may be no character
        text = Detokenizer(tokenizer).push(ids, last=True)
    return before_stop(text, cut_before)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text that the tokenizer decodes, in which a part of a character may spoil the characters beside it."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def before_stop(text: str, cut_before: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    return text[: min((at for stop in cut_before if (at := text.find(stop)) >= 0), default=len(text))]


def begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class Spelling(NamedTuple):
    """The meaning of a token after a text: `text`, or for a part of a character "bytes:\\xe0"; and its bytes.

    `data` None: a special token, which texts leave out; `text` is then its name.
    """

    text: str
    data: bytes | None


class Detokenizer:
    """Decodes ids piece by piece, and holds back text that a later token may change.

    It holds back incomplete UTF-8 and an end that begins one of `cut_before`; the text ends before the first of
    `cut_before`, which is then `stop`, and continues the text of the ids `before`.
    """

    def __init__(self, tokenizer: Any, cut_before: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._tokenizer, self._cut_before = tokenizer, cut_before
        self._bytes = TokenBytes.of(tokenizer)
        self._ids: list[int] = []
        self._start = 0  # decoding begins here, a few ids before the ids whose text is not yet decoded
        self._decoded = 0
        self._begun = b""  # the beginning of a character, which the last ids wrote
        self._pending = ""  # decoded and held back
        self.stop: str | None = None
        self._read(before)

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is final after `ids`; with `last` all text that was held back."""
        self._pending += self._read(ids) + (self._flush() if last else "")
        text = before_stop(self._pending, self._cut_before)
        stops = (stop for stop in self._cut_before if self._pending.startswith(stop, len(text)))
        ended, self.stop = self.stop, self.stop or next(stops, None)
        unsure = 0 if last or self.stop else max((begun(text, stop) for stop in self._cut_before), default=0)
        text = text[: len(text) - unsure]
        self._pending = self._pending[len(text) :]
        return "" if ended else text

    def spell(self, token: int) -> Spelling:
        """The meaning of a token if it came next."""
        if token in self._bytes.special:
            return Spelling(self._bytes.name(token), None)
        if (data := self._bytes.get(token)) is None:
            text = self._added(token)
            return Spelling(text, text.encode())
        text, beginning = self._bytes.split(data)
        if self._begun or beginning or text.encode() != data:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return Spelling(text, data)

    def _read(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, without an incomplete character at its end."""
        if self._bytes.errors == "replace" and not self._begun and self._decoded == len(self._ids):
            text = self._added(*ids)
            if text and REPLACEMENT not in text:
                self._ids += ids
                self._settle(len(self._ids))
                return text
        return "".join(map(self._read_token, ids))

    def _read_token(self, token: int) -> str:
        self._ids.append(token)
        data, before = self._bytes.get(token), self._begun
        if data is not None:
            text, self._begun = self._bytes.split(before + data)
            if not self._begun:
                self._settle(len(self._ids))
            return text
        lost, self._begun = before.decode("utf-8", self._bytes.errors), b""
        if before:
            self._settle(len(self._ids) - 1)
        text = self._added()
        if not text or text.endswith(REPLACEMENT):
            return lost
        self._settle(len(self._ids))
        return lost + text

    def _flush(self) -> str:
        """The text of ids and bytes that were held back, which no later token completes."""
        text = self._begun.decode("utf-8", self._bytes.errors) if self._begun else self._added()
        self._begun = b""
        self._settle(len(self._ids))
        return text

    def _added(self, *more: int) -> str:
        """The text of ids that are not decoded yet, and of `more`, after the ids before them."""
        before = _decoded(self._tokenizer, self._ids[self._start : self._decoded])
        return _decoded(self._tokenizer, [*self._ids[self._start :], *more])[len(before) :]

    def _settle(self, count: int) -> None:
        """Notes that the text of the first `count` ids is decoded."""
        if count > self._decoded:
            self._start, self._decoded = self._decoded, count


def pieces(
    tokenizer: Any, ids: Sequence[int], drafted: Sequence[bool], cut_before: Sequence[str] = ()
) -> list[tuple[str, bool]]:
    """The text of `ids` in pieces, each with whether the draft guessed its tokens."""
    text, parts = Detokenizer(tokenizer, cut_before), []
    for number, (token, origin) in enumerate(zip(ids, drafted, strict=True), 1):
        if piece := text.push([token], last=number == len(ids)):
            parts.append((piece, origin))
    return [("".join(text for text, _ in run), origin) for origin, run in groupby(parts, key=lambda part: part[1])]
