"""Self-speculation: the target's own first layers as its draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.draft.model import ModelDrafter

if TYPE_CHECKING:
    from specdec.models import LanguageModel


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the target's first `layers` layers and its own head (LayerSkip, arXiv 2404.16710, section 3.3)."""

    def __init__(self, target: LanguageModel, layers: int) -> None:
        super().__init__(
            target.early_exit(layers), source=f"early_exit:{layers}", shared_encoder=target.is_encoder_decoder
        )
        self.layers = layers

    def __repr__(self) -> str:
        return f"EarlyExitDrafter({self.layers})"
