"""A smaller vocabulary for a draft: its head computes the logits of some tokens only.

The head is most of what a small draft reads in a pass, and most tokens are rare.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import OptionError, UnsupportedError
from specdec.kernels import PackedLinear
from specdec.models.language_model import LanguageModel


def widened(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Scatters `logits` `[..., ids]` of these tokens into `[..., width]`; the others are -inf."""
    scattered = logits.new_full((*logits.shape[:-1], width), float("-inf"))
    scattered[..., ids] = logits
    return scattered


def cut(head: Any, ids: Tensor) -> nn.Module:
    """A head of the outputs `ids` alone; raises UnsupportedError for unknown kinds of layers."""
    if isinstance(head, PackedLinear):
        return head.cut(ids)
    if type(head) is not nn.Linear or head.weight.is_meta:
        raise UnsupportedError(
            f"no rows can be taken out of a language head of kind {type(head).__name__}: load the model whole and "
            "without `quantization`"
        )
    weight, bias = head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids]
    with torch.device("meta"):
        smaller = nn.Linear(head.in_features, len(ids), bias=bias is not None)
    smaller.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
    return smaller.requires_grad_(False)


class CutHead(nn.Module):
    """A head that computes the logits of tokens `ids` only; all others are -inf."""

    ids: Tensor

    def __init__(self, head: Any, ids: Tensor, width: int) -> None:
        super().__init__()
        self.head, self.out_features = cut(head, ids), width
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., width]` logits."""
        return widened(self.head(hidden), self.ids, self.out_features)


def cut_as_saved(language: LanguageModel) -> None:
    """Cuts the head of a loaded draft to the vocabulary in its config, if any."""
    ids = getattr(language.config, "draft_vocabulary", None)
    if ids is not None:
        model, rows = language.model, torch.tensor(ids, device=language.device)
        model.set_output_embeddings(CutHead(model.get_output_embeddings(), rows, language.vocab_size))


def likeliest(language: LanguageModel, counts: Counter[int], size: int, argument: str) -> set[int]:
    """The `size` most frequent tokens, filled up by the first ids, with those that end a text.

    Raises OptionError, naming `argument`, for more tokens than exist.
    """
    known = range(language.vocab_size)
    found = getattr(language.model.generation_config, "eos_token_id", None)
    ends = [token for token in ([found] if isinstance(found, int) else found or []) if token in known]
    if size > len(known):
        raise OptionError.of(argument, f"at most the {len(known)} tokens of the draft", size)
    often = [token for token, _ in counts.most_common() if token in known]
    likely = [*often, *(token for token in known if token not in counts)]
    others = [token for token in likely if token not in ends]
    return {*ends, *others[: max(size - len(ends), 0)]}
