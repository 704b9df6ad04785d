"""Stand-ins for a row, a budget, a sampler and a language model whose logits are a hash of the whole prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Draft, DraftTask, Proposer, Sampler, SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.decoding.processors import Processors, Timestamps, Top
from specdec.decoding.processors.builtin import MinLength, Suppress, SuppressAtBegin
from specdec.decoding.samplers import CoupledSampler, DrawnSampler, GreedySampler
from specdec.models.protocols import Session


@dataclass(frozen=True)
class FakeBudget(Budget):
    """`doubt` is the confidence below which no pass follows, `drop` the one below which a node is not kept."""

    limit: int = 5
    doubt: float = 0.0
    drop: float = 0.0
    needs_confidence: ClassVar[bool] = True
    asked: list[list[float]] = field(default_factory=list)

    def gain(self, paths: Sequence[Sequence[float]], width: int = 1) -> float:
        [path] = paths
        self.asked.append(list(path))
        return float(not path or path[-1] >= self.doubt)

    def keep(self, confidence: Sequence[float]) -> bool:
        return confidence[-1] >= self.drop


@dataclass
class Greedy(Sampler):
    """Picks the likeliest token; returns q where `needs_q`."""

    needs_q: bool = False
    widths: set[int] = field(default_factory=set)

    def pick(
        self, row: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        self.widths.add(logits.shape[-1])
        q = logits.float().softmax(-1)
        token = int(q.argmax())
        return token, float(q[token]), q if self.needs_q else None


def task(sampler: object | None = None, **more: object) -> DraftTask:
    return DraftTask(sampler or Greedy(), **more)  # type: ignore[arg-type]


def choosing(width: int) -> dict[str, GreedySampler]:
    """Rules for a vocabulary of at least 50 that say in numbers how they choose."""
    warpers = Suppress([4]), TemperatureLogitsWarper(1.5), Top(20, 0.9)
    other_order = Top(p=0.9), Top(5), TemperatureLogitsWarper(2.0), Top(p=0.5, min_tokens_to_keep=3)
    stamps = Suppress([3, 40]), SuppressAtBegin([20], 2), Timestamps(35, 2, 30, most_initial=9)
    return {
        "likeliest": GreedySampler(Processors()),
        "suppressed": GreedySampler(Processors((Suppress([1, 2, 49, 50, width]), MinLength(2, [30])))),
        "repetitions": GreedySampler(Processors((RepetitionPenaltyLogitsProcessor(5.0), Suppress([4])))),
        "drawn": CoupledSampler(Processors(), seed=3),
        "top-k": CoupledSampler(Processors((TemperatureLogitsWarper(0.7), Top(9))), seed=5),
        "top-p": CoupledSampler(Processors((Top(p=0.8),)), seed=6),
        "warped": CoupledSampler(Processors(warpers), seed=4),
        "begin and length": GreedySampler(Processors((SuppressAtBegin([*range(20)], 14), MinLength(15, [30])))),
        "other order": CoupledSampler(Processors(other_order), seed=8),
        "timestamps": GreedySampler(Processors(stamps)),
        "timestamps drawn": CoupledSampler(Processors(stamps), seed=1),
        "timestamps in order": CoupledSampler(Processors((Timestamps(35, 2, 30, by_probability=False),)), seed=9),
        "distributions": DrawnSampler(Processors(warpers), seed=1),
    }


class OwnProposer(Draft, Proposer):
    """A draft that proposes by itself."""

    def start(self, vocab_size: int) -> OwnProposer:
        return self


class FakeSequence:
    prompt_length, remaining, tree, leaves, leaf_scores = 1, 2**31, EMPTY, (-1,), (0.0,)
    encoder_tokens = encoding = prediction = None

    def __init__(self, tokens: list[int], id: int = 0, **values: Any) -> None:
        vars(self).update({"task": task(), **values}, tokens=tokens, id=id)

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        return torch.tensor([[*self.tokens, *extra]])


class FakeModel:
    """Causal by construction: what a session reports shows at once if it holds the wrong text."""

    def __init__(
        self,
        vocab_size: int = 50,
        *,
        is_encoder_decoder: bool = False,
        max_positions: int = 4096,
    ) -> None:
        self.vocab_size, self.is_encoder_decoder, self.max_positions = vocab_size, is_encoder_decoder, max_positions
        self.epoch = 0
        self.num_ids = vocab_size
        self.sessions: list[FakeSession] = []
        self.encoded = 0
        self.fail_in = -1

    @property
    def passes(self) -> int:
        return sum(session.passes for session in self.sessions)

    @property
    def fed(self) -> list[list[int]]:
        """How many tokens of every row each pass of the last session had."""
        return self.sessions[-1].fed

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

    def encode(self, inputs: Mapping[str, Tensor]) -> FakeEncoding:
        self.encoded += 1
        return FakeEncoding(inputs["input_ids"].sum(-1).tolist())

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]


@dataclass
class FakeEncoding:
    values: list[int]

    def select(self, rows: Sequence[int]) -> FakeEncoding:
        return FakeEncoding([self.values[row] for row in rows])


class FakeSession:
    """Holds tokens where a real session holds keys and values; it knows texts only, no branches."""

    cache_reset_length = None

    draft_chain, draft_chains = Session.draft_chain, Session.draft_chains

    def __init__(self, model: FakeModel) -> None:
        self.model, self.passes = model, 0
        self.held: dict[int, list[int]] = {}
        self.encodings: dict[int, int] = {}
        self.fed: list[list[int]] = []
        self._numbers = 0
        self._trees: dict[int, Tree] = {}

    def add(self, encoding: FakeEncoding | None = None) -> int:
        [value] = [0] if encoding is None else encoding.values
        return self._new([], value)

    def fork(self, row: int, length: int) -> int:
        assert length <= len(self.held[row])
        return self._new(self.held[row][:length], self.encodings[row])

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self.held[row], self.encodings[row]

    def length(self, row: int) -> int:
        return len(self.held[row])

    def run(self, works: Sequence[Work], *, hidden: bool = False) -> list[Logits]:
        assert len(works) == len({work.row for work in works})
        assert any(len(work.tree) for work in works)
        self.model.fail_in -= 1
        if self.model.fail_in == 0:
            raise ZeroDivisionError("the fake fails on request")
        self.passes += 1
        self.fed.append([len(work.tree) for work in works])
        self._trees = {work.row: work.tree for work in works}
        return list(map(self._logits, works))

    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        num_texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        assert num_texts is None or list(num_texts) == list(map(len, paths))
        for row, path in zip(rows, paths, strict=True):
            self.held[row] += [self._trees[row].tokens[node] for node in path]

    def refresh(self, rows: Sequence[int]) -> None:
        pass

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            del self.held[row][length:]

    def _new(self, held: list[int], encoding: int) -> int:
        self._numbers += 1
        self.held[self._numbers], self.encodings[self._numbers] = held, encoding
        return self._numbers

    def _logits(self, work: Work) -> Logits:
        row, tree = work.row, work.tree
        assert work.num_logits <= len(tree)
        assert all(0 <= token < self.model.vocab_size for token in tree.tokens)
        assert len(self.held[row]) + len(tree) <= self.model.max_positions
        logits = [
            self.model.logits(self.held[row] + [tree.tokens[n] for n in tree.path(node)], self.encodings[row])
            for node in range(work.first, len(tree))
        ]
        return Logits(work, torch.stack(logits) if logits else torch.empty(0, self.model.vocab_size))


def one(session: Proposer, row: FakeSequence, limit: int = 5) -> list[int]:
    """The tokens proposed for a single row."""
    return session.propose([row], [FakeBudget(limit)])[0].tokens


def take(session: Proposer, row: FakeSequence, tree: Tree, path: Sequence[int], *new: int) -> None:
    """Makes the nodes `path` of the proposal, and `new` after them, the row's text, and tells the session."""
    row.tokens += [*(tree.tokens[node] for node in path), *new]
    session.update([Commit(row, list(path), len(path))])


def follow(session: Proposer, row: FakeSequence, guess: Sequence[int], count: int, *new: int) -> None:
    """The same for the first `count` tokens of a chain."""
    take(session, row, Tree.chain(list(guess)), range(min(count, len(guess))), *new)
