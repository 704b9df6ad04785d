"""The spelling of a draft: one text in Python, on the command line, in files and in benchmarks.

`WORD` or `WORD:ARGUMENT` (suffix, ngram, early_exit:N, mtp), a model's `ID` (hub id, path or zoo:NAME), `WORD+ID` for a
hybrid of a word that copies and a model or `quantized`, `model:ID` for a model that copies nothing beside its guesses,
`auto` for what drafts well for the target without another model, or `none`. A path whose name looks like a word or
holds a "+" can be written as ./NAME; an existing path with a "+" is a path anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from os.path import exists

from specdec.errors import OptionError, closest_name
from specdec.options.bundled_models import locate
from specdec.options.fields import COPYING, DRAFT_WORDS
from specdec.options.load import AUTO, NONE

FOLLOWING = tuple(name for name, word in DRAFT_WORDS.items() if word.follows)
"""The words that may follow a word that copies."""
WORDS = tuple(f"{name}:{word.argument}" if word.argument else name for name, word in DRAFT_WORDS.items())
ALONE = "model"
"""The word before a draft model that does not copy besides."""
SPELLINGS = f"{', '.join(WORDS)}, a model (hub id, path or zoo:NAME), {COPYING[0]}+MODEL, {ALONE}:MODEL, {AUTO} or none"


@dataclass(frozen=True)
class DraftName:
    """The parts of a spelling: a `word` with its `argument`, a `model`, a word and a model, or nothing (auto, none).

    Of a hybrid with another word, that word is the argument.
    """

    word: str | None = None
    argument: str | None = None
    model: str | None = None

    @property
    def copies(self) -> bool:
        """Whether the draft copies from texts, so that it can use a `prediction`."""
        return self.word in COPYING


def read_draft(draft: str, name: str = "draft", words: Collection[str] = DRAFT_WORDS.keys()) -> DraftName:
    """The parts of the spelling `draft`; `name` is the caller's argument, and `words` are registered.

    Raises OptionError for a word that is misspelt or has a wrong argument, for a hybrid unless a word that copies and a
    model make it, and for an unknown zoo:NAME.
    """
    if draft in (AUTO, NONE):
        return DraftName()
    first, plus, model = draft.partition("+")
    word, colon, argument = draft.partition(":") if ":" in first else (first, "", "")
    is_path = exists(draft)
    if word == ALONE and argument and not is_path:
        return DraftName(ALONE, model=locate(argument, "draft", name))
    if word not in words or (plus and is_path):
        near = None if "/" in word or is_path else closest_name(word, words)
        if near is not None or not draft:
            way_out = f"did you mean {near!r}? A model of that name can be loaded from a folder" if near else ""
            raise OptionError.of(name, SPELLINGS, draft, way_out)
        return DraftName(model=locate(draft, "draft", name))
    if plus and not colon:
        part = read_draft(model or "none", name, words)
        follows = part.model is not None if part.word is None else part.word in FOLLOWING
        if word not in COPYING or not follows:
            raise OptionError.of(name, f"{' or '.join(COPYING)} before the + of a hybrid, and a model after it", draft)
        return DraftName(word, part.word, part.model)
    if word in DRAFT_WORDS and not DRAFT_WORDS[word].takes(argument if colon else None):
        raise OptionError.of(name, SPELLINGS, draft)
    return DraftName(word, argument if colon else None)
