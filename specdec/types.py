"""The values that travel between the rooms: trees of candidate tokens, the target's scores, steps and rounds.

Words: a *node* is one candidate token, a *row* one sequence; `p` is the target's distribution, `q` the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_NO_Q = torch.empty(0)  # known text was not drawn


@dataclass(frozen=True, slots=True)
class Tree:
    """Candidate tokens of one row, parents before children; `-1` is the parent of nodes that continue the known text.

    In a draft's proposal for a row with several leaves, the parent `-1 - i` stands for leaf i.

    `confidence` is the draft's probability of each node; `q[node]` `[vocab]` its whole distribution (float32, after
    processors) where the node was drawn from one; `q=None` stands for a one-hot draft, which is certain of its guess.
    `source` names who proposed it.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float] | None = None
    q: Sequence[Tensor] | Tensor | None = None
    source: str = ""

    @classmethod
    def chain(
        cls,
        tokens: list[int],
        confidence: list[float] | None = None,
        q: Sequence[Tensor] | Tensor | None = None,
        source: str = "",
    ) -> Tree:
        """A tree with one path."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), confidence, q, source)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def graft(self, other: Tree, leaves: Sequence[int] = ()) -> Tree:
        """This tree with `other` growing from its nodes `leaves`; without any, from the last one."""
        n = len(self.tokens)
        ends = leaves or (n - 1,)
        return Tree(
            self.tokens + other.tokens,
            self.parents + [p + n if p >= 0 else ends[-1 - p] for p in other.parents],
            None if other.confidence is None else [1.0] * n + other.confidence,
            None if other.q is None else [_NO_Q] * n + list(other.q),
            other.source,
        )

    def part(self, nodes: Sequence[int], trunk: int = 0) -> Tree:
        """Of these `nodes`, parents before children, those after the first `trunk`, as a tree that grows from them."""
        number = {node: i - trunk for i, node in enumerate(nodes)}
        kept = nodes[trunk:]
        return Tree(
            [self.tokens[node] for node in kept],
            [max(number.get(self.parents[node], -1), -1) for node in kept],
            source=self.source,
        )

    def children(self) -> dict[tuple[int, int], int]:
        """`(parent, token) -> node`, the first of equal siblings."""
        found: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            found.setdefault(key, node)
        return found

    def follow(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of `tokens` are on one path from the known text, and whether the tree guessed another one next."""
        children, node, count = self.children(), -1, 0
        for token in tokens:
            after = children.get((node, token))
            if after is None:
                return count, node in self.parents
            node, count = after, count + 1
        return count, False

    def depths(self) -> list[int]:
        """Distance of every node from the known text; its direct continuation has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """How many tokens its longest path has."""
        return max(self.depths(), default=-1) + 1

    def best_confidence(self) -> list[float] | None:
        """The draft's belief in the likeliest node of every depth, where it has one."""
        if self.confidence is None:
            return None
        best = [0.0] * self.depth
        for depth, confidence in zip(self.depths(), self.confidence, strict=True):
            best[depth] = max(best[depth], confidence)
        return best

    def path(self, node: int) -> list[int]:
        """The nodes from the known text to `node`, both ends of the walk included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


EMPTY = Tree([], [])


@dataclass(frozen=True, slots=True)
class Scores:
    """What one target pass said about one row's tree.

    `logits` `[nodes - first, vocab]` are the target's own, for the nodes from `first` on (inner positions of a prompt
    are not kept). `unconditional` has the same shape when guidance runs a paired row. `hidden_states` and `attentions`
    hold, per layer, `[nodes, width]` and `[heads, nodes, known + nodes]` when they were asked for; the first `held`
    nodes of the tree were computed in an earlier pass and have none.
    """

    tree: Tree
    first: int
    logits: Tensor
    unconditional: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    held: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token, the tree node whose scores decided it, and what was asked to be kept about it.

    `logits` and `scores` `[vocab]` are the target's own and the processed ones, None unless they were asked for; of a
    search they are `[leaves, vocab]`, the token is the best live leaf's. `log_prob` is the target's own, for ranking.
    """

    token: int
    node: int
    logits: Tensor | None = None
    scores: Tensor | None = None
    log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class RowRound:
    """One row's share of a round.

    `drafted` counts proposed nodes and `depth` the longest path of them; the first `accepted` of `steps` were decided
    by proposed nodes; `finish` says why the row ended, if it did. `tested` are the draft's beliefs in the nodes that
    came into question, and whether they came true; they lay on `levels` levels of the proposal.
    """

    key: int
    drafted: int
    depth: int
    accepted: int
    prefill: bool
    source: str
    tested: Sequence[tuple[float, bool]]
    levels: int
    steps: list[Step]
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop: every row's share, the tokens that went through the target, and where the seconds went."""

    rows: list[RowRound]
    nodes: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    seconds: float


class Row(Protocol):
    """One sequence or search as drafts and strategies may see it: its key, its text so far, where the prompt ends.

    A search has a text that all its branches share, and a tree of branches that grow from it; `leaves` are the nodes
    that will be continued, best first, with their `leaf_scores`. One sequence has the leaf -1, the end of its text.
    `remaining` is how many tokens may still follow a leaf. `encoder_tokens` are the ids an encoder-decoder target read,
    `prediction` are ids that the output may resemble.
    """

    @property
    def key(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def tree(self) -> Tree: ...

    @property
    def leaves(self) -> Sequence[int]: ...

    @property
    def leaf_scores(self) -> Sequence[float]: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def remaining(self) -> int: ...

    @property
    def encoder_tokens(self) -> list[int] | None: ...

    @property
    def prediction(self) -> list[int] | None: ...

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text so far, followed by `extra`, as ids `[1, length]` where the logits are, to be read at once."""
        ...


class Selector(Protocol):
    """A decoding strategy of one row: turns genuine target scores into tokens, one ordinary step at a time."""

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""
        ...


class Trace(NamedTuple):
    """Per layer, the hidden states `[nodes, width]` and attentions `[heads, nodes, length]` that led to one token.

    Of a search they are `[leaves, nodes, width]` and `[leaves, heads, nodes, length]`.
    """

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class Seen(NamedTuple):
    """What the target said at one node: logits `[vocab]`, those of the shadow, and what led to them."""

    logits: Tensor
    unconditional: Tensor | None
    trace: Trace


class Move(NamedTuple):
    """One step of a search: its state afterwards, and every new leaf as a token after one of the old leaves.

    `step` is None where a search only asks for more. `shown` are the old leaves, -1 for none, whose traces belong to
    the step, one for each row of the outputs; all leaves if None.
    """

    state: Any
    parents: list[int]
    tokens: list[int]
    step: Step | None
    shown: Sequence[int] | None = None


class Search(Protocol):
    """A strategy with several live branches; its states are values, with `finish`, `length` and `leaf_scores`."""

    @property
    def num_beams(self) -> int: ...

    def advance(self, row: Row, state: Any, seen: Sequence[Seen]) -> Move:
        """The next state, from what the target said at every leaf."""
        ...


class Branch(NamedTuple):
    """A path that a draft considers: its tokens after the row's shared text, its score, its last token's chance.

    `chances` are those of all its tokens, where it is guessed for its own sake and not as one of a search's branches;
    `q` `[vocab]` is what the last token was drawn from, if it was drawn. `mark` is the search's own note.
    """

    tokens: list[int]
    score: float
    confidence: float = 1.0
    chances: Sequence[float] = ()
    q: Tensor | None = None
    mark: Any = None


class DraftRule(Protocol):
    """How a draft turns its own logits into a guess, so that it tends to agree with the strategy."""

    @property
    def needs_q(self) -> bool:
        """Whether the strategy looks at the draft's distribution (rejection) or only at its tokens (match).

        Under rejection a node drawn at random must never be dropped after it was seen.
        """
        ...

    def pick(self, row: Row, guesses: list[int], logits: Tensor) -> tuple[int, float, Tensor | None]:
        """From draft `logits` `[vocab]` after `guesses`: a token, its probability, and q `[vocab]` if `needs_q`.

        A probability of NaN says that the draft has no guess.
        """
        ...


class BranchRule(Protocol):
    """How a draft turns its own logits into several guesses; for a search it runs the search's own steps on them."""

    def spread(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """From draft `logits` `[ends, vocab]`: nodes worth a look next, best first, each with the end it continues.

        `ends` are equally long. Only the first `plan.branches` will be continued, all of them where that is None.
        """
        ...


class Plan(Protocol):
    """How much one row may draft in this round, as its schedule decided."""

    @property
    def limit(self) -> int:
        """The most nodes on a path; 0 means no draft."""
        ...

    @property
    def branches(self) -> int | None:
        """The most nodes that one draft pass continues; None leaves that to the strategy, one for most."""
        ...

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        """Whether the next draft pass pays, given the confidence of the nodes on the paths that it would continue.

        `width` is how many nodes the pass brings. The branches of a search count as one path.
        """
        ...

    def keep(self, confidence: Sequence[float]) -> bool:
        """Whether the last of these nodes is worth the target's time (match verification and one-hot drafts only)."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """What a draft learns when a call begins: how to guess, how wide the target's logits are, what an encoder read.

    `encoding` is the target's encoder output, one entry per source, for a draft with the same encoder; `draft_inputs`
    are the encoder's inputs, for a draft that has its own. `sources[key]` is the number of a row's prompt, which
    several rows may continue (None: each has its own). `branching` is set where proposals should branch. `ends` are
    the tokens that end a text: what is guessed after one is lost.
    """

    rule: DraftRule
    vocab_size: int
    branching: BranchRule | None = None
    encoding: object | None = None
    draft_inputs: Mapping[str, Tensor] | None = None
    sources: Sequence[int] | None = None
    ends: frozenset[int] = frozenset()


class DraftSession(Protocol):
    """A draft at work on the rows of one call; all its buffers belong to the call."""

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per row, possibly empty, growing from the row's leaves; no path is longer than `plan.limit`."""
        ...

    def release(self, keys: Sequence[int]) -> None:
        """Forgets finished rows."""
        ...


class BatchDrafter(Protocol):
    """A kind of draft: starts one session per call."""

    def start(self, call: Call) -> DraftSession: ...


class Drafter(Protocol):
    """The simplest draft a user can write: from the text so far to at most `k` tokens that may follow."""

    def propose(self, tokens: list[int], k: int) -> list[int]: ...


@dataclass(frozen=True)
class Stats:
    """How a call went; counts are sums over rounds and rows.

    *Mean acceptance length* is 1 + accepted / speculative steps (a row's share of a target pass that had something
    drafted; prefill passes without a draft do not count). *Target passes per token* counts every pass. A search's
    tokens are its steps; `lengths` are the new tokens of every text that was returned. `exactness` says what holds of
    the text beside that of the same call without a draft: "exact", it is the same; "rounding", the same but for
    near-ties in half precision; "row-dependent", it may differ, as layers of the target look at all tokens of a pass.
    """

    num_new_tokens: int = 0
    num_target_passes: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    per_step_drafted: Sequence[int] = ()
    per_step_accepted: Sequence[int] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    select_seconds: float = 0.0
    finish_reasons: Sequence[str] = ()
    lengths: Sequence[int] = ()
    per_row: Sequence[Stats] = field(default=(), repr=False)
    settings: dict[str, str] = field(default_factory=dict)
    exactness: str = "exact"

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens per speculative step."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """`[n]`: how many speculative steps accepted exactly n draft tokens."""
        histogram = [0] * (max(self.per_step_accepted, default=-1) + 1)
        for accepted in self.per_step_accepted:
            histogram[accepted] += 1
        return histogram

    @property
    def target_passes_per_token(self) -> float:
        """Target forward passes, prefill included, per new token of all rows."""
        return self.num_target_passes / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def weight_passes_per_token(self) -> float:
        """How often the target's weights were read per new token, prompts included; one pass reads them once."""
        return self.target_passes_per_token

    @property
    def other_seconds(self) -> float:
        """Wall time outside drafting, verification and selection."""
        return self.seconds - self.draft_seconds - self.verify_seconds - self.select_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of wall time."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0
