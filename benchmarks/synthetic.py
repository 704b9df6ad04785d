"""SYNTHETIC drafts (synthetic_draft.py) as often right as the package's, one for transformers, and targets."""

from __future__ import annotations

from typing import Any

import torch
from synthetic_draft import DraftPass, Oracle
from transformers import LlamaConfig, LlamaForCausalLM

# How often the package's draft has its target's greedy token among its first guesses (benchmarks/agreement.py).
AMONG_FIRST = {1: 0.780, 2: 0.884, 3: 0.921, 4: 0.938, 5: 0.953, 6: 0.962, 8: 0.971, 12: 0.982, 16: 0.988, 32: 0.994}


def chances(among_first: dict[int, float] = AMONG_FIRST) -> list[float]:
    """The chance of each guess, first to last, to be the target's token."""
    found: list[float] = []
    for count, share in among_first.items():
        new = count - len(found)
        found += [(share - sum(found)) / new] * new
    return found


def random_target(dtype: torch.dtype, **config: Any) -> LlamaForCausalLM:
    """A Llama of random weights whose head is a permutation of its embedding.

    So its greedy texts have wide margins, which no rounding parts.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None))
    embedding = model.get_input_embeddings().weight
    torch.nn.init.normal_(embedding, std=1.0)
    model.get_output_embeddings().weight.data = embedding.data[torch.randperm(len(embedding))] / 32
    return model.to(dtype)


class SyntheticAssistant(LlamaForCausalLM):
    """SYNTHETIC: the same draft for transformers' assisted generation.

    `oracle` knows the text of the next call, whose first new token is at position `begins`.
    """

    def __init__(self, vocab_size: int, work: DraftPass) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        super().__init__(LlamaConfig(vocab_size=vocab_size, **sizes, bos_token_id=None, eos_token_id=None))
        self._work = work
        self.oracle: Oracle | None = None
        self.begins = 0
        self.generation_config.num_assistant_tokens = 5
        self.generation_config.num_assistant_tokens_schedule = "heuristic"
        self.generation_config.assistant_confidence_threshold = 0.0

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        """The tiny model keeps the books of the cache; its logits make way for the first guess."""
        assert self.oracle is not None
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        self._work(input_ids.shape[1])
        token, _ = self.oracle.guess(0, int(position_ids[0, -1]) + 1 - self.begins, 0)
        output.logits = torch.zeros_like(output.logits)
        output.logits[:, -1, token] = 20.0
        return output
