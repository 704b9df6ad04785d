"""The values that travel between the rooms: trees of candidate tokens, the target's scores, steps and rounds.

Words: a *node* is one candidate token, a *row* one sequence; `p` is the target's distribution, `q` the draft's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

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

    def part(self, nodes: Sequence[int], text: int = 0) -> Tree:
        """Of these `nodes`, parents before children, those after the first `text`, as a tree that grows from them."""
        number = {node: i - text for i, node in enumerate(nodes)}
        kept = nodes[text:]
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
    hold, per layer, `[nodes, width]` and `[heads, nodes, known + nodes]` when they were asked for (None for layers that
    were not); the first `held` nodes of the tree were computed in an earlier pass and have none. `passes` are the
    numbers of the forwards that the row took part in. `cache` is where the row's strategy keeps what it worked out for
    all nodes at once.
    """

    tree: Tree
    first: int
    logits: Tensor
    unconditional: Tensor | None = None
    hidden_states: tuple[Any, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    held: int = 0
    passes: Sequence[int] = ()
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class TopTokens(NamedTuple):
    """The likeliest tokens at one node, the first the likeliest, and their log-probabilities under the target."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token, the tree node whose scores decided it, and what was asked to be kept about it.

    `logits` and `scores` `[vocab]` are the target's own and the processed ones, None unless they were asked for; of a
    search they are `[leaves, vocab]`, the token is the best live leaf's. `log_prob` is the target's own, and `top` the
    likeliest tokens beside it, where they are asked for.
    """

    token: int
    node: int
    logits: Tensor | None = None
    scores: Tensor | None = None
    log_prob: float | None = None
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class RowPass:
    """One row's part of a target pass: text that it has not read, its branches, the draft's proposal, in this order.

    Branches and proposal are numbered together, from 0 on (-1 is the end of the text); a node's number in the `tree` of
    the pass is `node(number)`. The first `held` branches are in the cache. `leaves` are the branches that the proposal
    grows from. A part that is not `complete` leaves text unread, and asks for no scores.
    """

    text: list[int]
    branches: Tree
    held: int
    leaves: Sequence[int]
    proposal: Tree = EMPTY
    complete: bool = True

    @property
    def tree(self) -> Tree:
        """All nodes of the pass."""
        tree = Tree.chain(self.text)
        if self.branches.tokens:
            tree = tree.graft(self.branches)
        if not self.proposal.tokens:
            return tree
        return tree.graft(self.proposal, [self.node(leaf) for leaf in self.leaves])

    @property
    def keep(self) -> int:
        """How many nodes, at the end of the tree, need scores."""
        return (len(self.branches) - self.held or 1) + len(self.proposal) if self.complete else 0

    @property
    def cost(self) -> int:
        """How many nodes the target computes."""
        return len(self.text) + len(self.branches) - self.held + len(self.proposal)

    def node(self, number: int) -> int:
        """The number in the tree of the pass."""
        return len(self.text) + number

    def path(self, numbers: Sequence[int] = ()) -> list[int]:
        """The unread text and these nodes after it, in the numbers of the tree."""
        text = len(self.text)
        return [*range(text), *(text + number for number in numbers)]


@dataclass(frozen=True, slots=True)
class RowRound:
    """What a round came to for one row.

    `drafted` counts proposed nodes and `depth` the longest path of them; the first `accepted` of `steps` were decided
    by proposed nodes; `finish` says why the row ended, if it did. `tested` are the draft's beliefs in the nodes that
    came into question, and whether they came true; they lay on `levels` levels of the proposal. `prefill` says that a
    prompt was read in this round, by the target or the draft.
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
    """One turn of the loop: what it came to for every row, the nodes of its target passes, and where the seconds went.

    A request's rounds have its own `rows`; `others` took part in the same passes, whose nodes and seconds are all told.
    """

    rows: list[RowRound]
    nodes: int
    draft_seconds: float
    verify_seconds: float
    select_seconds: float
    seconds: float
    others: Sequence[RowRound] = ()


class Row(Protocol):
    """One sequence or search as drafts and strategies may see it: its key, its text so far, where the prompt ends.

    A search has a text that all its branches share, and a tree of branches that grow from it; `leaves` are the nodes
    that will be continued, best first, with their `leaf_scores`. One sequence has the leaf -1, the end of its text.
    `remaining` is how many tokens may still follow a leaf. `encoder_tokens` are the ids an encoder-decoder target read,
    `encoding` is what its encoder made of its input, `prediction` are ids that the output may resemble. `task` is what
    the row's request wants of a draft.
    """

    key: int
    tokens: list[int]
    tree: Tree
    leaves: Sequence[int]
    prompt_length: int
    encoder_tokens: list[int] | None
    encoding: object | None
    prediction: list[int] | None
    task: DraftTask

    @property
    def leaf_scores(self) -> Sequence[float]: ...

    @property
    def remaining(self) -> int: ...

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text so far, followed by `extra`, as ids `[1, length]` where the logits are, to be read at once."""


class Strategy(Protocol):
    """What every way of decoding says about itself: its name, and what it needs of the engine and of a draft.

    `is_search`: it has several live branches and is a `Search`, otherwise a `Selector` of one text. `needs_hidden`: it
    reads the target's last hidden states. `takes_draft`: proposals may help it; only then it has `rule`, `branching`.
    """

    name: ClassVar[str]
    needs_hidden: ClassVar[bool]
    takes_draft: ClassVar[bool]

    @property
    def rule(self) -> DraftRule | None:
        """How a draft guesses one token after the other; for a search, after its best branch."""

    @property
    def branching(self) -> BranchRule | None:
        """How a draft guesses several continuations at once."""


class Selector(Strategy, Protocol):
    """A strategy of one text: turns genuine target scores into tokens, one ordinary step at a time."""

    is_search: ClassVar[Literal[False]]

    def advance(self, row: Row, new: list[int], scores: Scores, node: int) -> Step:
        """The next token after `node`, where `new` are the tokens already emitted in this round."""


class Trace(NamedTuple):
    """Per layer, the hidden states `[nodes, width]` and attentions `[heads, nodes, length]` that led to one token.

    Of a search they are `[leaves, nodes, width]` and `[leaves, heads, nodes, length]`.
    """

    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class NodeOutput(NamedTuple):
    """What the target said at one node: logits `[vocab]`, those of the unconditional row, and what led to them.

    They are number `at` of the logits of a `whole` pass, where that is told: a search may then look at all of them at
    once, and leave what it found in the cache there.
    """

    logits: Tensor
    unconditional: Tensor | None
    trace: Trace
    whole: Scores | None = None
    at: int = 0


class SearchStep(NamedTuple):
    """One step of a search: its state afterwards, and its new leaves.

    New leaf i is `tokens[i]` after the old leaf number `parents[i]`. `step` is what the step emitted, None where the
    search only asks for more nodes. `shown` are the numbers of the old leaves whose traces belong to the step, one for
    each row of the outputs, -1 for a row of zeros; all old leaves if None.
    """

    state: Any
    parents: list[int]
    tokens: list[int]
    step: Step | None
    shown: Sequence[int] | None = None


class Search(Strategy, Protocol):
    """A strategy with several live branches; its states are values, with `finish`, `length` and `leaf_scores`."""

    is_search: ClassVar[Literal[True]]

    @property
    def num_beams(self) -> int: ...

    def begin(self) -> Any:
        """The state before the first token."""

    def advance(self, row: Row, state: Any, outputs: Sequence[NodeOutput]) -> SearchStep:
        """The next state, from what the target said at every leaf."""


class Branch(NamedTuple):
    """A path that a draft considers: its tokens after the row's shared text, and the sum of their log-probabilities.

    `confidence` is the draft's probability of the last token, `chances` those of all tokens, where the path is a guess
    for its own sake and not one of a search's branches. `q` `[vocab]` is what the last token was drawn from, if it was
    drawn. `groups` are the groups of beams that a group beam search would use the path for.
    """

    tokens: list[int]
    score: float
    confidence: float = 1.0
    chances: Sequence[float] = ()
    q: Tensor | None = None
    groups: frozenset[int] | None = None


class DraftRule(Protocol):
    """How a draft turns its own logits into a guess, so that it tends to agree with the strategy."""

    @property
    def needs_q(self) -> bool:
        """Whether the strategy looks at the draft's distribution (rejection) or only at its tokens (match).

        Under rejection a node drawn at random must never be dropped after it was seen.
        """

    def pick(
        self, row: Row, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """From draft `logits` `[vocab]` after `guesses`: a token, its probability, and q `[vocab]` if `needs_q`.

        Unless it must be `confident`, the probability is told as 1, which spares a sum over the vocabulary. A
        probability of NaN says that the draft has no guess.
        """


class BranchRule(Protocol):
    """How a draft turns its own logits into several guesses; for a search it runs the search's own steps on them."""

    def expand(self, row: Row, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """From draft `logits` `[ends, vocab]`: nodes worth a look next, best first, each with the end it continues.

        `ends` are equally long. Only the first `plan.branches` will be continued, all of them where that is None.
        """


class Plan(Protocol):
    """How much one row may draft in this round, as its schedule decided."""

    @property
    def limit(self) -> int:
        """The most nodes on a path; 0 means no draft."""

    @property
    def branches(self) -> int | None:
        """The most nodes that one draft pass continues; None leaves that to the strategy, one for most."""

    @property
    def needs_confidence(self) -> bool:
        """Whether the answers below depend on the draft's confidence."""

    def go_on(self, paths: Sequence[Sequence[float]], width: int = 1) -> bool:
        """Whether the next draft pass pays, given the confidence of the nodes on the paths that it would continue.

        `width` is how many nodes the pass brings. The branches of a search count as one path.
        """

    def keep(self, confidence: Sequence[float]) -> bool:
        """Whether the last of these nodes is worth the target's time (match verification and one-hot drafts only)."""


@dataclass(frozen=True, eq=False, slots=True)
class DraftTask:
    """What a row's request wants of a draft.

    `allowed` tells how many of some tokens may follow a text, where processors know that without the target's logits.
    `rule` turns the draft's logits into a guess, `branching` into several (None: proposals are chains). What is guessed
    after one of `ends`, the tokens that end a text, is lost. Rows of one `source` continue the same input; `inputs` are
    those of its encoder, `[inputs, ...]`, of which it is number `place`, for a draft with an encoder of its own.
    """

    rule: DraftRule
    branching: BranchRule | None = None
    ends: frozenset[int] = frozenset()
    source: Hashable = None
    inputs: Mapping[str, Tensor] | None = None
    place: int = 0
    allowed: Callable[[Sequence[int], Sequence[int]], int] | None = None


class Hidden(NamedTuple):
    """The target's hidden states of what it has read, for a draft that asked for them (`BatchDrafter.hidden_layers`).

    `states` `[tokens, layers, width]`, on the target's device: of the row's tokens from number `first` on that it had
    not read, and of those nodes of the commit's path, from number `held` on, that are new to it.
    """

    first: int
    held: int
    states: Tensor


class Commit(NamedTuple):
    """What became of a row's branches and proposal: nodes `path` are kept, the first `text` of them as the row's text.

    Nodes are numbered as in a `RowPass`; the others are forgotten. The row has taken all this in already: its own
    branches are the rest of the path, in this order, and new leaves. A draft that asked for hidden states gets them
    with every commit, and a commit with an empty path for each chunk of a prompt that was read; None where the target
    has computed nothing for the row, and of a row that has ended.
    """

    row: Row
    path: list[int]
    text: int
    hidden: Hidden | None = None


class DraftSession(ABC):
    """A draft at work on rows of one target, which come and go; all its buffers are its own.

    `guesses_branches`: proposals look after all branches of a search. (Others are asked to continue the best one.)
    """

    guesses_branches = False

    @property
    def cache(self) -> Any:
        """The `specdec.models.Session` that holds its keys and values, if it has one."""
        return None

    @abstractmethod
    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per row, possibly empty, growing from the row's leaves; no path is longer than `plan.limit`.

        A row that was never seen before joins; `row.key` says which row it is.
        """

    def join(self, row: Row, source: int | None, length: int) -> int:
        """Learns that a new row could begin with the first `length` tokens of row `source`, which is not told of them.

        `source` is None where that row has left. Returns how many tokens the draft can do without hearing of their
        hidden states; the target reads the others again. Only asked of drafts that want hidden states.
        """
        return 0

    def commit(self, commits: Sequence[Commit]) -> None:
        """Learns what became of rows in the round, whoever made their proposals."""

    def rewind(self, row: Row, length: int) -> None:
        """Learns that a row's text was written anew from its first `length` tokens on."""

    def release(self, keys: Sequence[int]) -> None:
        """Forgets rows, which may be unknown."""


class BatchDrafter(ABC):
    """A kind of draft: starts sessions, and describes itself.

    `models` are the language models that it runs, `guesses_trees` says whether it may propose several continuations of
    one text, `reads_predictions` whether it looks for its guesses in given texts, and `instant` that it guesses from
    the text alone in next to no time. `hidden_layers` are the layers of the target whose hidden states it wants to hear
    of after every round (`Commit.hidden`), in this order: layer i is what decoder layer i reads, so that 0 are the
    embeddings, and the number of layers is what the head reads.
    """

    models: Sequence[Any] = ()
    hidden_layers: Sequence[int] = ()
    guesses_trees = True
    reads_predictions = True
    instant = False

    @abstractmethod
    def start(self, vocab_size: int) -> DraftSession:
        """A session without rows, for a target with logits of this width."""

    def for_sampling(self, sampling: str | None) -> BatchDrafter:
        """The draft for a call's kind of sampling ("rejection", "block", …), None where nothing is sampled."""
        return self


class Drafter(Protocol):
    """The simplest draft a user can write: from the text so far to at most `k` tokens that may follow."""

    def propose(self, tokens: list[int], k: int) -> list[int]: ...


@dataclass(frozen=True)
class Stats:
    """How a call went; counts are sums over rounds and rows.

    *Mean acceptance length* is 1 + accepted / speculative steps (a row's share of a target pass that had something
    drafted; prefill passes without a draft do not count). *Target passes per token* counts every pass. A search's
    tokens are its steps; `lengths` are the new tokens of every text that was returned. `cached_prompt_tokens` were read
    in an earlier call or for another row, and not again. Seconds are those of rounds, which rows of other calls may
    have shared. `exactness` says what holds of the text beside that of the same call without a draft: "strict" and
    "exact", it is the same; "rounding", the same but for near-ties in half precision; "row-dependent", it may differ,
    as layers of the target look at all tokens of a pass.
    """

    num_new_tokens: int = 0
    cached_prompt_tokens: int = 0
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
