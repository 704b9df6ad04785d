"""Heads: small stacks of layers that read the target's hidden states and guess on from there."""

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
    """Looked up when it is needed: to import transformers' Gemma 4 takes a while."""
    from specdec.proposers.heads.gemma4 import load_gemma4

    return load_gemma4(checkpoint, target, how)


LOADERS = {
    "eagle3": load_eagle,
    "peagle": load_eagle,
    "dflash": load_dflash,
    "assistant": load_assistant,
    "gemma4": _load_gemma4,
}
"""By the `speculators_model_type` of a checkpoint; the last two are transformers' own, the first of which guess blocks.
"""


def load_head(
    source: str | PathLike[str] | PreTrainedModel,
    target: LanguageModel,
    how: Loading | None = None,
    *,
    argument: str = "draft",
    choose: Choose | None = None,
) -> Head:
    """The head at a folder or hub id, or that an assistant of transformers is, for this target, loaded as `how` says.

    `choose` says which of the tokens that it knows it may guess.

    Raises OptionError for one that was made for another target, UnsupportedError for kinds that are not known,
    LoadError for broken checkpoints.
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
