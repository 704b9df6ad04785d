"""Loads models whose weights the processes of a job may share (`tp_plan`)."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from specdec.models import load_model as load_alone
from specdec.models.language_model import LanguageModel
from specdec.models.loading.load import from_checkpoint
from specdec.options.load import Loading

if TYPE_CHECKING:
    from specdec.parallel.ranks import Ranks


def load_in_job(
    source: str | PathLike[str] | PreTrainedModel | LanguageModel,
    how: Loading | None = None,
    *,
    name: str = "model",
) -> LanguageModel:
    """As `models.load_model`; with `how.tp_plan`, rank 0's view of the model that all processes of the job share."""
    how = how or Loading()
    ranks = leading(how)
    if ranks is None:
        if isinstance(source, str | PathLike):  # a job of one process shares nothing
            how = replace(how, tp_plan=None)
        return load_alone(source, how, name=name)
    from specdec.parallel.sharded import ShardedModel

    def read(source: str, folder: str, how: Loading, name: str) -> LanguageModel:
        how = replace(how, backend="eager")
        number, part = ranks.load(from_checkpoint, ShardedModel, source, folder, how, name)
        led: LanguageModel = part.lead(ranks, number)
        return led

    return load_alone(source, how, name=name, read=read)


def leading(how: Loading) -> Ranks | None:
    """Rank 0's control of the processes that share a model; None without `tp_plan`, or in a job of one process.

    In the other processes it never returns (`join_ranks`). Raises OptionError if no job was started.
    """
    if how.tp_plan is None:
        return None
    from specdec.parallel.ranks import join_ranks

    return join_ranks()


def on_own_device(how: Loading) -> Loading:
    """`how` for a model of this process alone, on the device of its part of the shared model."""
    if how.device_map is not None or not torch.accelerator.is_available():
        return how
    return replace(how, device_map={"": torch.accelerator.current_device_index()})
