"""What a draft is asked, what it answers, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from specdec.core.rounds import SequenceView
    from specdec.core.tree import Tree


class Branch(NamedTuple):
    """A path that a draft considers: its tokens after the sequence's shared text, and the sum of their
    log-probabilities.

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


class Until(NamedTuple):
    """Where a chain ends, in numbers, so that nobody has to be asked after every guess.

    A guess of probability p, in bin b of the bins between `edges`, is right with the chance min(p * rates[b], 1). The
    chain goes on while the product of the chances of its guesses is at least `least`.
    """

    edges: Sequence[float] = ()
    rates: Sequence[float] = (1.0,)
    least: float = 0.0


class Filter(NamedTuple):
    """A logits processor in numbers (`specdec.decoding.processors.numeric`)."""

    name: str
    numbers: Sequence[float]


class Choice(NamedTuple):
    """How guesses are chosen from logits, in numbers: what filters they go through, one after the other, and the noise.

    Without an `address` the likeliest token is chosen; guess i is drawn with the noise of place `first + i` below it
    (`specdec.decoding.noise`).
    """

    filters: Sequence[Filter] = ()
    address: int | None = None
    first: int = 0


class ChainRule(NamedTuple):
    """How a chain of guesses is made in one call: at most `most` of them, chosen as `choice` says of `width` tokens.

    It ends where `until` says, and with a token of `ends`. Probabilities are told as 1 unless they must be known
    (`confident`); whole distributions where a strategy looks at them (`needs_q`).
    """

    most: int
    width: int
    choice: Choice = Choice()
    until: Until = Until()
    ends: Collection[int] = ()
    confident: bool = True
    needs_q: bool = False


class Chained(NamedTuple):
    """What came of chains: each sequence's guesses and their probabilities, NaN where there is no guess.

    `q` are each sequence's distributions `[guesses, vocab]`, where its rule needs them.
    """

    guesses: Sequence[Sequence[tuple[int, float]]]
    q: Sequence[Tensor | None]


class DraftRule(Protocol):
    """How a draft turns its own logits into a guess, so that it tends to agree with the strategy.

    A rule may tell it in numbers, with a method `choice(seq)`; one that answers None, or has none, is asked for every
    guess.
    """

    @property
    def needs_q(self) -> bool:
        """Whether the strategy looks at the draft's distribution (rejection) or only at its tokens (match).

        Under rejection a node drawn at random must never be dropped after it was seen.
        """

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True
    ) -> tuple[int, float, Tensor | None]:
        """From draft `logits` `[vocab]` after `guesses`: a token, its probability, and q `[vocab]` if `needs_q`.

        Unless it must be `confident`, the probability is told as 1, which spares a sum over the vocabulary. A
        probability of NaN says that the draft has no guess.
        """


class BranchRule(Protocol):
    """How a draft turns its own logits into several guesses; for a search it runs the search's own steps on them."""

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, plan: Plan) -> list[tuple[int, Branch]]:
        """From draft `logits` `[ends, vocab]`: nodes worth a look next, best first, each with the end it continues.

        `ends` are equally long. Only the first `plan.branches` will be continued, all of them where that is None.
        """


class Plan(Protocol):
    """How much one sequence may draft in this round, as its schedule decided.

    A plan whose `go_on` says of a chain what an `Until` says may tell it, as its `until`; None says nothing.
    """

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
    """What a sequence's request wants of a draft.

    `allowed` tells how many of some tokens may follow a text, where processors know that without the target's logits.
    `rule` turns the draft's logits into a guess, `branching` into several (None: proposals are chains). What is guessed
    after one of `ends`, the tokens that end a text, is lost. Sequences of one `source` continue the same input;
    `inputs` are those of its encoder, `[inputs, ...]`, of which it is number `place`, for a draft with an encoder of
    its own.
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

    `states` `[tokens, layers, width]`, on the target's device: of the sequence's tokens from number `first` on that it
    had not read, and of those nodes of the commit's path, from number `num_cached` on, that are new to it.
    """

    first: int
    num_cached: int
    states: Tensor


class Commit(NamedTuple):
    """What became of a sequence's branches and proposal: nodes `path` are kept, the first `text` of them as the
    sequence's text.

    Nodes are numbered as in a `RowPass`; the others are forgotten. The sequence has taken all this in already: its own
    branches are the rest of the path, in this order, and new leaves. A draft that asked for hidden states gets them
    with every commit, and a commit with an empty path for each chunk of a prompt that was read; None where the target
    has computed nothing for the sequence, and of a sequence that has ended.
    """

    seq: SequenceView
    path: list[int]
    text: int
    hidden: Hidden | None = None


@dataclass(frozen=True, eq=False, slots=True)
class SavedState:
    """What was read of the first `length` tokens of a text whose sequence has left: `state`, which takes so
    many `bytes`.
    """

    length: int
    state: Any
    bytes: int


class DraftSession(ABC):
    """A draft at work on sequences of one target, which come and go; all its buffers are its own.

    `guesses_branches`: proposals look after all branches of a search. (Others are asked to continue the best one.)
    """

    guesses_branches = False

    @property
    def cache(self) -> Any:
        """The `specdec.models.Session` that holds its keys and values, if it has one."""
        return None

    @abstractmethod
    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One tree per sequence, possibly empty, growing from the sequence's leaves; no path is longer than
        `plan.limit`.

        A sequence that was never seen before joins; `seq.id` says which sequence it is.
        """

    def join(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Learns that a new sequence could begin with the first `length` tokens of sequence `source`, which is not told
        of them.

        Where that sequence has left, `source` is what a session of the same draft kept of it. Returns how many tokens
        the draft can do without hearing of their hidden states; the target reads the others again. Only asked of drafts
        that want hidden states.
        """
        return 0

    def keep(self, seq: SequenceView, length: int) -> SavedState | None:
        """Copies what was read of a sequence that leaves, of its first `length` tokens at most; None where that is
        nothing.

        `join` may get it for later sequences, also in other sessions. Only asked of drafts that want hidden states,
        before `release`.
        """
        return None

    def commit(self, commits: Sequence[Commit]) -> None:
        """Learns what became of sequences in the round, whoever made their proposals."""

    def rewind(self, seq: SequenceView, length: int) -> None:
        """Learns that a sequence's text was written anew from its first `length` tokens on."""

    def release(self, keys: Sequence[int]) -> None:
        """Forgets sequences, which may be unknown."""


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
        """A session without sequences, for a target with logits of this width."""

    def for_sampling(self, sampling: str | None) -> BatchDrafter:
        """The draft for a call's kind of sampling ("rejection", "block", …), None where nothing is sampled."""
        return self


class Drafter(Protocol):
    """The simplest draft a user can write: from the text so far to at most `k` tokens that may follow."""

    def propose(self, tokens: list[int], k: int) -> list[int]: ...
