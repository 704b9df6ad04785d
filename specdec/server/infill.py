"""Text between a prefix and a suffix: its prompt, written with the tokens that a tokenizer has for this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.server.errors import ApiError

# The tokens before the prefix, the suffix and the middle.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
_ENDS = ("<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<|endoftext|>")


class Infill:
    """How a tokenizer writes texts with a gap; raises a 400 about `param` where it has no tokens for this."""

    def __init__(self, tokenizer: Any, model: str, param: str = "suffix") -> None:
        self._tokenizer = tokenizer
        forms = [ids for ids in map(self._ids, _FORMS) if len(ids) == 3]
        if not forms:
            message = f"the tokenizer of {model!r} has no tokens for the text before `{param}`"
            raise ApiError(400, f"{message}: take a model that fills gaps, as Qwen2.5-Coder", param=param)
        self._form = forms[0]
        self._files = next((ids for ids in map(self._ids, _FILES) if len(ids) == 2), None)

    @property
    def ends(self) -> list[int]:
        """Tokens that no text in a gap has."""
        return [*self._form, *(self._files or ()), *self._ids(_ENDS)]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The ids; `files`: names and texts of other files, which come first."""
        before, after, middle = self._form
        begin = self._tokenizer("")["input_ids"]
        ids = list(begin) if begin == [self._tokenizer.bos_token_id] else []
        if self._files is not None and files:
            repository, separator = self._files
            ids += [repository, *self._encode("repository\n")]
            for name, text in files:
                ids += [separator, *self._encode(f"{name}\n{text}\n")]
            ids += [separator, *self._encode("this file\n")]
        elif files:
            prefix = "".join(f"{text}\n\n" for _, text in files) + prefix
        return [*ids, before, *self._encode(prefix), after, *self._encode(suffix), middle]

    def _encode(self, text: str) -> list[int]:
        """The ids of a text, without the blank that SentencePiece puts before it."""
        begin = "☺" if self._tokenizer.tokenize("a")[0].startswith("▁") else ""
        ids = [self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in (begin, begin + text)]
        return list(ids[1][len(ids[0]) :])

    def _ids(self, names: Sequence[str]) -> list[int]:
        """The ids of tokens by their names, without tokens that the tokenizer lacks."""
        ids = [self._tokenizer.convert_tokens_to_ids(name) for name in names]
        texts = [self._tokenizer.convert_ids_to_tokens(token) if token is not None else None for token in ids]
        return [token for token, name, text in zip(ids, names, texts, strict=True) if name == text]
