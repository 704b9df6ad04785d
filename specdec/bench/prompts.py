"""Prompts: sets of the package, and files in the formats of public benchmarks.

The text of the package's pair, and of its set `code`, is the standard library of the running interpreter, split in two.
"""

from __future__ import annotations

import json
import re
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from specdec.errors import OptionError

_TEXTS = Path(__file__).parent / "texts.jsonl"
# Fields of a JSON line that may hold the prompt: HumanEval's, GSM8K's, others'; Spec-Bench has `turns`.
_FIELDS = ("prompt", "question", "text")

# Generated tables and tests.
_SKIPPED_FOLDERS = {
    *("__pycache__", "encodings", "ensurepip", "idle_test", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "test", "tests"),
}
_HELD_OUT_PERCENT = 5
_CHARACTERS = 480


@dataclass(frozen=True)
class PromptText:
    """One prompt and its kind of task."""

    text: str
    category: str


def pick_prompts(source: str, count: int) -> list[PromptText]:
    """At most `count` prompts, spread over the categories.

    `source` is a set of the package (`SETS`), a `.jsonl` file (the first of Spec-Bench's `turns` counts), or a text
    file with one prompt per paragraph. Raises OptionError where nothing can be read.
    """
    if source in SETS:
        prompts = SETS[source](count)
        if not prompts:
            raise OptionError(f"prompt set {source!r} comes from the standard library, whose sources are not installed")
        return prompts
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"{', '.join(SETS)} or a readable file in UTF-8"
        raise OptionError.of("prompts", expected, source, str(error)) from None
    if path.suffix == ".jsonl":
        prompts = list(_json_lines(path, text))
    else:
        prompts = [PromptText(block.strip("\n"), path.stem) for block in text.split("\n\n") if block.strip()]
    prompts = list(spread(prompts, count))
    if not prompts:
        raise OptionError.of("prompts", "a file with prompts in it", source)
    return prompts


def spread(prompts: Sequence[PromptText], count: int) -> Iterator[PromptText]:
    """The first `count` prompts, one of each category in turn."""
    rounds = chain.from_iterable(zip_longest(*_by_category(prompts)))
    return islice((prompt for prompt in rounds if prompt is not None), count)


def batches(prompts: Sequence[PromptText], size: int) -> list[list[PromptText]]:
    """Batches of one category each; the last batch of a category may be smaller."""
    return [group[i : i + size] for group in _by_category(prompts) for i in range(0, len(group), size)]


def _by_category(prompts: Sequence[PromptText]) -> Iterable[list[PromptText]]:
    kinds = defaultdict[str, list[PromptText]](list)
    for prompt in prompts:
        kinds[prompt.category].append(prompt)
    return kinds.values()


def _json_lines(path: Path, text: str) -> Iterator[PromptText]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError(f"`prompts` {path} line {number} is not JSON ({error}): correct it") from None
        prompt = _text_of(entry)
        if prompt is None:
            fields = ", ".join(f"`{name}`" for name in ("turns", *_FIELDS))
            raise OptionError(f"`prompts` {path} line {number} has no text under {fields}: name one of them so")
        yield PromptText(prompt, str(entry.get("category", path.stem)))


def _text_of(entry: Any) -> str | None:
    """The prompt of a line; None without one."""
    if not isinstance(entry, Mapping):
        return None
    turns = entry.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else next((entry[n] for n in _FIELDS if n in entry), None)
    return text if isinstance(text, str) and text else None


def _code(count: int) -> list[PromptText]:
    """Code of the standard library that is held out from the training of the package's pair."""
    return [PromptText(text, "class" if text.startswith("class") else "function") for text in held_out_prompts(count)]


def _copy(count: int) -> list[PromptText]:
    """Held-out code followed by its beginning, so that the prompt contains most of the continuation."""
    texts = held_out_prompts(count)
    return [PromptText("\n\n".join((text, text[: text.find("\n", len(text) // 8) + 1])), "copy") for text in texts]


def _text(count: int) -> list[PromptText]:
    """English beginnings of several kinds."""
    return list(spread(list(_json_lines(_TEXTS, _TEXTS.read_text(encoding="utf-8"))), count))


SETS: dict[str, Callable[[int], list[PromptText]]] = {"code": _code, "copy": _copy, "text": _text}


def is_held_out(relative_path: str) -> bool:
    """Whether a module is kept for evaluation; its path decides, so the split is the same on every machine."""
    return zlib.crc32(relative_path.encode()) % 100 < _HELD_OUT_PERCENT


def source_files(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yields `(relative path, text)` of one side of the split, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or is_held_out(relative.as_posix()) != held_out:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield relative.as_posix(), text


def held_out_prompts(count: int) -> list[str]:
    """At most `count` prompts: held-out code of about 480 characters from a `def` or `class` to a line end."""
    prompts: list[str] = []
    for _, text in source_files(held_out=True):
        starts = [match.start() + 1 for match in re.finditer(r"\n(def|class) ", text)]
        starts = [start for start in starts if len(text) - start > 2 * _CHARACTERS]
        if starts:
            start = starts[len(starts) // 2]
            prompts.append(text[start : text.find("\n", start + _CHARACTERS) + 1])
        if len(prompts) == count:
            break
    return prompts
