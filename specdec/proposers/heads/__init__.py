"""Heads: small stacks of layers that draft from the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

from transformers import PreTrainedModel

from specdec.errors import UnsupportedError
from specdec.models.language_model import LanguageModel
from specdec.models.vocabulary import Choose
from specdec.options.load import Loading
from specdec.proposers.heads.checkpoint import Checkpoint, kind_of, readable
from specdec.proposers.heads.dflash import load_assistant, load_dflash
from specdec.proposers.heads.eagle3 import load_eagle
from specdec.proposers.heads.mtp import load_mtp
from specdec.proposers.heads.stage import Head, Stages


def _load_gemma4(checkpoint: Checkpoint, target: LanguageModel, how: Loading) -> Head:
    """Imports transformers' Gemma 4 only when needed, as that is slow."""
    from specdec.proposers.heads.gemma4 import load_gemma4

    return load_gemma4(checkpoint, target, how)


LOADERS = {
    "eagle3": load_eagle,
    "peagle": load_eagle,
    "dflash": load_dflash,
    "assistant": load_assistant,
    "gemma4": _load_gemma4,
}
"""By `speculators_model_type`; the last two are transformers' own formats, of block-guessing and Gemma 4 assistants."""


def load_head(
    source: str | PathLike[str] | PreTrainedModel,
    target: LanguageModel,
    how: Loading | None = None,
    *,
    argument: str = "draft",
    choose: Choose | None = None,
) -> Head:
    """Loads the head at a folder or hub id, or a transformers assistant model, for this target.

    `choose` selects the tokens that it may guess, `argument` names it in errors. Raises OptionError if it was made for
    another target, UnsupportedError for an unknown kind, LoadError for a broken checkpoint.
    """
    how = how or Loading()
    if isinstance(source, PreTrainedModel):
        checkpoint = Checkpoint(type(source).__name__, source.config.to_dict(), dict(source.state_dict()), argument)
    else:
        checkpoint = Checkpoint.read(source, how, argument)
    kind = kind_of(source, how.revision, argument=argument)
    if kind is None or kind not in LOADERS:
        known = ", ".join(name for name in LOADERS if name != "assistant")
        raise UnsupportedError(f"`{argument}` {checkpoint.source!r} is a head of kind {kind!r}; known are {known}")
    with readable(checkpoint.source, argument):
        return LOADERS[kind](replace(checkpoint, choose=choose), target, how)


__all__ = ["LOADERS", "Head", "Stages", "kind_of", "load_head", "load_mtp"]
