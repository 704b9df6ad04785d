"""Stand-ins for a row, a plan, a rule and a language model whose logits are a hash of the whole prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.types import EMPTY, Call, Row, Scores, Tree


@dataclass
class FakeRow:
    tokens: list[int]
    key: int = 0
    remaining: int = 1000
    prompt_length: int = 1
    encoder_tokens: list[int] | None = None
    prediction: list[int] | None = None
    tree: Tree = EMPTY
    leaves: tuple[int, ...] = (-1,)
    leaf_scores: tuple[float, ...] = (0.0,)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        return torch.tensor([[*self.tokens, *extra]])


@dataclass
class FakePlan:
    """`doubt` is the confidence below which no pass follows, `drop` the one below which a node is not kept."""

    limit: int = 5
    doubt: float = 0.0
    drop: float = 0.0
    branches: int | None = None
    asked: list[list[float]] = field(default_factory=list)

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        [path] = paths
        self.asked.append(list(path))
        return not path or path[-1] >= self.doubt

    def keep(self, confidence: Sequence[float]) -> bool:
        return confidence[-1] >= self.drop


@dataclass
class Greedy:
    """Picks the likeliest token; returns q where `needs_q`."""

    needs_q: bool = False
    widths: set[int] = field(default_factory=set)

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        self.widths.add(logits.shape[-1])
        q = logits.float().softmax(-1)
        token = int(q.argmax())
        return token, float(q[token]), q if self.needs_q else None


class FakeModel:
    """Causal by construction: what a session reports shows at once if it holds the wrong text."""

    config = None
    device = torch.device("cpu")

    def __init__(
        self, vocab_size: int = 50, *, is_encoder_decoder: bool = False, granularity: int = 1, max_positions: int = 4096
    ) -> None:
        self.vocab_size, self.is_encoder_decoder = vocab_size, is_encoder_decoder
        self.granularity, self.max_positions = granularity, max_positions
        self.sessions: list[FakeSession] = []
        self.encoded = 0
        self.fail_in = -1

    @property
    def passes(self) -> int:
        return sum(session.passes for session in self.sessions)

    def logits(self, prefix: Sequence[int], encoding: int = 0) -> Tensor:
        """`[vocab]` after `prefix`."""
        generator = torch.Generator().manual_seed(hash((tuple(prefix), encoding)) % 2**31)
        return 3 * torch.randn(self.vocab_size, generator=generator)

    def greedy(self, prefix: Sequence[int], count: int, encoding: int = 0) -> list[int]:
        """The `count` likeliest tokens after `prefix`, one after the other."""
        text = list(prefix)
        for _ in range(count):
            text.append(int(self.logits(text, encoding).argmax()))
        return text[len(prefix) :]

    def early_exit(self, layers: int) -> FakeModel:
        return FakeModel(self.vocab_size + layers)

    def encode(self, inputs: Mapping[str, Tensor]) -> FakeEncoding:
        self.encoded += 1
        return FakeEncoding(inputs["input_ids"].sum(-1).tolist())

    def shares_encoder_with(self, other: object) -> bool:
        return False

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]


@dataclass
class FakeEncoding:
    values: list[int]

    def select(self, rows: Sequence[int]) -> FakeEncoding:
        return FakeEncoding([self.values[row] for row in rows])


class FakeSession:
    """Holds tokens where a real session holds keys and values; goes back only to multiples of `granularity`."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.passes = model, 0
        self.held: list[list[int]] = []
        self.encodings: list[int] = []
        self._trees: list[Tree] = []

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.held]

    def add(self, rows: int, encoding: FakeEncoding | None = None) -> None:
        self.held += [[] for _ in range(rows)]
        values = [0] * rows if encoding is None else encoding.values
        assert len(values) == rows
        self.encodings += values

    def forward(self, trees: Sequence[Tree], keep: Sequence[int]) -> list[Scores]:
        assert len(trees) == len(keep) == len(self.held)
        assert any(map(len, trees))
        self.model.fail_in -= 1
        if self.model.fail_in == 0:
            raise ZeroDivisionError("the fake fails on request")
        self.passes += 1
        self._trees = list(trees)
        return [self._scores(r, tree, n) for r, (tree, n) in enumerate(zip(trees, keep, strict=True))]

    def _scores(self, row: int, tree: Tree, keep: int) -> Scores:
        assert keep <= len(tree)
        assert all(0 <= token < self.model.vocab_size for token in tree.tokens)
        assert len(self.held[row]) + len(tree) <= self.model.max_positions
        first = len(tree) - keep
        logits = [
            self.model.logits(self.held[row] + [tree.tokens[n] for n in tree.path(node)], self.encodings[row])
            for node in range(first, len(tree))
        ]
        return Scores(tree, first, torch.stack(logits) if logits else torch.empty(0, self.model.vocab_size))

    def commit(self, paths: Sequence[list[int]], *, final: bool = True) -> None:
        for held, tree, path in zip(self.held, self._trees, paths, strict=True):
            held += [tree.tokens[node] for node in path]

    def refresh(self) -> None:
        pass

    def truncate(self, lengths: Sequence[int]) -> None:
        for held, length in zip(self.held, lengths, strict=True):
            if length < len(held):
                del held[length - length % self.model.granularity :]

    def select(self, rows: Sequence[int]) -> None:
        self.held = [self.held[row] for row in rows]
        self.encodings = [self.encodings[row] for row in rows]


def call(rule: object | None = None, vocab_size: int = 50, **more: object) -> Call:
    return Call(rule or Greedy(), vocab_size, **more)  # type: ignore[arg-type]


def one(session: object, row: FakeRow, limit: int = 5) -> list[int]:
    """The tokens proposed for a single row."""
    return session.propose([row], [FakePlan(limit)])[0].tokens  # type: ignore[attr-defined]
