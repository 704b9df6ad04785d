"""Drafts: they propose tokens; the target's strategy accepts or rejects them.

A new draft is a subclass of `Draft` and, if callers name it by a word, a line in
`specdec.options.fields.DRAFT_WORDS` (example in docs/extending.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specdec.options.fields import DRAFT_WORDS
from specdec.proposers.chains import cut
from specdec.proposers.function import FunctionDraft
from specdec.proposers.heads.mtp import MtpDraft
from specdec.proposers.heads.proposer import HeadDraft
from specdec.proposers.hybrid import HybridDraft
from specdec.proposers.model import ModelDraft
from specdec.proposers.ngram import NgramDraft
from specdec.proposers.other_tokenizer import TextBridge
from specdec.proposers.self_drafts import EarlyExitDraft, QuantizedDraft
from specdec.proposers.suffix import SuffixDraft
from specdec.proposers.views import TextAloneDraft, best_branch

DRAFTS: dict[str, Any] = {
    word: getattr(import_module(f"specdec.proposers.{entry.module}"), entry.kind) for word, entry in DRAFT_WORDS.items()
}
"""Drafts by word: functions `(tokens, k) -> tokens`, or classes of drafts, whose `of` makes one."""

__all__ = [
    "DRAFTS",
    "EarlyExitDraft",
    "FunctionDraft",
    "HeadDraft",
    "HybridDraft",
    "ModelDraft",
    "MtpDraft",
    "NgramDraft",
    "QuantizedDraft",
    "SuffixDraft",
    "TextAloneDraft",
    "TextBridge",
    "best_branch",
    "cut",
]
