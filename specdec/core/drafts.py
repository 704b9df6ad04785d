"""The interface of a draft, its instructions and its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.errors import OptionError

if TYPE_CHECKING:
    from specdec.core.tree import Tree
    from specdec.core.work import Pictures


class Branch(NamedTuple):
    """A path that a draft considers: its tokens after the sequence's text, and the sum of their log-probabilities.

    `confidence`: the draft's probability of the last token; `chances`: its probabilities of all tokens, empty for
    branches of a search. `q` `[vocab]`: the distribution that the last token was drawn from, if it was drawn.
    `groups`: the groups of beams that would use the path.
    """

    tokens: list[int]
    score: float
    confidence: float = 1.0
    chances: Sequence[float] = ()
    q: Tensor | None = None
    groups: frozenset[int] | None = None


Level = list[tuple[int, Branch]]
"""New paths, best first, each with the number of the end that it continues."""


class Filter(NamedTuple):
    """A logits processor in numbers (`specdec.decoding.processors.pipeline`)."""

    name: str
    numbers: Sequence[float]


class Choice(NamedTuple):
    """How a guess is chosen from logits, in numbers: `filters` in this order, then argmax or a draw.

    `address` None: argmax. Otherwise guess i is drawn with the noise of the key `fold(address, first + i)`
    (`specdec.decoding.noise`).
    """

    filters: Sequence[Filter] = ()
    address: int | None = None
    first: int = 0


class ChainRule(NamedTuple):
    """How one call makes a whole chain: at most `most` guesses, by `choice` over `width` tokens.

    It goes on while a further pass pays by its `budget`, and ends after a token of `ends`, or where the budget's
    `match` is found in `text`. Unless the budget needs confidences, every probability is returned as 1. With `needs_q`,
    q is returned as well. `siblings`: how many of the tokens that come next are returned for each guess: the likeliest,
    or those that the noise favours.
    """

    most: int
    width: int
    choice: Choice = Choice()
    budget: Budget = Budget(1)
    ends: Collection[int] = ()
    needs_q: bool = False
    siblings: int = 0
    text: Sequence[int] = ()


class Chained(NamedTuple):
    """Chains: per sequence its (guess, probability) pairs, with NaN where the draft has no guess, and q.

    `q`: `[guesses, vocab]` where the sequence's sampler needs it. `siblings`: for each guess, the pairs of
    the tokens beside it.
    """

    guesses: Sequence[Sequence[tuple[int, float]]]
    q: Sequence[Tensor | None]
    siblings: Sequence[Sequence[Sequence[tuple[int, float]]]]


class SequenceView(Protocol):
    """One sequence or search as drafts and strategies see it.

    `tokens`: its text, a list that only grows; a text that is written anew (another best branch, another tokenizer's
    tokens) is another list. Of a search, the text that all its branches share, from which `tree` grows. `leaves`: the
    nodes to continue, best first, with their `leaf_scores`; of a text only -1, its end. `remaining`: how many tokens
    may follow a leaf. `encoder_tokens`: the ids that the encoder read; `encoding`: its output. `prediction`: ids that
    the output may resemble. `task`: the draft's instructions.
    """

    id: int
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
        """The text followed by `extra`, as ids `[1, length]`; valid until the next call."""


class Sampler(Protocol):
    """How a draft turns its logits into guesses that tend to agree with the strategy."""

    @property
    def needs_q(self) -> bool:
        """Whether the strategy reads q (rejection) or only tokens (match).

        Under rejection, a drawn node must not be dropped depending on its token.
        """

    @property
    def branches(self) -> int:
        """How many paths a draft continues where `Budget.branches` is None; 0: chains only, as `expand` is missing."""
        return 0

    def pick(
        self, seq: SequenceView, guesses: list[int], logits: Tensor, *, confident: bool = True, siblings: bool = False
    ) -> tuple[int, float, Tensor | None]:
        """From draft `logits` `[vocab]` after `guesses`: a token, its probability, and q `[vocab]` if `needs_q`.

        Of a search, after its best branch. Unless `confident`, the probability is returned as 1, which saves a sum over
        the vocabulary. NaN: no guess. With `siblings`, the chances of tokens beside this one `[vocab]` stand for q.
        """

    def expand(self, seq: SequenceView, ends: Sequence[Branch], logits: Tensor, budget: Budget) -> Level:
        """The new paths from draft `logits` `[ends, vocab]`; of a search, its steps.

        `ends` have one length. The draft continues the first of the paths (`Budget.branches`).
        """
        raise TypeError(f"{type(self).__name__} guesses chains only")

    def choice(self, seq: SequenceView) -> Choice | None:
        """`pick` in numbers, after the sequence's text; None: it must be called for every guess."""
        return None


def path_limit(seq: SequenceView, budget: Budget) -> int:
    """How many nodes a path of a proposal may have; the last token of a text is left to the target."""
    return max(min(budget.limit, seq.remaining - 1), 0)


@dataclass(frozen=True, eq=False, slots=True)
class DraftTask:
    """A draft's instructions for one sequence.

    `sampler` turns the draft's logits into guesses. `ends`: tokens that end a text, after which a guess is useless.
    Sequences of one `source` continue the same input. `inputs` `[inputs, ...]`: the encoder's inputs, of which the
    sequence reads row `encoder_row`, for a draft with its own encoder. `pictures` begin the prompt, for a draft that
    sees. `allowed`: functions `(text, tokens)` of processors, which need no logits to say how many of `tokens` may
    follow. `forced`: functions of a text that return the tokens that alone may follow. `salt`: sequences of different
    salts do not see each other's texts.
    """

    sampler: Sampler
    ends: frozenset[int] = frozenset()
    source: Hashable = None
    inputs: Mapping[str, Tensor] | None = None
    encoder_row: int = 0
    pictures: Pictures | None = None
    allowed: Sequence[Callable[[Sequence[int], Sequence[int]], int]] = ()
    forced: Sequence[Callable[[Sequence[int]], list[int]]] = ()
    salt: str = ""


class Hidden(NamedTuple):
    """The target's hidden states of one pass, for a draft with `hidden_layers`.

    `by_layer`, each `[tokens, width]`, on the target's device: of the sequence's newly read tokens from number `first`
    on, then one state for each node of `path` whose number is at least `num_cached`, in the order of `path`; lower ones
    came in earlier commits.
    """

    first: int
    num_cached: int
    by_layer: Sequence[Tensor]

    @property
    def states(self) -> Tensor:
        """All layers `[tokens, layers, width]`; joined here, since a draft that is not asked need not read them."""
        return torch.stack(list(self.by_layer), dim=1)


class Commit(NamedTuple):
    """Which nodes of a sequence stay after a round; the sequence itself is up to date.

    `path`: the nodes that stay. Nodes are numbered: first the branches that `seq.tree` had before the round, then your
    proposal. The first `num_text` of them are text now; the others are the nodes of `seq.tree`, in this order, before
    its new leaves. A draft with `hidden_layers` gets `hidden` with every commit, and one commit with an empty path per
    chunk of a prompt; None if the target computed nothing, or the sequence has ended.
    """

    seq: SequenceView
    path: list[int]
    num_text: int
    hidden: Hidden | None = None


@dataclass(frozen=True, eq=False, slots=True)
class SavedState:
    """A copy of what a cache or draft holds of the first `length` tokens of a text; `state` takes `bytes` bytes."""

    length: int
    state: Any
    bytes: int


class Proposer(ABC):
    """A draft at work on sequences of one target, which come and go; it owns all its buffers."""

    @abstractmethod
    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        """One tree per sequence, from the sequence's leaves, whose paths have at most `path_limit(seq, budget)` nodes.

        A tree without nodes is no guess; one without a `source` (EMPTY) says that the draft still reads the text. Where
        no budget allows a node, drafts that are `instant` or have `reads_predictions` are asked all the same, so that
        they go on learning. A sequence with an unknown `seq.id` is new. A comparison of `seq.tokens` with what was read
        shows which guesses stayed.
        """

    def after(self, seq: SequenceView, tail: list[int], limit: int) -> tuple[list[int], list[float]]:
        """At most `limit` tokens that may follow the text and `tail`, and their confidence, without a pass; or none."""
        return [], []

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        """The ids of the sequences for which a model guesses in this round, once it has read their texts.

        Called once before `propose`. The engine has these texts read (`unread`, `read`), and calls `propose` for the
        sequences whose texts it need not wait for. Empty for drafts that read texts within `propose`.
        """
        return ()

    def unread(self, seq: SequenceView) -> int:
        """How many tokens of the text the draft has not read, in the draft's tokens; all for an unknown `seq.id`."""
        return 0

    def read(self, seqs: Sequence[SequenceView], most: int) -> None:
        """Reads at most `most` more tokens of each text in one pass, never the last, which `propose` needs."""

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Returns n <= `length`: the draft copied its state of the first n tokens of `source` to the new `seq`.

        `source` is the id of a running sequence, or a state that a proposer of the same draft saved. For a draft with
        `hidden_layers`, `update` brings hidden states from token n on; if n is 0, of the whole prompt.
        """
        return 0

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        """A copy of the draft's state of at most the first `length` tokens of a sequence that leaves, or None.

        `fork` gets it for later sequences, also of other proposers. Called before `drop`.
        """
        return None

    def update(self, commits: Sequence[Commit]) -> None:
        """Takes in a round's results, also of sequences that another draft proposed for.

        A draft behind another tokenizer gets none: texts and hidden states are the target's.
        """

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forgets sequences; unknown ids are ignored."""

    def share(self, target: Any) -> None:
        """Gets the target's session before the first round, for a draft that guesses over the target's keys."""

    def bound(self, rows: int, columns: int) -> None:
        """Bounds its cache, if it has one, to this many sequences and positions, for now."""


class Draft(ABC):
    """A draft: starts proposers, and describes itself.

    `models`: the language models that it runs. `guesses_trees`: it may propose several continuations of one text.
    `reads_predictions`: it copies from `seq.prediction`. `needs_encoder_inputs`: it reads `task.inputs` with an encoder
    of its own. A request for something that the draft does not do raises. `hidden_layers`: the layers of the target
    whose hidden states it gets after every round (`Commit.hidden`), in this order; state i is the input of decoder
    layer i (0: the embeddings), the last one the input of the output head.

    `is_cached`: its models have caches of their own, for which memory is set aside; False: they run over the target's.

    `instant`: it runs no model, and takes next to no time. Such a draft also guesses in the pass that ends a prompt,
    before it has hidden states of it. It is asked even where it may propose nothing, and for each request alone, so
    that its errors end that request only.
    """

    models: Sequence[Any] = ()
    hidden_layers: Sequence[int] = ()
    guesses_trees = False
    reads_predictions = False
    needs_encoder_inputs = False
    instant = False
    is_cached = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def kind(self) -> str:
        """What drafts, in a word."""
        return type(self).__name__.removesuffix("Draft").lower()

    @classmethod
    def of(cls, target: Any, argument: str | None, name: str = "draft") -> Draft:
        """The draft of a word in `specdec.proposers.DRAFTS`.

        `argument`: what follows a colon; None: no colon. As inherited, there must be none. `name`: the caller's
        argument, for errors.
        """
        refuse_argument(argument, name)
        return cls()

    @abstractmethod
    def start(self, vocab_size: int) -> Proposer:
        """A proposer without sequences, for a target with logits of this width."""


def refuse_argument(argument: str | None, name: str) -> None:
    """Raises OptionError if the word for a draft, the caller's `name`, came with an argument."""
    if argument is not None:
        raise OptionError.of(name, "a word without an argument", f":{argument}")


@runtime_checkable
class Drafter(Protocol):
    """The simplest draft that a user can write: from the text so far, at most `k` tokens that may follow."""

    def propose(self, tokens: list[int], k: int) -> list[int]: ...
