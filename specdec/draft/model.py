"""A draft that is a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.draft.chain import ChainSession
from specdec.draft.lookahead import LookaheadSession
from specdec.errors import UnsupportedError
from specdec.types import Call

if TYPE_CHECKING:
    from specdec.models import LanguageModel


class ModelDrafter:
    """Drafts with a smaller language model (Leviathan et al., arXiv 2211.17192, section 2.1).

    An encoder-decoder draft with `shared_encoder` reads `call.encoding`, the target's; another one encodes
    `call.draft_inputs` once. A decoder-only draft reads the decoder's tokens alone.
    """

    def __init__(self, model: LanguageModel, *, source: str = "model", shared_encoder: bool = False) -> None:
        self.model = model
        self.source = source
        self.shared_encoder = shared_encoder

    def __repr__(self) -> str:
        return f"ModelDrafter({self.model!r})"

    def start(self, call: Call) -> ChainSession | LookaheadSession:
        """A session on the rows of `call`; raises UnsupportedError if the draft's encoder has nothing to read."""
        if self.model.is_encoder_decoder and not self.shared_encoder and call.draft_inputs is None:
            raise UnsupportedError("the draft is an encoder-decoder model, but the call brings it no encoder inputs")
        kind = ChainSession if call.branching is None else LookaheadSession
        return kind(self.model, call, self.source, call.encoding if self.shared_encoder else None)
