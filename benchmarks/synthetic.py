"""SYNTHETIC drafts: they know the target's text beforehand and guess it as well as a real draft would, at its price.

For targets that have no small sibling at hand, as other engines' benchmarks do. At every position of a text the
target's token is the draft's first guess, its second, … or none of its guesses, drawn once (seeded) by the chances that
`agreement.py` measured. Every guess costs passes of a real draft model. What they show is always marked as synthetic.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import LanguageModel
from specdec.types import Call, Plan, Row, Tree

# How often the package's draft has its target's greedy token among its first guesses (benchmarks/agreement.py).
AMONG_FIRST = {1: 0.689, 2: 0.809, 3: 0.858, 4: 0.885, 5: 0.907, 6: 0.924, 8: 0.945, 12: 0.969, 16: 0.979, 32: 0.988}
Work = Callable[[int], None]  # a draft pass over so many nodes


def chances(among_first: dict[int, float] = AMONG_FIRST) -> list[float]:
    """The chance of each guess, first to last, to be the target's token."""
    found: list[float] = []
    for count, share in among_first.items():
        new = count - len(found)
        found += [(share - sum(found)) / new] * new
    return found


def passes_of(draft: Any, prefix: int = 256) -> Work:
    """Real passes of a draft model over siblings at the end of a text."""
    session = LanguageModel(draft).session()
    session.add(1)
    session.forward([Tree.chain([5] * prefix)], [1])
    session.commit([list(range(prefix))])

    def work(nodes: int) -> None:
        session.forward([Tree([7] * nodes, [-1] * nodes)], [nodes])
        session.commit([[]])

    return work


class Oracle:
    """What the target will say after each of some prompts, and which guess of a draft it will be."""

    def __init__(self, texts: Sequence[list[int]], rates: Sequence[float], vocab_size: int, seed: int = 0) -> None:
        self.rates, self.vocab_size = list(rates), vocab_size
        self._texts = texts
        source = random.Random(seed)
        misses = 1.0 - sum(rates)
        self._ranks = [source.choices(range(len(rates) + 1), [*rates, misses], k=len(text)) for text in texts]

    def number(self, tokens: Sequence[int]) -> int | None:
        """Which text begins with these tokens."""
        return next((i for i, text in enumerate(self._texts) if text[: len(tokens)] == list(tokens)), None)

    def guess(self, text: int | None, position: int, rank: int) -> tuple[int, bool]:
        """The draft's guess of this rank for the token at `position`, and whether it is the target's."""
        if text is None or position >= len(self._texts[text]):
            return rank, False
        right = self._ranks[text][position] == rank
        token = self._texts[text][position]
        return (token if right else (token + 1 + rank) % self.vocab_size), right


class SyntheticDrafter:
    """SYNTHETIC: proposes the `budget` nodes that are likeliest to become text, at most `plan.limit` deep.

    With `branching=False` they are a chain. One draft pass is paid for every depth, over the nodes that have children.
    """

    def __init__(self, oracle: Oracle, work: Work, budget: int, *, branching: bool = True) -> None:
        self._oracle, self._work, self._budget = oracle, work, budget
        self._ranks = len(oracle.rates) if branching else 1

    def start(self, call: Call) -> SyntheticDrafter:
        """Nothing is kept about rows."""
        return self

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per row."""
        return [self._tree(row, min(plan.limit, row.remaining - 1)) for row, plan in zip(rows, plans, strict=True)]

    def release(self, keys: Sequence[int]) -> None:
        """Nothing is kept about rows."""

    def _tree(self, row: Row, limit: int) -> Tree:
        oracle, known = self._oracle, len(row.tokens)
        text = oracle.number(row.tokens)
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # Candidates by the chance of their whole path: (-chance, parent, rank, depth, chance and truth of the parent).
        heap = [(-oracle.rates[0], -1, 0, 0, 1.0, True)] if limit > 0 else []
        while heap and len(tokens) < self._budget:
            chance, parent, rank, depth, above, true = heapq.heappop(heap)
            token, right = oracle.guess(text if true else None, known + depth, rank)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            confidence.append(oracle.rates[rank])
            if rank + 1 < self._ranks:
                heapq.heappush(heap, (-above * oracle.rates[rank + 1], parent, rank + 1, depth, above, true))
            if depth + 1 < limit:
                heapq.heappush(heap, (chance * oracle.rates[0], node, 0, depth + 1, -chance, true and right))
        tree = Tree(tokens, parents, confidence, source="synthetic")
        depths = [-1, *tree.depths()]
        for width in Counter(depths[parent + 1] for parent in set(parents)).values():
            self._work(width)
        return tree


class SyntheticAssistant(LlamaForCausalLM):
    """SYNTHETIC: the same draft for transformers' assisted generation; `text` is the number of the prompt's text."""

    def __init__(self, oracle: Oracle, work: Work) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        super().__init__(LlamaConfig(vocab_size=oracle.vocab_size, **sizes, bos_token_id=None, eos_token_id=None))
        self._oracle, self._work = oracle, work
        self.text: int | None = None
        self.generation_config.num_assistant_tokens = 5
        self.generation_config.num_assistant_tokens_schedule = "heuristic"
        self.generation_config.assistant_confidence_threshold = 0.0

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        """The tiny model keeps the books of the cache; its logits make way for the first guess."""
        held = 0 if past_key_values is None else past_key_values.get_seq_length()
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        self._work(input_ids.shape[1])
        token, _ = self._oracle.guess(self.text, held + input_ids.shape[1], 0)
        output.logits = torch.zeros_like(output.logits)
        output.logits[:, -1, token] = 20.0
        return output
