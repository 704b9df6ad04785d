"""A session driven step by step beside the model's own forward without a cache, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specdec.models import Encoding, LanguageModel
from specdec.models.probe import reference
from specdec.types import Scores, Tree

TOLERANCE = 2e-4  # a wrong mask or position shows as 0.03 (Cohere, which scales its logits down) to 10
SIBLINGS = [-1, 0, 0, 1, 2, -1, 5]


class Twin:
    """Rows of a session and, beside them, the texts they should hold."""

    def __init__(self, language: LanguageModel, rows: int = 1, encoding: Encoding | None = None, seed: int = 0) -> None:
        self.language, self.random = language, random.Random(seed)
        self.encoding, self.texts = encoding, [[] for _ in range(rows)]
        self.sources = list(range(rows))
        self.session = language.session()
        self.session.add(rows, encoding.select(self.sources) if encoding is not None else None)

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(3, 64) for _ in range(count)]

    def chain(self, count: int) -> Tree:
        return Tree.chain(self.ids(count))

    def tree(self) -> Tree:
        return Tree(self.ids(len(SIBLINGS)), SIBLINGS)

    def run(self, trees: Sequence[Tree], keep: Sequence[int]) -> float:
        """One pass; the largest difference between its logits and the recomputed ones."""
        scores = self.session.forward(trees, keep)
        assert [s.first for s in scores] == [len(t) - k for t, k in zip(trees, keep, strict=True)]
        assert [len(s.logits) for s in scores] == list(keep)
        return max((self.off(row, s) for row, s in enumerate(scores)), default=0.0)

    def off(self, row: int, scores: Scores) -> float:
        worst, tree = 0.0, scores.tree
        encoding = None if self.encoding is None else self.encoding.select([self.sources[row]])
        for node in range(scores.first, len(tree)):
            tokens = self.texts[row] + [tree.tokens[n] for n in tree.path(node)]
            own = reference(self.language, tokens, encoding)
            worst = max(worst, float((own - scores.logits[node - scores.first]).abs().max()))
        return worst

    def commit(self, trees: Sequence[Tree], paths: Sequence[list[int]], final: bool = True) -> None:
        self.session.commit(paths, final=final)
        for text, tree, path in zip(self.texts, trees, paths, strict=True):
            text += [tree.tokens[node] for node in path]
        assert self.session.lengths == [len(text) for text in self.texts]

    def step(self, trees: Sequence[Tree], keep: Sequence[int], paths: Sequence[list[int]]) -> None:
        """One exact pass, then commit."""
        assert self.run(trees, keep) < TOLERANCE
        self.commit(trees, paths)

    def branch(self, rounds: int) -> None:
        """Rounds in which every row's branches grow at random, some die, and the text that all share moves up."""
        crowns = [Tree([], []) for _ in self.texts]
        for _ in range(rounds):
            trees = [self._grown(crown) for crown in crowns]
            assert self.run(trees, [len(t) - len(c) for t, c in zip(trees, crowns, strict=True)]) < TOLERANCE
            kept = [self._survivors(tree) for tree in trees]
            self.session.commit([nodes for nodes, _ in kept], trunks=[trunk for _, trunk in kept])
            for text, tree, (nodes, trunk) in zip(self.texts, trees, kept, strict=True):
                text += [tree.tokens[node] for node in nodes[:trunk]]
            crowns = [tree.part(nodes, trunk) for tree, (nodes, trunk) in zip(trees, kept, strict=True)]
            assert self.session.lengths == [len(text) for text in self.texts]

    def _grown(self, crown: Tree) -> Tree:
        tokens, parents = crown.tokens + self.ids(4), list(crown.parents)
        while len(parents) < len(tokens):
            parents.append(self.random.randrange(-1, len(parents)))
        return Tree(tokens, parents)

    def _survivors(self, tree: Tree) -> tuple[list[int], int]:
        """The ancestors of two random nodes, and how many of those are everybody's."""
        paths = [tree.path(self.random.randrange(len(tree))) for _ in range(2)]
        shared = next((i for i, pair in enumerate(zip(*paths, strict=False)) if len(set(pair)) > 1), None)
        trunk = min(map(len, paths)) if shared is None else shared
        nodes = sorted({node for path in paths for node in path})
        return paths[0][:trunk] + [node for node in nodes if node not in paths[0][:trunk]], trunk

    def prefill(self, *lengths: int) -> None:
        self.step([self.chain(n) for n in lengths], [1] * len(lengths), [list(range(n)) for n in lengths])

    def truncate(self, lengths: list[int]) -> None:
        self.session.truncate(lengths)
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        assert self.session.lengths == lengths

    def select(self, rows: list[int]) -> None:
        self.session.select(rows)
        self.texts = [list(self.texts[row]) for row in rows]
        self.sources = [self.sources[row] for row in rows]

    def add(self, source: int) -> None:
        self.session.add(1, self.encoding.select([source]) if self.encoding is not None else None)
        self.texts.append([])
        self.sources.append(source)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
