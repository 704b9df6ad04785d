"""Self-speculation: the target's own first layers as its draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import OptionError
from specdec.proposers.model import ModelDraft

if TYPE_CHECKING:
    from specdec.models import LanguageModel


class EarlyExitDraft(ModelDraft):
    """Drafts with the target's first `layers` layers and its own head (LayerSkip, arXiv 2404.16710, section 3.3)."""

    def __init__(self, target: LanguageModel, layers: int) -> None:
        super().__init__(
            target.early_exit(layers),
            source=f"early_exit:{layers}",
            shared_encoder=target.is_encoder_decoder,
            sees=target.sees,
        )
        self.layers = layers

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> EarlyExitDraft:
        """The draft `early_exit:N`; raises OptionError, naming the caller's argument `name`, for any other N."""
        layers = int(argument) if argument is not None and argument.isdecimal() else 0
        if not 1 <= layers < target.num_layers:
            least = f"early_exit:N with N of the target's {target.num_layers} layers, at least 1 and not all"
            raise OptionError.of(name, least, "early_exit" if argument is None else f"early_exit:{argument}")
        return cls(target, layers)

    def __repr__(self) -> str:
        return f"EarlyExitDraft({self.layers})"
