"""Speculative and assisted decoding for transformers models: the target's own text, in fewer passes over its weights.

Names are imported when they are first used, so that `import specdec` costs nothing by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.core.drafts import Drafter
    from specdec.core.stats import Stats
    from specdec.decoding.strategies import Constraint, DisjunctiveConstraint, PhrasalConstraint
    from specdec.errors import (
        CancelledError,
        DraftError,
        EngineError,
        LoadError,
        OptionError,
        SpecdecError,
        UnsupportedError,
        VocabularyError,
    )
    from specdec.generator.generation import Event, Generation
    from specdec.generator.generator import SpecGenerator
    from specdec.generator.job import Job
    from specdec.integrations.custom_generate import custom_generate
    from specdec.models import LanguageModel
    from specdec.options.generate import Options
    from specdec.options.load import Loading
    from specdec.pipelines import Transcriber

__version__ = "0.1.0"

_HOMES = {
    "CancelledError": "errors",
    "EngineError": "errors",
    "Constraint": "decoding.strategies",
    "DisjunctiveConstraint": "decoding.strategies",
    "DraftError": "errors",
    "Drafter": "core.drafts",
    "Event": "generator.generation",
    "Generation": "generator.generation",
    "Job": "generator.job",
    "LanguageModel": "models",
    "LoadError": "errors",
    "Loading": "options.load",
    "OptionError": "errors",
    "Options": "options.generate",
    "PhrasalConstraint": "decoding.strategies",
    "SpecGenerator": "generator.generator",
    "SpecdecError": "errors",
    "Stats": "core.stats",
    "Transcriber": "pipelines",
    "UnsupportedError": "errors",
    "VocabularyError": "errors",
    "custom_generate": "integrations.custom_generate",
}
__all__ = [
    "CancelledError",
    "Constraint",
    "DisjunctiveConstraint",
    "DraftError",
    "Drafter",
    "EngineError",
    "Event",
    "Generation",
    "Job",
    "LanguageModel",
    "LoadError",
    "Loading",
    "OptionError",
    "Options",
    "PhrasalConstraint",
    "SpecGenerator",
    "SpecdecError",
    "Stats",
    "Transcriber",
    "UnsupportedError",
    "VocabularyError",
    "custom_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(f"specdec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
