"""Heads: small stacks of layers that read the target's hidden states and guess on from there."""

from __future__ import annotations

from os import PathLike

from specdec.errors import UnsupportedError
from specdec.loading import Loading
from specdec.models.heads.checkpoint import Checkpoint, kind_of
from specdec.models.heads.eagle import load_eagle
from specdec.models.heads.head import Head, Stage, Stages
from specdec.models.heads.mtp import load_mtp
from specdec.models.language_model import LanguageModel

LOADERS = {"eagle3": load_eagle}
"""By the `speculators_model_type` of a checkpoint."""


def load_head(
    source: str | PathLike[str], target: LanguageModel, how: Loading | None = None, *, argument: str = "draft"
) -> Head:
    """The head at a folder or hub id, for this target, loaded as `how` says.

    Raises OptionError for one that was made for another target, UnsupportedError for kinds that are not known,
    LoadError for broken checkpoints.
    """
    how = how or Loading()
    checkpoint = Checkpoint.read(source, how, argument)
    kind = str(checkpoint.config.get("speculators_model_type"))
    if kind not in LOADERS:
        raise UnsupportedError(
            f"`{argument}` {str(source)!r} is a head of kind {kind!r}; known are {', '.join(LOADERS)}"
        )
    return LOADERS[kind](checkpoint, target, how)


__all__ = ["LOADERS", "Head", "Stage", "Stages", "kind_of", "load_head", "load_mtp"]
