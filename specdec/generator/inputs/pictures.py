"""Pictures in conversations: opened within limits, and put into the text by the model's processor."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

from specdec.errors import OptionError
from specdec.generator.tokenizers import ids_of

PIXELS = 2**26
"""The most pixels of a picture: as many as a square of 8192."""
_KINDS = ("image", "image_url")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS and others, for which Pillow runs programs


def split_processor(tokenizer: Any) -> tuple[Any, Any]:
    """The tokenizer, and the processor that it is a part of; None for a tokenizer alone."""
    inner = getattr(tokenizer, "tokenizer", None)
    return (tokenizer, None) if inner is None or not hasattr(tokenizer, "image_processor") else (inner, tokenizer)


def has_pictures(messages: Any) -> bool:
    """Whether a conversation, or one of several, has a part that is a picture."""
    return any(part.get("type") in _KINDS for conversation in _conversations(messages) for part in _parts(conversation))


def with_pictures(
    messages: Any, processor: Any, *, fetch: bool = False, pixels: int = PIXELS, **template: Any
) -> dict[str, Any]:
    """The model's inputs for conversations with pictures: ids, their mask, and the processor's other tensors.

    A picture is a part `{"type": "image", "image": …}` of a message's content: a path, a PIL image, a data URL, or with
    `fetch` any URL; of at most `pixels` pixels. `template`: arguments of the chat template. Raises OptionError for
    pictures that cannot be opened, and for messages that the template refuses.
    """
    if processor is None:
        raise OptionError("pictures in `messages` need the model's processor: pass it to SpecGenerator as `tokenizer=`")

    read = partial(open_picture, fetch=fetch, pixels=pixels)
    conversations = [[_with_open_pictures(message, read) for message in c] for c in _conversations(messages)]
    how: dict[str, Any] = {"padding": True} if len(conversations) > 1 else {}
    how |= {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt", **template}
    try:
        return dict(processor.apply_chat_template(conversations, **how))
    except Exception as error:  # whatever a template or a processor raises
        raise OptionError(f"the model's processor refused `messages`: {error}") from error


def has_template(tokenizer: Any, processor: Any) -> bool:
    """Whether the model has a chat template, the tokenizer's or the processor's."""
    return any(getattr(reader, "chat_template", None) for reader in (tokenizer, processor))


def chat_ids(conversation: Any, tokenizer: Any, processor: Any, **template: Any) -> list[int]:
    """The ids of a conversation of text alone; a processor's template takes texts in parts, and loses other texts."""
    if getattr(processor, "chat_template", None) is None:
        how = {"add_generation_prompt": True, **template, "tokenize": False}
        text = tokenizer.apply_chat_template(conversation, **how)
        return ids_of(tokenizer, text, add_special_tokens=False)
    ids: list[int] = with_pictures(conversation, processor, **template)["input_ids"][0].tolist()
    return ids


def open_picture(source: Any, *, fetch: bool = False, pixels: int = PIXELS) -> Any:
    """A picture as a PIL image in RGB, from an image, a path, a data URL, or with `fetch` any URL.

    Raises OptionError for a value that is no picture, for broken files, and before decoding for more than `pixels`.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise OptionError(
            "pictures are opened by Pillow, which is not installed: pip install -c constraints.txt -e '.[pictures]'"
        ) from None
    if not isinstance(source, Image.Image | str | PathLike):
        raise OptionError.of("image", "a path, a PIL image or a data URL", type(source).__name__)
    is_name = isinstance(source, str | PathLike) and not str(source).startswith("data:")
    name = f"the picture {str(source)[:80]!r}" if is_name else "the picture"
    try:
        image = source if isinstance(source, Image.Image) else Image.open(_file(str(source), fetch), formats=_FORMATS)
        if image.width * image.height > pixels:
            size = f"{image.width} x {image.height}"
            raise OptionError(f"{name} has {size} pixels, and at most {pixels} are read: make it smaller")
        return ImageOps.exif_transpose(image).convert("RGB")
    except OptionError:
        raise
    except Exception as error:  # whatever broken files raise
        why = "of no such format" if isinstance(error, UnidentifiedImageError) else error
        raise OptionError(f"{name} cannot be opened ({why}): pass a picture in PNG, JPEG or WebP") from None


def _file(source: str, fetch: bool) -> Any:
    """The path, or the bytes of the URL, that Pillow opens."""
    if source.startswith("data:"):
        head, comma, body = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise OptionError("the picture's data URL must be base64: data:image/png;base64,…")
        try:
            return io.BytesIO(base64.b64decode(body, validate=True))
        except (binascii.Error, ValueError) as error:
            raise OptionError(f"the picture's data URL is no base64 ({error}): encode it again") from None
    if not source.startswith(("http:", "https:")):
        return source.removeprefix("file://")
    if not fetch:
        raise OptionError(f"the picture {source[:80]!r} is a URL: load it yourself, or pass `fetch_pictures=True`")
    from transformers.image_utils import load_image

    buffer = io.BytesIO()
    load_image(source, timeout=30).save(buffer, "PNG")
    return buffer


def _conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or not messages:
        return []
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _parts(conversation: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of its messages' contents."""
    for message in conversation if isinstance(conversation, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (
            part for part in (content if isinstance(content, list | tuple) else ()) if isinstance(part, Mapping)
        )


def _with_open_pictures(message: Any, read: Callable[[Any], Any]) -> Any:
    """A message with its pictures opened, and all its content in parts, as templates of models that see expect."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [_part(part, read) for part in parts]} if isinstance(parts, list | tuple) else message


def _part(part: Any, read: Callable[[Any], Any]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
        return part
    names = [name for name in ("image", "image_url", "path", "url") if name in part]
    if len(names) != 1:
        raise OptionError.of("image", "one picture in a part of type 'image'", sorted(part))
    source = part[names[0]]
    return {"type": "image", "image": read(source.get("url") if isinstance(source, Mapping) else source)}
