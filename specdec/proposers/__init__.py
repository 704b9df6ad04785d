"""Drafts: what proposes tokens that the target may accept; none of them decides acceptance.

A new draft is a class with `BatchDrafter`'s attributes, and if callers should find it by a word, a line in
`specdec.options.fields.DRAFT_WORDS`. docs/extending.md has an example.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specdec.options.fields import DRAFT_WORDS
from specdec.proposers.best_branch import BestBranch
from specdec.proposers.early_exit import EarlyExitDrafter
from specdec.proposers.function import FunctionDrafter
from specdec.proposers.heads.mtp import MtpDrafter
from specdec.proposers.heads.proposer import HeadDrafter
from specdec.proposers.hybrid import HybridDrafter
from specdec.proposers.model import ModelDrafter
from specdec.proposers.ngram import NgramDrafter
from specdec.proposers.other_tokenizer.by_text import TextBridge
from specdec.proposers.other_tokenizer.by_tokens import VocabularyIntersection
from specdec.proposers.suffix import SuffixAutomaton, SuffixDrafter

DRAFTS: dict[str, type[Any]] = {
    word: getattr(import_module(f"specdec.proposers.{known.module}"), known.kind) for word, known in DRAFT_WORDS.items()
}
"""Drafts by the word that stands for them; their classmethod `of(target, argument)` takes what follows a colon."""

COPYING = tuple(word for word, known in DRAFT_WORDS.items() if known.copies)
"""The words of drafts that copy, which can stand beside a model in a pair."""


def is_word(draft: object) -> bool:
    """Whether this is a word for a draft, with or without an argument, and not the name of a model."""
    return isinstance(draft, str) and draft.partition(":")[0] in DRAFTS


__all__ = [
    "COPYING",
    "DRAFTS",
    "BestBranch",
    "EarlyExitDrafter",
    "FunctionDrafter",
    "HeadDrafter",
    "HybridDrafter",
    "ModelDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "SuffixAutomaton",
    "SuffixDrafter",
    "TextBridge",
    "VocabularyIntersection",
    "is_word",
]
