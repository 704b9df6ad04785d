"""Drafts: what proposes tokens that the target may accept; none of them decides acceptance."""

from specdec.draft.bridge import TextBridge
from specdec.draft.early_exit import EarlyExitDrafter
from specdec.draft.function import FunctionDrafter
from specdec.draft.hybrid import HybridDrafter
from specdec.draft.intersection import VocabularyIntersection
from specdec.draft.leading import Leading
from specdec.draft.model import ModelDrafter
from specdec.draft.ngram import NgramDrafter
from specdec.draft.suffix import SuffixAutomaton, SuffixDrafter

__all__ = [
    "EarlyExitDrafter",
    "FunctionDrafter",
    "HybridDrafter",
    "Leading",
    "ModelDrafter",
    "NgramDrafter",
    "SuffixAutomaton",
    "SuffixDrafter",
    "TextBridge",
    "VocabularyIntersection",
]
