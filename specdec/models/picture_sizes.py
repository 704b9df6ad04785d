"""How many placeholder tokens each picture takes, from its arguments alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import OptionError
from specdec.models.protocols import ModelSpec

_FIXED = {"llava", "paligemma", "gemma3", "internvl", "idefics3", "smolvlm"}


def picture_tokens(
    language: ModelSpec, main: str, tensors: Mapping[str, Tensor], places: Sequence[int], shapes: Mapping[str, Tensor]
) -> tuple[list[int], list[int]]:
    """The tokens of each picture, and the entries of the argument `main` that it takes, where these are patches.

    `tensors`: the arguments of one kind, `shapes`: all of them. `places`: placeholders in each row of text. Raises
    OptionError for sizes that the model cannot read.
    """
    config, value = language.model.config, tensors[main]
    _check_shape(language, main, tensors)
    grid = next((tensor for name, tensor in tensors.items() if name.endswith("_grid_thw")), None)
    if grid is not None:
        return _grid_tokens(config, main, value, grid)
    if "image_sizes" in tensors:
        if not _are_sizes(tensors["image_sizes"], 2):
            raise OptionError.of("image_sizes", "height and width of each picture", tensors["image_sizes"].tolist())
        pack = getattr(language.model.base_model, "pack_image_features", None)
        if pack is not None:
            numbers = shapes.get("batch_num_images")
            sizes = _packed_lengths(language.model.base_model, pack, value, tensors["image_sizes"], numbers)
        else:
            side = _side(config.vision_config.patch_size) * (getattr(config, "spatial_merge_size", None) or 1)
            sizes = (tensors["image_sizes"] // side).prod(-1).tolist()
        return sizes, []
    count = len(value)
    if by_row(main, tensors):
        real = (value != 0).flatten(2).any(-1).sum(1).tolist()
        if len(value) != len(places):
            raise OptionError.of(main, f"of shape [{len(places)}, pictures, channels, height, width]", [*value.shape])
        each = _fixed_tokens(config) or sum(places) // max(sum(real), 1)
        if [n * each for n in real] != list(places):
            raise OptionError(f"`{main}` holds {real} pictures of {each} tokens, and the rows have {places} places")
        return [each] * sum(real), []
    if (tokens := _fixed_tokens(config)) and main == "pixel_values":
        return [tokens] * count, []
    each, remainder = divmod(sum(places), count)
    if remainder or any(run % each for run in places):
        return _runs(count, places), []
    return [each] * count, []


def by_row(main: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an argument holds the pictures of each row of text, padded with empty ones."""
    return main == "pixel_values" and tensors[main].dim() == 5 and "image_sizes" not in tensors


def _fixed_tokens(config: Any) -> int | None:
    """The tokens of every picture, for families with pictures of one size; None for other families."""
    if config.model_type not in _FIXED:
        return None
    vision = config.vision_config
    count = (_side(vision.image_size) // _side(vision.patch_size)) ** 2
    count = getattr(config, "mm_tokens_per_image", None) or count // (getattr(config, "scale_factor", None) or 1) ** 2
    if config.model_type == "llava":  # the first position of some towers is no part of the picture
        cut = config.vision_feature_select_strategy == "default"
        count += ("clip" in vision.model_type) - cut
    return int(count * (getattr(config, "downsample_ratio", None) or 1) ** 2)


def _grid_tokens(config: Any, main: str, value: Tensor, grid: Tensor) -> tuple[list[int], list[int]]:
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    if not _are_sizes(grid, 3) or bool((grid[:, 1:] % merge).any()):
        raise OptionError.of("image_grid_thw", f"[pictures, 3], height and width multiples of {merge}", grid.tolist())
    patches: list[int] = grid.prod(-1).tolist()
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    width = channels * getattr(vision, "temporal_patch_size", 1) * _side(vision.patch_size) ** 2
    if list(value.shape) != [sum(patches), width]:
        expected = f"{sum(patches)} patches of {width} values, as the grids {grid.tolist()} say"
        raise OptionError.of(main, expected, list(value.shape))
    return [count // merge**2 for count in patches], patches


def _are_sizes(sizes: Tensor, dimensions: int) -> bool:
    whole = not (sizes.is_floating_point() or sizes.is_complex())
    return whole and sizes.dim() == 2 and sizes.shape[1] == dimensions and len(sizes) > 0 and int(sizes.min()) > 0


def _packed_lengths(base: Any, pack: Any, value: Tensor, image_sizes: Tensor, numbers: Tensor | None) -> list[int]:
    """The tokens of pictures that the model cuts to their form: the model's code counts them, on zeros."""
    vision = base.config.vision_config
    count = sys.modules[type(base).__module__].image_size_to_num_patches
    are_tiled = [True] * len(image_sizes) if numbers is None else [n == 1 for n in numbers.tolist() for _ in range(n)]
    features = []
    for size, is_tiled in zip(image_sizes, are_tiled, strict=True):
        patches = count(size, base.config.image_grid_pinpoints, vision.image_size) if is_tiled else 1
        if value.dim() != 5 or value.shape[1] < patches:
            expected = f"of shape [pictures, {patches} or more, channels, height, width]"
            raise OptionError.of("pixel_values", expected, list(value.shape))
        features.append(torch.zeros(patches, (vision.image_size // vision.patch_size) ** 2, 1))
    defaults = {"vision_feature_select_strategy": "full"}
    options = {name: value for name, value in defaults.items() if name in inspect.signature(pack).parameters}
    newline = None if getattr(base, "image_newline", None) is None else torch.zeros(1)
    lengths: list[int] = pack(features, image_sizes, image_newline=newline, **options)[1].tolist()
    return lengths


def _runs(count: int, places: Sequence[int]) -> list[int]:
    """Sizes without a rule: a row's only picture, or the only picture, fills all places; -1: size not known."""
    lengths = [run for run in places if run]
    return lengths if len(lengths) == count else [sum(places)] if count == 1 else [-1] * count


def _check_shape(language: ModelSpec, main: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises OptionError for pictures of a wrong size, and for pictures that come without their sizes."""
    value, vision = tensors[main], getattr(language.model.config, "vision_config", None)
    if not value.numel():
        raise OptionError.of(main, "at least one picture", list(value.shape))
    packs = hasattr(language.model.base_model, "pack_image_features")
    required = {
        "image_grid_thw": main == "pixel_values" and "image_grid_thw" in language.input_names,
        "video_grid_thw": main == "pixel_values_videos" and "video_grid_thw" in language.input_names,
        "image_sizes": main == "pixel_values" and (packs or getattr(vision, "model_type", None) == "pixtral"),
    }
    if absent := [name for name, is_needed in required.items() if is_needed and name not in tensors]:
        raise OptionError(f"`{main}` came without `{absent[0]}`: pass all that the processor returned")
    if main != "pixel_values" or vision is None or value.dim() < 4 or "pixel_attention_mask" in tensors:
        return
    size = getattr(vision, "image_size", None)
    if size is None or ("image_sizes" in tensors and value.dim() == 4 and vision.model_type == "pixtral"):
        return
    shape = [getattr(vision, "num_channels", 3), _side(size), _side(size, -1)]
    if list(value.shape[-3:]) != shape:
        raise OptionError.of(main, f"pictures of shape {shape}", list(value.shape))


def _side(size: Any, axis: int = 0) -> int:
    return int(size[axis] if isinstance(size, list | tuple) else size)
