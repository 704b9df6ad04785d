"""Heads: small stacks of layers that draft from the target's hidden states."""

from __future__ import annotations

from importlib import import_module
from os import PathLike

import torch
from transformers import PreTrainedModel

from specdec.errors import UnsupportedError
from specdec.models.language_model import LanguageModel
from specdec.options.load import Loading
from specdec.proposers.heads.checkpoint import Checkpoint, head_kind, readable
from specdec.proposers.heads.proposer import HeadDraft

STAGES = {"eagle3": "eagle3:eagle_stage", "dflash": "dflash:DFlashStage", "gemma4": "gemma4:AssistantStage"}
"""By kind of head, module and name of what makes its stage of a checkpoint and a target.

Transformers' models are imported only when needed, as that is slow.
"""


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
    checkpoint = Checkpoint.read(source, how, target.device, argument)
    if checkpoint.kind not in STAGES:
        name, kinds = checkpoint.source, ", ".join(STAGES)
        raise UnsupportedError(f"`{argument}` {name!r} is a head of kind {checkpoint.kind!r}; known are {kinds}")
    module, _, name = STAGES[checkpoint.kind].partition(":")
    make = getattr(import_module(f"{__name__}.{module}"), name)
    with readable(checkpoint.source, argument):
        with torch.device("meta"):
            stage = make(checkpoint, target)
        checkpoint.fill(stage, target.device)
        return HeadDraft(stage, backend=how.backend)


__all__ = ["STAGES", "head_kind", "load_head"]
