"""Heads: small stacks of layers that draft from the target's hidden states."""

from __future__ import annotations

from importlib import import_module
from os import PathLike

from transformers import PreTrainedModel

from specdec.errors import UnsupportedError
from specdec.models.language_model import LanguageModel
from specdec.options.load import Loading
from specdec.proposers.heads.checkpoint import Checkpoint, head_kind, readable
from specdec.proposers.heads.proposer import HeadDraft

LOADERS = {"eagle3": "eagle3:load_eagle", "dflash": "dflash:load_dflash", "gemma4": "gemma4:load_gemma4"}
"""Module and function by kind of head; transformers' models are imported only when needed, as that is slow."""


def load_head(
    source: str | PathLike[str] | PreTrainedModel,
    target: LanguageModel,
    how: Loading,
    *,
    argument: str = "draft",
) -> HeadDraft:
    """Loads the head at a folder or hub id, or a transformers assistant model, for this target.

    `argument` names it in errors. Raises OptionError if it was made for another target, UnsupportedError for an unknown
    kind, LoadError for a broken checkpoint.
    """
    checkpoint = Checkpoint.read(source, how, argument)
    if checkpoint.kind not in LOADERS:
        name, kinds = checkpoint.source, ", ".join(LOADERS)
        raise UnsupportedError(f"`{argument}` {name!r} is a head of kind {checkpoint.kind!r}; known are {kinds}")
    module, _, function = LOADERS[checkpoint.kind].partition(":")
    load = getattr(import_module(f"{__name__}.{module}"), function)
    with readable(checkpoint.source, argument):
        return load(checkpoint, target, how)


__all__ = ["LOADERS", "head_kind", "load_head"]
