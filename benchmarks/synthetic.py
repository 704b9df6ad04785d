"""SYNTHETIC drafts: they know the target's text beforehand and guess it as well as a real draft would, at its price.

For targets that have no small sibling at hand, as other engines' benchmarks do. At every position of a text the
target's token is the draft's first guess, its second, … or none of its guesses, drawn once (seeded) by the chances that
`agreement.py` measured. Every guess costs passes of a real draft model. What they show is always marked as synthetic.
"""

from __future__ import annotations

import heapq
import itertools
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
    """SYNTHETIC: proposes the nodes that are likeliest to become text, as many as `branches` chains of the plan have.

    What the plan would not keep is left out. One draft pass is paid for every depth, over the nodes that have children.
    """

    def __init__(self, oracle: Oracle, work: Work) -> None:
        self._oracle, self._work = oracle, work

    def start(self, call: Call) -> SyntheticDrafter:
        """Nothing is kept about rows."""
        return self

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per row."""
        return [self._tree(row, plan) for row, plan in zip(rows, plans, strict=True)]

    def release(self, keys: Sequence[int]) -> None:
        """Nothing is kept about rows."""

    def _tree(self, row: Row, plan: Plan) -> Tree:
        oracle, known, limit = self._oracle, len(row.tokens), min(plan.limit, row.remaining - 1)
        text, branches = oracle.number(row.tokens), plan.branches or 1
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[float]] = []
        count = itertools.count()  # of equals, the older one
        # Best first, by the chance of the whole path: (-chance, count, rank, parent, whether the parent is right).
        heap = [(-oracle.rates[0], next(count), 0, -1, True)] if limit > 0 else []
        while heap and len(tokens) < branches * limit:
            chance, _, rank, parent, right = heapq.heappop(heap)
            above = paths[parent] if parent >= 0 else []
            if branches > 1 and rank + 1 < len(oracle.rates):
                sibling = chance / oracle.rates[rank] * oracle.rates[rank + 1]
                heapq.heappush(heap, (sibling, next(count), rank + 1, parent, right))
            path = [*above, oracle.rates[rank]]
            if not plan.keep(path):
                continue
            token, correct = oracle.guess(text if right else None, known + len(above), rank)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            paths.append(path)
            if len(path) < limit:
                child = (chance * oracle.rates[0], next(count), 0, node, right and correct)
                heapq.heappush(heap, child)
        depths = [len(path) for path in paths] + [0]  # the last stands for the text, the parent -1
        for width in Counter(depths[parent] for parent in set(parents)).values():
            self._work(width)
        return Tree(tokens, parents, [path[-1] for path in paths], source="synthetic")


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

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        """The tiny model keeps the books of the cache; its logits make way for the first guess."""
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        self._work(input_ids.shape[1])
        token, _ = self._oracle.guess(self.text, int(position_ids[0, -1]) + 1, 0)
        output.logits = torch.zeros_like(output.logits)
        output.logits[:, -1, token] = 20.0
        return output
