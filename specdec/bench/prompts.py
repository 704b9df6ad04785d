"""Prompts: sets of the package, and files in the formats of public benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from specdec.bench.corpus import held_out_prompts
from specdec.errors import OptionError

_TEXTS = Path(__file__).parent / "texts.jsonl"
# Fields of a JSON line that may hold the prompt: HumanEval's, GSM8K's, others'; Spec-Bench has `turns`.
_FIELDS = ("prompt", "question", "text")
NEWLINE = "\n"


@dataclass(frozen=True)
class PromptText:
    """One prompt and its kind of task."""

    text: str
    category: str


def read_prompts(source: str, count: int) -> list[PromptText]:
    """At most `count` prompts, spread over the categories.

    `source` is a set of the package (`SETS`), a `.jsonl` file (the first of Spec-Bench's `turns` counts), or a text
    file with one prompt per paragraph. Raises OptionError where nothing can be read.
    """
    if source in SETS:
        found = SETS[source](count)
        if not found:
            raise OptionError(f"prompt set {source!r} comes from the standard library, whose sources are not installed")
        return found
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = f"{', '.join(SETS)} or a readable file in UTF-8"
        raise OptionError.of("prompts", known, source, str(error)) from None
    lines = _json_lines(path, text) if path.suffix == ".jsonl" else _paragraphs(path, text)
    found = list(spread(list(lines), count))
    if not found:
        raise OptionError.of("prompts", "a file with prompts in it", source)
    return found


def spread(prompts: Sequence[PromptText], count: int) -> Iterator[PromptText]:
    """The first `count`, taking one of each category in turn."""
    kinds: dict[str, list[PromptText]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*kinds.values()))
    return islice((prompt for prompt in rounds if prompt is not None), count)


def batches(prompts: Sequence[PromptText], size: int) -> list[list[PromptText]]:
    """Batches of one category each; the last of a category may be smaller."""
    kinds = dict.fromkeys(prompt.category for prompt in prompts)
    found = []
    for kind in kinds:
        own = [prompt for prompt in prompts if prompt.category == kind]
        found += [own[i : i + size] for i in range(0, len(own), size)]
    return found


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
    found = turns[0] if isinstance(turns, list) and turns else next((entry[n] for n in _FIELDS if n in entry), None)
    return found if isinstance(found, str) and found else None


def _paragraphs(path: Path, text: str) -> Iterator[PromptText]:
    for block in text.split("\n\n"):
        if block.strip():
            yield PromptText(block.strip("\n"), path.stem)


def _code(count: int) -> list[PromptText]:
    """Code of the standard library that is held out from the training of the package's pair."""
    return [PromptText(text, "class" if text.startswith("class") else "function") for text in held_out_prompts(count)]


def _copy(count: int) -> list[PromptText]:
    """The same followed by its beginning, so that the prompt contains most of the continuation."""
    prompts = held_out_prompts(count)
    return [PromptText(f"{text}\n\n{text[: text.find(NEWLINE, len(text) // 8) + 1]}", "copy") for text in prompts]


def _text(count: int) -> list[PromptText]:
    """English beginnings of several kinds."""
    return list(spread(list(_json_lines(_TEXTS, _TEXTS.read_text(encoding="utf-8"))), count))


SETS: dict[str, Callable[[int], list[PromptText]]] = {"code": _code, "copy": _copy, "text": _text}
