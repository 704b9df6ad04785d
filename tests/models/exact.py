"""A session driven step by step beside the model's own forward without a cache, for the tests of this folder."""

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.models import Encoding, LanguageModel, Session
from specdec.models.backends.kv_session import KvSession
from specdec.models.probe import reference
from tests.tiny import tiny, tiny_inputs

TOLERANCE = 2e-4  # a wrong mask or position shows as 0.03 (Cohere, which scales its logits down) to 10
SIBLINGS = [-1, 0, 0, 1, 2, -1, 5]


class Twin:
    """Rows of a session and, beside them, the texts and branches that they should hold."""

    def __init__(self, language: LanguageModel, rows: int = 1, encoding: Encoding | None = None, seed: int = 0) -> None:
        self.language, self.random = language, random.Random(seed)
        self.encoding = encoding
        self.texts: list[list[int]] = []
        self.pending: list[Tree] = []
        self.encodings: list[Encoding | None] = []
        self.session: Any = language.session()
        self.rows: list[int] = []
        self.join(rows, encoding)

    @property
    def lengths(self) -> list[int]:
        return [self.session.length(row) for row in self.rows]

    def forward(self, trees: Sequence[Tree], keep: Sequence[int], **how: Any) -> list[Logits]:
        """One pass over a tree per row, with logits of its last `keep[i]` nodes."""
        return forward(self.session, self.rows, trees, keep, **how)

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(3, 64) for _ in range(count)]

    def chain(self, count: int) -> Tree:
        return Tree.chain(self.ids(count))

    def tree(self) -> Tree:
        return Tree(self.ids(len(SIBLINGS)), SIBLINGS)

    def run(self, trees: Sequence[Tree], keep: Sequence[int]) -> float:
        """One pass; the largest difference between its logits and the recomputed ones."""
        outputs = self.forward(trees, keep)
        assert [len(out.logits) for out in outputs] == list(keep)
        return max((self.off(row, out) for row, out in enumerate(outputs)), default=0.0)

    def off(self, row: int, out: Logits) -> float:
        worst, tree = 0.0, out.work.tree
        for node in range(out.work.first, len(tree)):
            tokens = self.texts[row] + [tree.tokens[n] for n in tree.path(node)]
            own = reference(self.language, tokens, self.encodings[row])
            worst = max(worst, float((own - out.logits[node - out.work.first]).abs().max()))
        return worst

    def commit(self, trees: Sequence[Tree], paths: Sequence[list[int]], final: bool = True) -> None:
        self.session.commit(self.rows, paths, final=final)
        for text, tree, path in zip(self.texts, trees, paths, strict=True):
            text += [tree.tokens[node] for node in path]
        self.pending = [EMPTY] * len(self.rows)
        assert self.lengths == [len(text) for text in self.texts]

    def step(self, trees: Sequence[Tree], keep: Sequence[int], paths: Sequence[list[int]]) -> None:
        """One exact pass, then commit."""
        assert self.run(trees, keep) < TOLERANCE
        self.commit(trees, paths)

    def branch(self, rounds: int) -> None:
        """Rounds in which every row's branches grow at random, some die, and the text that all share moves up."""
        for _ in range(rounds):
            self.some(range(len(self.rows)), branches=1.0)

    def _grown(self, pending: Tree) -> Tree:
        tokens, parents = pending.tokens + self.ids(4), list(pending.parents)
        while len(parents) < len(tokens):
            parents.append(self.random.randrange(-1, len(parents)))
        return Tree(tokens, parents)

    def _survivors(self, tree: Tree) -> tuple[list[int], int]:
        """The ancestors of two random nodes, and how many of those are everybody's."""
        paths = [tree.path(self.random.randrange(len(tree))) for _ in range(2)]
        shared = next((i for i, pair in enumerate(zip(*paths, strict=False)) if len(set(pair)) > 1), None)
        text_length = min(map(len, paths)) if shared is None else shared
        nodes = sorted({node for path in paths for node in path})
        return paths[0][:text_length] + [node for node in nodes if node not in paths[0][:text_length]], text_length

    def prefill(self, *lengths: int) -> None:
        self.step([self.chain(n) for n in lengths], [1] * len(lengths), [list(range(n)) for n in lengths])

    def truncate(self, lengths: list[int]) -> None:
        self.session.truncate(self.rows, lengths)
        for row, length in enumerate(lengths):
            self.pending[row] = EMPTY if length < len(self.texts[row]) else self.pending[row]
            del self.texts[row][length:]
        assert self.lengths == lengths

    def select(self, rows: list[int]) -> None:
        """Rows in this order, forked where they are repeated; the others leave."""
        gone = set(range(len(self.rows))) - set(rows)
        order = [row if row not in rows[:i] else self.fork(row) for i, row in enumerate(rows)]
        for held in (self.rows, self.texts, self.pending, self.encodings):
            held[:] = [held[row] for row in [*order, *gone]]  # type: ignore[index, misc]
        self.leave(*range(len(rows), len(rows) + len(gone)))

    def add(self, source: int) -> None:
        self.join(1, None if self.encoding is None else self.encoding.select([source]))

    def join(self, count: int, encoding: Encoding | None) -> None:
        """New rows with an encoding of their own."""
        encodings = [None if encoding is None else encoding.select([i]) for i in range(count)]
        self.rows += map(self.session.add, encodings)
        self.texts += [[] for _ in range(count)]
        self.pending += [EMPTY] * count
        self.encodings += encodings

    def wander(self) -> None:
        """Prompts of three rows, a chain beside a tree, branches that come and go, one row less and one more."""
        self.prefill(20, 4, 13)
        self.step([self.chain(3), self.tree(), self.chain(0)], [2, 7, 0], [[0, 1], [0, 2, 4], []])
        self.branch(3)
        self.commit([EMPTY] * len(self.rows), [[] for _ in self.rows])
        self.leave(0)
        self.fork(1, 5)

    def fork(self, row: int, length: int | None = None) -> int:
        """One more row, with the beginning of this one's text, by default all of it; returns its place."""
        self.texts.append(self.texts[row][:length])
        self.rows.append(self.session.fork(self.rows[row], len(self.texts[-1])))
        self.pending.append(EMPTY)
        self.encodings.append(self.encodings[row])
        assert self.lengths == list(map(len, self.texts))
        return len(self.rows) - 1

    def leave(self, *rows: int) -> None:
        self.session.remove([self.rows[row] for row in rows])
        for row in sorted(rows, reverse=True):
            del self.rows[row], self.texts[row], self.pending[row], self.encodings[row]
        assert self.lengths == list(map(len, self.texts))

    def some(self, rows: Sequence[int], *, trees: bool = True, branches: float = 0.0) -> None:
        """A pass over these rows alone, in this order, of which a random path is kept, or branches with this chance."""
        named, grown, kept = [self.rows[row] for row in rows], list[Tree](), list[tuple[list[int], int]]()
        for pending in (self.pending[row] for row in rows):
            if pending or branches:
                grown.append(self._grown(pending))
            else:
                grown.append(self.tree() if trees and self.random.random() < 0.5 else self.chain(3))
        fresh = [len(tree) - len(self.pending[row]) for row, tree in zip(rows, grown, strict=True)]
        for row, out in zip(rows, forward(self.session, named, grown, fresh), strict=True):
            assert self.off(row, out) < TOLERANCE
        for tree in grown:
            path = tree.path(self.random.randrange(-1, len(tree)))
            kept.append(self._survivors(tree) if self.random.random() < branches else (path, len(path)))
        self.session.commit(named, [nodes for nodes, _ in kept], num_texts=[text for _, text in kept])
        for row, tree, (nodes, text) in zip(rows, grown, kept, strict=True):
            self.texts[row] += [tree.tokens[node] for node in nodes[:text]]
            self.pending[row] = tree.part(nodes, text)
        assert self.lengths == list(map(len, self.texts))


def encoding_for(language: LanguageModel, rows: int, seed: int = 0) -> Encoding | None:
    """The output of a tiny model's encoder for rows of some input; None without one."""
    name = language.config.model_type
    return language.encode(tiny_inputs(name, rows, seed)) if language.is_encoder_decoder else None


def twin_of(model: str | LanguageModel, rows: int = 1, seed: int = 0) -> Twin:
    """Of a model, or the tiny one of this name."""
    language = model if isinstance(model, LanguageModel) else LanguageModel(tiny(model))
    return Twin(language, rows, encoding_for(language, rows, seed), seed)


def forward(
    session: Session,
    rows: Sequence[int],
    trees: Sequence[Tree],
    keep: Sequence[int],
    embeds: Sequence[Tensor | None] | None = None,
    **how: Any,
) -> list[Logits]:
    """One pass over a tree per row, which begins with the row's branches; logits of its last `keep[i]` nodes."""
    given = zip(rows, trees, keep, embeds or [None] * len(rows), strict=True)
    works = [Work(row, tree, k, num_cached=num_pending(session, row), embeds=one) for row, tree, k, one in given]
    return session.run(works, **how)


def num_pending(session: Session, row: int) -> int:
    """Nodes of the row's branches."""
    held: Any = session.row(row) if isinstance(session, KvSession) else vars(session)["rows"][row]
    return held.columns.pending if isinstance(session, KvSession) else len(held.tree)
