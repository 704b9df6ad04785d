"""Rows of token ids from a caller, checked and without padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from specdec.errors import OptionError
from specdec.options.fields import is_list, is_whole, plain

MASKS = {
    "prompt": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
    "negative_prompt_ids": "negative_prompt_attention_mask",
}


class Ids(NamedTuple):
    """A caller's `rows` of ids, the rows without padding (`unpadded`), and the `mask` of ids that are no padding."""

    rows: list[list[int]]
    unpadded: list[list[int]]
    mask: list[list[bool]]
    is_text: bool = False


def read_ids(name: str, value: Any, inputs: Mapping[str, Any], size: int | None, pad: int | None = None) -> Ids:
    """Rows of ids from rows, one row, or a tensor `[rows, length]`; their mask in `inputs`, or `pad`, marks padding.

    `size`: how many ids the side of the target has that reads these rows; None if it reads any.
    """
    rows = _lists(value)
    if rows is None or not all(map(is_whole, itertools.chain(*rows))):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise OptionError.of(name, "text, or token ids: integers of shape [rows, length] like `input_ids`", got)
    if not rows:
        raise OptionError(f"`{name}` is empty: pass at least one row")
    rows = [list(map(int, row)) for row in rows]
    mask = inputs.get(MASKS.get(name, ""))
    keep = [[token != pad for token in row] for row in rows]
    if mask is not None:
        keep = read_mask(mask, list(map(len, rows)), MASKS[name])
    unpadded = [list(itertools.compress(row, flags)) for row, flags in zip(rows, keep, strict=True)]
    for r, row in enumerate(unpadded):
        if not row:
            raise OptionError(f"row {r} of `{name}` is empty: pass at least one token, for example the bos id")
        most = math.inf if size is None else size
        wrong = next((token for token in (min(row), max(row)) if not 0 <= token < most), None)
        if wrong is not None:
            ids = "ids from 0" if size is None else f"0 to {size - 1}"
            raise OptionError(
                f"row {r} of `{name}` holds token {wrong}, but the target knows {ids} there: "
                "was it encoded by another tokenizer?"
            )
    return Ids(rows, unpadded, keep)


def _lists(value: Any) -> list[Any] | None:
    """Rows, or one row, as lists; None for other types."""
    value = plain(value)
    rows = [plain(row) for row in value] if is_list(value) else None
    if rows and not any(map(is_list, rows)):
        rows = [rows]
    return rows if rows is not None and all(map(is_list, rows)) else None


def read_mask(mask: Any, lengths: list[int], name: str) -> list[list[bool]]:
    """The mask of rows of these `lengths`; without a mask, all tokens count."""
    rows = [[1] * length for length in lengths] if mask is None else _lists(mask)
    if rows is None or list(map(len, rows)) != lengths or any(map(is_list, itertools.chain(*rows))):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError.of(name, f"one number per token, for rows of {lengths} tokens", got)
    return [[bool(number) for number in row] for row in rows]
