"""Prompts of every shape, read into rows of token ids without padding, and what an encoder needs beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.config import Options
from specdec.errors import OptionError, UnsupportedError
from specdec.models import LanguageModel

ENCODER_INPUTS = ("input_features", "input_values", "pixel_values")
NAMES = frozenset(
    {"inputs", "input_ids", "attention_mask", "inputs_embeds", "decoder_input_ids", "decoder_attention_mask"}
    | {"encoder_outputs", *ENCODER_INPUTS}
)
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor | None


@dataclass(frozen=True)
class Prompts:
    """Rows ready for decoding.

    `rows[r]` are the decoder ids without padding, `padded` `[rows, width]` the same with padding on the left, as the
    result returns them. `encoder` holds the encoder's arguments, `encoder_rows` the ids it reads. `embeds[r]`
    `[length, width]` replaces the ids of a row, which are then placeholders and `padded` is empty.
    """

    rows: list[list[int]]
    padded: Tensor
    is_text: bool
    encoder: dict[str, Tensor] | None = None
    encoder_rows: list[list[int]] | None = None
    embeds: list[Tensor] | None = None

    @property
    def widths(self) -> list[int]:
        """Per row, the padding that transformers would count as part of its length."""
        width = max(map(len, self.rows))
        return [width - len(row) for row in self.rows]


def read_prompts(
    prompt: Prompt,
    messages: Sequence[Any] | None,
    given: Mapping[str, Any],
    options: Options,
    target: LanguageModel,
    tokenizer: Any,
) -> Prompts:
    """Prompts of a call; `given` are the model inputs among its keyword arguments.

    Raises OptionError for prompts that are empty, of a wrong type or shape, outside the vocabulary, or given twice.
    """
    named = [n for n in ("inputs", "input_ids", "inputs_embeds", *ENCODER_INPUTS, "encoder_outputs") if n in given]
    if target.is_encoder_decoder and "encoder_outputs" in given:
        raise UnsupportedError("`encoder_outputs` is not supported: pass the encoder's own inputs")
    sources = [n for n, there in (("prompt", prompt is not None), ("messages", messages is not None)) if there] + named
    if len(sources) > 1:
        raise OptionError(f"the prompt was given {len(sources)} times ({', '.join(sources)}): pass one of them")
    if messages is not None:
        prompt = _chat(messages, tokenizer)
    value = prompt if prompt is not None else given.get("inputs", given.get("input_ids"))
    if target.is_encoder_decoder:
        return _encoder_decoder(value, given, options, target, tokenizer)
    if any(n in given for n in ENCODER_INPUTS):
        raise UnsupportedError(f"`{named[0]}` is for models with an encoder; this target reads token ids")
    if "inputs_embeds" in given:
        return _embedded(given, target)
    rows, is_text = _rows(value, given.get("attention_mask"), options, tokenizer)
    return _checked(Prompts(rows, _pad(rows, value, options), is_text), target)


def _chat(messages: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Ids of one conversation or of several, through the tokenizer's chat template."""
    if tokenizer is None:
        raise OptionError("`messages` needs a tokenizer with a chat template: pass `tokenizer=` to SpecGenerator")
    if not messages:
        raise OptionError.of("messages", "a list of messages", messages)
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    return [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        for c in conversations
    ]


def _rows(value: Prompt, mask: Tensor | None, options: Options, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """Rows of ids without padding, and whether they were text."""
    if value is None:
        start = options.bos_token_id
        if not isinstance(start, int):
            raise OptionError("no prompt was given, and the model has no `bos_token_id` to start from: pass a prompt")
        return [[start]], False
    if isinstance(value, Tensor):
        return _tensor_rows(value, mask, options), False
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise OptionError.of("prompt", "text, a list of texts, or token ids", type(value).__name__)
    items = list(value)
    if not items:
        raise OptionError("the prompt is an empty list: pass at least one prompt")
    if mask is not None:
        raise OptionError("`attention_mask` goes with a tensor of `input_ids`: lists are never padded, leave it out")
    if all(isinstance(item, str) for item in items):
        if tokenizer is None:
            raise OptionError("a text prompt needs a tokenizer: pass `tokenizer=` to SpecGenerator, or token ids")
        return [list(tokenizer(item)["input_ids"]) for item in items], True
    if all(_is_id(item) for item in items):
        items = [items]
    rows = [item.tolist() if isinstance(item, Tensor) else item for item in items]
    if not all(isinstance(row, Sequence) and not isinstance(row, str) and all(map(_is_id, row)) for row in rows):
        raise OptionError.of("prompt", "text, a list of texts, or token ids", [type(item).__name__ for item in items])
    return [list(map(int, row)) for row in rows], False


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _tensor_rows(ids: Tensor, mask: Tensor | None, options: Options, name: str = "input_ids") -> list[list[int]]:
    """Rows of a padded `[rows, length]` tensor; without a mask, padding is told by the pad id, as transformers does."""
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise OptionError.of(name, "integers of shape [rows, length]", f"{ids.dtype} {list(ids.shape)}")
    if mask is None:
        pad = options.pad_token_id
        infer = pad is not None and pad not in options.eos_ids
        mask = ids != pad if infer else torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise OptionError.of("attention_mask", f"of the shape of `{name}` {list(ids.shape)}", list(mask.shape))
    return [row[keep.bool()].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]


def _pad(rows: list[list[int]], value: Prompt, options: Options) -> Tensor:
    """`[rows, width]`: the tensor as it was given, or the rows padded on the left."""
    if isinstance(value, Tensor):
        return (value if value.dim() == 2 else value[None]).cpu()
    width = max(map(len, rows))
    pad = options.pad_token_id if options.pad_token_id is not None else (options.eos_ids or [0])[0]
    return torch.tensor([[pad] * (width - len(row)) + row for row in rows], dtype=torch.long)


def _embedded(given: Mapping[str, Any], target: LanguageModel) -> Prompts:
    """Prompts given as embeddings `[rows, length, width]`; placeholders stand for their ids."""
    embeds, mask = given["inputs_embeds"], given.get("attention_mask")
    if not isinstance(embeds, Tensor) or embeds.dim() != 3:
        raise OptionError.of("inputs_embeds", "a tensor of shape [rows, length, width]", type(embeds).__name__)
    keep = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
    kept = [row[k.to(row.device)].to(target.device, target.dtype) for row, k in zip(embeds, keep, strict=True)]
    prompts = Prompts([[0] * len(row) for row in kept], torch.empty(len(kept), 0, dtype=torch.long), False, embeds=kept)
    return _checked(prompts, target)


def _encoder_decoder(
    value: Prompt, given: Mapping[str, Any], options: Options, target: LanguageModel, tokenizer: Any
) -> Prompts:
    """Encoder inputs as given, and decoder prompts that begin with the start id."""
    features = next((n for n in ENCODER_INPUTS if n in given), None)
    encoder_rows: list[list[int]] | None = None
    is_text = False
    if features is not None:
        encoder = {features: given[features]}
        if "attention_mask" in given:
            encoder["attention_mask"] = given["attention_mask"]
    elif value is None:
        raise OptionError("this target has an encoder, which got nothing to read: pass a prompt or its features")
    else:
        encoder_rows, is_text = _rows(value, given.get("attention_mask"), options, tokenizer)
        _check_ids(encoder_rows, target, "prompt")
        encoder = _right_padded(encoder_rows, options)
    encoder = {name: tensor.to(target.device) for name, tensor in encoder.items()}
    count = len(next(iter(encoder.values())))
    rows, padded = _decoder_rows(count, given, options, target)
    return _checked(Prompts(rows, padded, is_text, encoder, encoder_rows), target)


def _right_padded(rows: list[list[int]], options: Options) -> dict[str, Tensor]:
    width = max(map(len, rows))
    pad = options.pad_token_id or 0
    return {
        "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def _decoder_rows(
    count: int, given: Mapping[str, Any], options: Options, target: LanguageModel
) -> tuple[list[list[int]], Tensor]:
    """Decoder prompts: the start id of each row, before the caller's `decoder_input_ids` where they lack it."""
    start = options.start_ids
    ids = given.get("decoder_input_ids")
    if ids is None:
        if not start:
            raise OptionError("the model has neither `decoder_start_token_id` nor `bos_token_id`: pass one of them")
        if len(start) not in (1, count):
            raise OptionError.of("decoder_start_token_id", f"one id, or one for each of {count} rows", start)
        rows = [[s] for s in (start * count if len(start) == 1 else start)]
        return rows, torch.tensor(rows)
    if not isinstance(ids, Tensor):
        ids = torch.tensor(ids)
    rows = _tensor_rows(ids, given.get("decoder_attention_mask"), options, "decoder_input_ids")
    ids = ids if ids.dim() == 2 else ids[None]
    if len(rows) != count:
        raise OptionError.of("decoder_input_ids", f"{count} rows, one per encoder input", len(rows))
    if start and target.config.model_type != "whisper" and all(row[:1] != start[:1] for row in rows):
        rows = [start[:1] + row for row in rows]
        ids = torch.cat([torch.full((count, 1), start[0]), ids.cpu()], 1)
    return rows, ids.cpu()


def _checked(prompts: Prompts, target: LanguageModel) -> Prompts:
    if prompts.embeds is None:
        _check_ids(prompts.rows, target, "prompt")
    for r, row in enumerate(prompts.rows):
        if not row:
            raise OptionError(f"row {r} of the prompt is empty: pass at least one token, for example the bos id")
    return prompts


def _check_ids(rows: list[list[int]], target: LanguageModel, name: str) -> None:
    for r, row in enumerate(rows):
        if not row:
            raise OptionError(f"row {r} of the {name} is empty: pass at least one token, for example the bos id")
        low, high = min(row), max(row)
        if low < 0 or high >= target.vocab_size:
            wrong = low if low < 0 else high
            raise OptionError(
                f"row {r} of the {name} holds token {wrong}, but the target knows 0 to {target.vocab_size - 1}: "
                "was it encoded by another tokenizer?"
            )
