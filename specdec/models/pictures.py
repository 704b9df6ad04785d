"""From the arguments that transformers' processors make of pictures and text to what each row of a batch reads.

A processor puts one placeholder token into the text for each vector that a picture becomes, and stacks the pictures of
all rows. Here they are dealt out to the rows again, by counting. What follows the last picture is text like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.work import Pictures
from specdec.errors import OptionError, UnsupportedError
from specdec.models.picture_sizes import by_row, picture_tokens
from specdec.models.protocols import ModelSpec


class _Kind(NamedTuple):
    """A kind of picture: its word in errors, its main argument, and the arguments with one entry per picture."""

    word: str
    main: str
    per_item: tuple[str, ...]


_KINDS = {
    "image": _Kind("picture", "pixel_values", ("image_grid_thw", "image_sizes", "pixel_attention_mask")),
    "video": _Kind("video", "pixel_values_videos", ("video_grid_thw", "image_sizes_videos", "second_per_grid_ts")),
    "audio": _Kind("recording", "input_features", ("feature_attention_mask", "input_features_mask")),
}
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
_PER_ROW = ("batch_num_images",)
NAMES = frozenset({*_PER_TOKEN, *_PER_ROW, *(name for kind in _KINDS.values() for name in (kind.main, *kind.per_item))})
"""The arguments of models beside ids and masks."""

_SIZES = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "scale_factor", "downsample_ratio")

_WAY_OUT = "pass what one call of the processor made of text and pictures"

# Their prompts are read in both directions: if token types mark them, and without types where nobody masks anything.
_TWO_WAYS = {"paligemma"}
# Their pictures stand before the text, in columns without tokens.
_BEFORE_TEXT = {"git"}


def reads_media(model: Any, input_names: frozenset[str]) -> bool:
    """Whether a model continues text and reads pictures or recordings in it."""
    return not model.config.is_encoder_decoder and any(kind.main in input_names for kind in _KINDS.values())


def reads_two_ways(language: ModelSpec, tensors: Mapping[str, Any]) -> bool:
    """Whether a model reads its prompts with these inputs in both directions."""
    if language.model.config.model_type not in _TWO_WAYS:
        return False
    return "token_type_ids" in tensors or (language.forgets_order and language.capability.cache_kind == "kv")


def place_tokens(config: Any) -> set[int]:
    names = [f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index")]
    return {token for name in names if (token := getattr(config, name, None)) is not None}


def reads_media_alike(model: ModelSpec, other: ModelSpec) -> bool:
    """Whether two models read the same arguments, with as many tokens for each picture."""
    both = []
    for config in (model.model.config, other.model.config):
        parts = (config, getattr(config, "vision_config", None))
        both.append([config.model_type, *(getattr(part, name, None) for part in parts for name in _SIZES)])
    return model.reads_media and other.reads_media and both[0] == both[1]


def read_pictures(
    language: ModelSpec,
    inputs: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    whole: bool = False,
) -> list[Pictures | None]:
    """What each row of a batch reads beside its text; None for rows of text alone.

    `rows`: ids without padding; `masks`: which of the caller's ids these are. With `whole`, a row's text is read with
    its pictures to the end. Raises OptionError where places and pictures do not fit, UnsupportedError for models that
    cannot go on in text.
    """
    tensors = {name: _tensor(name, inputs[name]) for name in sorted(NAMES & inputs.keys())}
    if extra := sorted(tensors.keys() - language.input_names - set(_PER_TOKEN)):
        raise UnsupportedError(f"{type(language.model).__name__} does not read `{extra[0]}`: leave it out")
    parts: list[dict[str, Tensor]] = [{} for _ in rows]
    ends, before = [0] * len(rows), 0
    for word, kind in _KINDS.items():
        places = _places(language.model.config, word, rows)
        ends = [max(end, positions[-1] + 1 if positions else 0) for end, positions in zip(ends, places, strict=True)]
        arguments = {name: tensors[name] for name in (kind.main, *kind.per_item) if name in tensors}
        if kind.main in arguments and language.model.config.model_type in _BEFORE_TEXT:
            shares, before = _before_text(language, kind, arguments[kind.main], len(rows))
            ends = [1] * len(rows)
        else:
            shares = _deal(language, kind, arguments, list(map(len, places)), tensors)
        parts = [{**part, **more} for part, more in zip(parts, shares, strict=True)]
    for name in _PER_TOKEN:
        if name in tensors and name in language.input_names:
            types, shape = tensors[name], [len(masks), max(map(len, masks))]
            if list(types.shape) != shape:
                raise OptionError.of(name, f"of shape {shape}, like the ids", list(types.shape))
            for part, kinds, mask in zip(parts, types, masks, strict=True):
                part[name] = kinds[: len(mask)][torch.tensor(mask)][None]
    if two_ways := reads_two_ways(language, inputs):
        zeros = [torch.zeros(1, len(ids), dtype=torch.long) for ids in rows]
        parts = [{"token_type_ids": row, **part} for part, row in zip(parts, zeros, strict=True)]
    read: list[Pictures | None] = []
    for row, (part, end, ids) in enumerate(zip(parts, ends, rows, strict=True)):
        for name in _PER_ROW:
            if end and name in tensors:
                part[name] = tensors[name][row : row + 1]
        end = len(ids) if two_ways or (end and whole) else end
        pictures = _read(language, part, list(ids), end) if end else None
        if pictures is not None and before:
            pictures = replace(pictures, length=before + end, shift=-before, before=before)
        read.append(pictures)
    if any(read) and (language.capability.cache_kind != "kv" or language.capability.cache_reset_length is not None):
        reason = language.capability.reason or "it reads its text again where its scaling changes"
        raise UnsupportedError(f"{type(language.model).__name__} runs here on text alone ({reason})")
    if any(map(needs_media_modules, read)):
        language.load_media_modules()
    return read


def needs_media_modules(pictures: Pictures | None) -> bool:
    """Whether a pass needs the modules that read pictures, and not only other masks."""
    return pictures is not None and any(kind.main in pictures.inputs for kind in _KINDS.values())


def _tensor(name: str, value: Any) -> Tensor:
    expected = "a tensor, as a processor makes it"
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError.of(name, expected, type(value).__name__, str(error)) from None
    if not tensor.dim():
        raise OptionError.of(name, expected, value)
    return tensor


def _places(config: Any, kind: str, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The positions of each row that hold a placeholder of this kind."""
    mark = getattr(config, f"{kind}_token_id", None)
    mark = getattr(config, f"{kind}_token_index", None) if mark is None else mark
    return [[place for place, token in enumerate(ids) if token == mark] for ids in rows]


def _deal(
    language: ModelSpec, kind: _Kind, tensors: Mapping[str, Tensor], places: list[int], shapes: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """The rows' parts of the arguments of one kind; row i has `places[i]` placeholders."""
    if kind.main not in tensors:
        if sum(places):
            raise OptionError(
                f"the text has {sum(places)} places for a {kind.word}, and none was given: pass `{kind.main}`"
            )
        return [{} for _ in places]
    if not sum(places):
        way_out = "put its placeholder tokens into the text, as the processor or chat template does"
        raise OptionError(f"`{kind.main}` holds a {kind.word} without a place in the text: {way_out}")
    sizes, units = picture_tokens(language, kind.main, tensors, places, shapes)
    counts = _counts(sizes, places)
    if counts is None:
        tokens = f"of {sizes[0]} tokens each" if len(set(sizes)) == 1 else f"of {sizes} tokens"
        raise OptionError(
            f"`{kind.main}` holds {len(sizes)} {kind.word}s {tokens}, and the rows have {places} places for these: "
            + _WAY_OUT
        )
    firsts, rows_apart = [0, *accumulate(counts)], by_row(kind.main, tensors)
    parts = []
    for row, (first, count) in enumerate(zip(firsts, counts, strict=False)):
        share = {}
        for name, tensor in tensors.items() if count else ():
            if rows_apart and len(tensor) == len(places):
                share[name] = tensor[row : row + 1]
            elif len(tensor) == len(sizes):
                share[name] = tensor[first : first + count]
            elif len(tensor) == sum(units):  # patches of all pictures
                share[name] = tensor[sum(units[:first]) : sum(units[: first + count])]
            else:
                raise OptionError.of(name, f"one entry for each of {len(sizes)} {kind.word}s", list(tensor.shape))
        parts.append(share)
    return parts


def _before_text(language: ModelSpec, kind: _Kind, value: Tensor, count: int) -> tuple[list[dict[str, Tensor]], int]:
    """Each row's picture, or frames of a video, and how many columns they take before the text, as GIT reads them."""
    config = language.model.config
    vision, frames = config.vision_config, getattr(config, "num_image_with_embedding", None)
    shape = [count, *([frames] if frames else []), vision.num_channels, vision.image_size, vision.image_size]
    if list(value.shape) != shape:
        raise OptionError.of(kind.main, f"one {kind.word} a row, of shape {shape}", list(value.shape))
    columns = ((vision.image_size // vision.patch_size) ** 2 + 1) * (frames or 1)
    return [{kind.main: value[row : row + 1]} for row in range(count)], columns


def _counts(sizes: Sequence[int], places: Sequence[int]) -> list[int] | None:
    """How many pictures each row reads, if pictures of these sizes fill its places."""
    counts, at = [], 0
    for remaining in places:
        begin = at
        while remaining > 0 and at < len(sizes):
            remaining -= sizes[at]
            at += 1
        if remaining:
            return None
        counts.append(at - begin)
    return counts if at == len(sizes) else None


def _read(language: ModelSpec, part: dict[str, Tensor], ids: list[int], end: int) -> Pictures:
    """A row's pictures, for a pass over the first `end` of its ids."""
    inputs = {"input_ids": torch.tensor([ids[:end]]), "attention_mask": torch.ones(1, end, dtype=torch.long), **part}
    for name in _PER_TOKEN:
        if name in inputs:
            inputs[name] = inputs[name][:, :end]
    if "mm_token_type_ids" in language.input_names and "mm_token_type_ids" not in inputs:
        # each token's kind: 0 for text, then in the order of `_KINDS`
        inputs["mm_token_type_ids"] = types = torch.zeros_like(inputs["input_ids"])
        for number, kind in enumerate(_KINDS, 1):
            types[0, _places(language.model.config, kind, [ids[:end]])[0]] = number
    shift = 0
    rope_index = getattr(language.model.base_model, "get_rope_index", None)
    if rope_index is not None:
        names = inspect.signature(rope_index).parameters
        try:
            positions, _ = rope_index(**{name: value for name, value in inputs.items() if name in names})
        except (RuntimeError, StopIteration, IndexError) as error:
            raise OptionError(f"the pictures do not fit their places in the text ({error}): {_WAY_OUT}") from None
        inputs["position_ids"], shift = positions, int(positions.max()) + 1 - end
    else:
        inputs["position_ids"] = torch.arange(end)[None]
    placed = {
        name: value.to(language.device, language.dtype if value.is_floating_point() and value.dim() > 1 else None)
        for name, value in inputs.items()
    }
    return Pictures(placed, end, shift)
