"""Multi-token prediction (arXiv 2412.19437, section 2.2): extra layers in the target's own checkpoint that draft.

The stage is the first such layer of transformers, whose features are the target's last hidden states or its own output.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from specdec.errors import UnsupportedError
from specdec.models.backends.packed_layers import is_plain
from specdec.models.hf.derived import shallow_copy
from specdec.models.hf.load_errors import explain_errors
from specdec.models.hf.private_api import CACHE
from specdec.models.language_model import LanguageModel
from specdec.models.protocols import AttentionKind
from specdec.proposers.heads.proposer import HeadDraft
from specdec.proposers.heads.stage import Embedding, Stage

_KINDS = ("full_attention", "sliding_attention")


class MtpDraft(HeadDraft):
    """Drafts with the target's first layer for multi-token prediction, which every guess repeats."""

    @classmethod
    def of(cls, target: LanguageModel, argument: str | None, name: str = "draft") -> MtpDraft:
        """The draft `mtp`, whose layers are loaded from the target's checkpoint.

        Raises UnsupportedError for a target without them, LoadError for missing weights.
        """
        source, count = str(target.model.config.name_or_path), getattr(target.config, "num_mtp_layers", None)
        if not count or target.is_encoder_decoder:
            raise UnsupportedError(
                f"`{name}`: {type(target.model).__name__} has no layers for multi-token prediction (its config has no "
                "`num_mtp_layers`): name another draft"
            )
        # A shallow copy without embeddings and output layer, whose packed weights no checkpoint has.
        inner = shallow_copy(target.model)
        inner.set_input_embeddings(nn.Identity())
        inner.set_output_embeddings(nn.Identity())
        with explain_errors(source, name):
            model = MtpModel.from_pretrained(inner, device_map={"": target.device})
        model.tie_with_main_model(target.model)
        backend = "auto" if target.backend == "eager" else target.backend
        return cls(MtpStage(model.eval(), target), backend=backend, source="mtp")


class MtpStage(Stage):
    """The first layer of a target's multi-token prediction."""

    def __init__(self, model: Any, target: LanguageModel) -> None:
        kind = (getattr(model.config, "layer_types", None) or _KINDS)[0]
        if kind not in _KINDS:
            raise UnsupportedError(f"a layer for multi-token prediction is of kind {kind!r}; known are {_KINDS}")
        window = model.config.sliding_window if kind == "sliding_attention" else None
        config = copy.copy(model.config)
        vars(config).update(num_hidden_layers=1)  # bypasses setters that compare it with `layer_types`
        embedding = Embedding(model.embed_tokens, as_stored=False)
        kinds = (AttentionKind(kind, window),)
        super().__init__(config, embedding, config.hidden_size, target.vocab_size, kinds)
        self.reads = [target.num_layers]
        self.layer, self.rotary_emb = model.layers[0], model.rotary_emb
        self.post_norm = model.shared_post_norm if model.use_shared_post_norm else None
        self.shared_head = _SharedLinear(model.shared_head) if is_plain(model.shared_head) else model.shared_head
        self.turned_as = kind if getattr(model, "has_per_layer_rope", False) else None
        # the other modules have their weights, some of them shared with the target
        self.inputs.to(model.device, model.dtype)

    def features(self, states: Tensor) -> Tensor:
        return states[:, 0]

    def write(
        self, embeds: Tensor, features: Tensor, masks: Mapping[str, Tensor], positions: Tensor, cache: Any
    ) -> Tensor:
        angles = None
        if self.rotary_emb is not None:
            kind = {} if self.turned_as is None else {"layer_type": self.turned_as}
            angles = self.rotary_emb(embeds, position_ids=positions, **kind)
        written = self.layer(
            embeds,
            features,
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=next(iter(masks.values())),
            **{CACHE: cache},
        )
        return written if self.post_norm is None else self.post_norm(written)

    def guess(self, written: Tensor) -> Tensor:
        """Logits through the target's output layer, scaled and sliced as in transformers."""
        return MtpModel._project_to_logits(self, written)


class _SharedLinear(nn.Module):
    """Shares the weights of the target's linear layer, without the packed copy that an `nn.Linear` would get."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
