"""The drafts at work on the engine's sequences: which one proposes for whom, and what it gets of a round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from specdec.core.budget import Budget
from specdec.core.draft_schedules import Schedule
from specdec.core.drafts import Commit, Draft, Proposer
from specdec.core.outcome import Outcome
from specdec.core.sequence import RunningSequence
from specdec.core.tree import EMPTY, Tree
from specdec.engine.prefix_cache import SharedTexts
from specdec.engine.request import Request
from specdec.errors import DraftError, OptionError
from specdec.models import LanguageModel, Session
from specdec.options.fields import is_whole
from specdec.proposers.chains import chain_per_leaf, valid_tokens
from specdec.proposers.function import token_ids

_log = logging.getLogger(__name__)
FORM = "form"
"""The source of a proposal that a form forces."""
_ENOUGH = 4  # forced tokens that are worth as much as a model's guesses
_CERTAIN = 1.001  # a probability of 1, as far as it may round above
Item = TypeVar("Item")


class Guarded(NamedTuple):
    """A context whose exceptions end the requests of `seqs`: noted in `failed`, they are removed at the round's end.

    (A class: `contextmanager` takes three times as long, and a round has seven of these.)
    """

    seqs: Sequence[RunningSequence]
    requests: Mapping[int, Request]
    failed: dict[Request, BaseException]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:  # also one that ends a program: no signal reaches the engine's thread
            for seq in self.seqs:
                self.failed.setdefault(self.requests[seq.id], error)
        return error is not None


Guard = Callable[[Sequence[RunningSequence]], Guarded]
CatchUp = Callable[["OpenDraft", Sequence[RunningSequence]], Mapping[RunningSequence, int]]


class OpenDraft(NamedTuple):
    """A draft, its proposer, and what it has read of whose text."""

    draft: Draft
    proposer: Proposer
    texts: SharedTexts


class OpenDrafts:
    """The open drafts of one target's sequences, by the identity of their drafts in `open`.

    `requests`: the requests of running sequences, by the sequences' ids. `num_read`: by these ids, how many tokens of
    texts draft models read in this round; the last one is not counted, each draft reads it again for its first guess.
    An exception within `guard(seqs)` ends the requests of these sequences.
    """

    def __init__(self, model: LanguageModel, requests: Mapping[int, Request], guard: Guard) -> None:
        self.open: dict[int, OpenDraft] = {}
        self.num_read: dict[int, int] = {}
        self._model, self.requests, self.guard = model, requests, guard

    def of(self, seq: RunningSequence) -> OpenDraft | None:
        """The sequence's open draft, if it has one."""
        return self.open.get(id(self.requests[seq.id].draft))

    def start(self, draft: Draft, target: Session) -> None:
        """Starts a draft's proposer, which all its sequences share."""
        if draft.hidden_layers:
            self._model.check_hidden_states(draft.hidden_layers)
        proposer = draft.start(self._model.vocab_size)
        if not isinstance(proposer, Proposer):
            kind = type(proposer).__name__
            raise DraftError(f"{draft!r}.start must return a `specdec.core.drafts.Proposer`, got {kind}: subclass it")
        proposer.share(target)
        self.open[id(draft)] = OpenDraft(draft, proposer, SharedTexts())

    def propose(self, seqs: Sequence[RunningSequence], catch_up: CatchUp, *, reading: bool) -> dict[int, Tree]:
        """The proposals by sequence id, for sequences with a draft; those for whose text it must wait get EMPTY.

        While prompts are read (`reading`), only instant drafts propose: a first token does not wait until a draft model
        has read the prompt, unless the target is offloaded, whose pass takes far longer, and the draft has a cache of
        its own. Where no budget allows a guess, a draft that is instant or reads predictions is asked all the same: it
        learns how often it would be right.
        """
        proposals: dict[int, Tree] = {}
        self.num_read.clear()
        for opened, group in grouped(seqs, self.of):
            if reading and not (opened.draft.instant or (self._model.is_offloaded and opened.draft.is_cached)):
                continue
            budgets: dict[int, Budget] = {}
            for pacing, together in grouped(group, lambda seq: self.requests[seq.id].pacing):
                with self.guard(together):
                    budgets |= _budgets(pacing.schedule, together)
            learns = opened.draft.instant or opened.draft.reads_predictions
            if not learns and all(budget.limit <= 0 for budget in budgets.values()):
                continue
            group = [seq for seq in group if seq.id in budgets]
            # An instant draft runs no model: asked for one request at a time, its failure is that request's alone.
            calls = [group]
            if opened.draft.instant:
                calls = [same_request for _, same_request in grouped(group, lambda seq: self.requests[seq.id])]
            for together in filter(None, calls):
                with self.guard(together):
                    proposals |= self.ask(opened, {seq: budgets[seq.id] for seq in together}, catch_up)
        return proposals

    def ask(self, opened: OpenDraft, budgets: Mapping[RunningSequence, Budget], catch_up: CatchUp) -> dict[int, Tree]:
        """One draft's proposals by sequence id; those for whose text it must wait get EMPTY."""
        proposals: dict[int, Tree] = {}
        for seq, budget in budgets.items():
            proposals |= self._forced(opened, seq, budget)
        rest = {seq: budget for seq, budget in budgets.items() if seq.id not in proposals}
        ids = opened.proposer.begin_round([*rest], [*rest.values()])
        if not isinstance(ids, Collection) or not {seq.id for seq in rest}.issuperset(ids):
            kind = type(opened.proposer).__name__
            raise DraftError(f"`{kind}.begin_round` must return ids of the sequences that it got, got {ids!r}")
        readers, unread = [seq for seq in rest if seq.id in ids], dict[RunningSequence, int]()
        if readers:
            unread |= catch_up(opened, readers)
            proposals |= {seq.id: EMPTY for seq in readers if seq not in unread}
            rest = {seq: budget for seq, budget in rest.items() if seq.id not in proposals}
        if rest:
            trees = opened.proposer.propose([*rest], [*rest.values()])
            proposals |= self._checked(trees, rest, type(opened.proposer).__name__)
        for seq, before in unread.items():
            self.count(seq, before, opened.proposer.unread(seq))
        return proposals

    def count(self, seq: RunningSequence, before: int, after: int) -> None:
        """Adds to `num_read` what a draft has read of a text, by the numbers of tokens that were and are unread."""
        self.num_read[seq.id] = self.num_read.get(seq.id, 0) + max(before - max(after, 1), 0)

    def _forced(self, opened: OpenDraft, seq: RunningSequence, budget: Budget) -> dict[int, Tree]:
        """By its id, what the form of a text forces after it and the draft would copy behind that; {}: ask the draft.

        A draft that runs a model is asked, too, where fewer tokens are forced than it mostly guesses.
        """
        vocab, copies = self._model.vocab_size, list[int]()
        if not seq.task.forced or budget.limit <= 0:
            return {}

        def guess(tail: list[int]) -> tuple[list[int], list[float]]:
            answers = (forced(seq.tokens + tail) for forced in seq.task.forced)
            chains = [token_ids(answer, seq.remaining, vocab, "`forced` of a processor") for answer in answers]
            tokens = valid_tokens(max(chains, key=len), vocab, seq.task.ends)
            if len(tokens) < (1 if opened.draft.instant else _ENOUGH):
                return [], []
            more, sure = opened.proposer.after(seq, tail + tokens, max(budget.limit - len(tokens), 0))
            copies.extend(more)
            return tokens + more, [1.0] * len(tokens) + sure

        with self.guard([seq]):
            tree = chain_per_leaf(seq, budget, FORM, guess)
            self._check(seq, budget, tree, FORM)
            tree = _allowed(seq, tree) if copies else tree
            if tree.tokens:
                return {seq.id: tree}
        return {}

    def _checked(self, trees: Any, budgets: Mapping[RunningSequence, Budget], kind: str) -> dict[int, Tree]:
        """What a proposer of this `kind` proposed, by sequence id, cut before the first token that processors forbid.

        Raises DraftError unless there is one Tree per sequence.
        """
        is_list = isinstance(trees, list | tuple)
        if not is_list or len(trees) != len(budgets) or not all(isinstance(tree, Tree) for tree in trees):
            kinds = f"[{', '.join(type(tree).__name__ for tree in trees)}]" if is_list else type(trees).__name__
            raise DraftError(
                f"`{kind}.propose` must return a list of {len(budgets)} Trees, one per sequence, got {kinds}"
            )
        proposals: dict[int, Tree] = {}
        for (seq, budget), tree in zip(budgets.items(), trees, strict=True):
            with self.guard([seq]):
                self._check(seq, budget, tree, tree.source or kind)
                if budget.limit > 0:
                    proposals[seq.id] = _allowed(seq, tree)
        return proposals

    def _check(self, seq: RunningSequence, budget: Budget, tree: Tree, name: str) -> None:
        """Raises DraftError for a proposal of the draft `name` that the target could not verify."""

        def refuse(what: str, way_out: str) -> NoReturn:
            raise DraftError(f"the draft {name!r} proposed {what}: {way_out}")

        for part in ("tokens", "parents", "confidence"):
            if not isinstance(value := getattr(tree, part), list | None):
                refuse(f"a Tree whose `{part}` is a {type(value).__name__}", "make it a list")
        nodes, chances, vocab = len(tree.tokens), tree.confidence, self._model.vocab_size
        if len(tree.parents) != nodes or (chances is not None and len(chances) != nodes):
            count = None if chances is None else len(chances)
            sizes = f"{nodes} tokens, {len(tree.parents)} parents and {count} confidences"
            refuse(sizes, "give each token one of each, or no confidences")
        if chances is not None and not all(0 <= chance <= _CERTAIN for chance in chances):
            refuse(f"the confidences {chances}", "give each token one from 0 to 1")
        if tree.q is not None and (len(tree.q) != nodes or any(q.shape not in ((vocab,), (0,)) for q in tree.q)):
            shapes = f"{nodes} tokens with `q` of the shapes {[list(q.shape) for q in tree.q]}"
            refuse(shapes, f"give each token its distribution [{vocab}], or an empty one if it was not drawn")
        if not all(-len(seq.leaves) <= parent < node for node, parent in enumerate(tree.parents)):
            order = f"parents come before their children, and -1 to -{len(seq.leaves)} are the leaves of the text"
            refuse(f"nodes with the parents {tree.parents}", order)
        depth = tree.depth
        if depth and depth >= seq.remaining:
            row = f"{depth} tokens in a row, but the text may only grow by {seq.remaining}"
            refuse(row, "propose at most `seq.remaining - 1`")
        if depth > max(budget.limit, 0):
            row = f"{depth} tokens in a row, but its budget allows {budget.limit}"
            refuse(row, "propose at most `budget.limit`")
        if not all(is_whole(token) and 0 <= token < vocab for token in tree.tokens):
            refuse("ids that the target lacks", f"propose whole numbers from 0 to {vocab - 1}")

    def message(self, outcome: Outcome, target: Session) -> Commit | None:
        """What a sequence's draft gets of a round; None for a chunk of a prompt whose hidden states it does not read.

        `target`: its cache before the outcome is committed.
        """
        draft = self.requests[outcome.seq.id].draft
        layers = () if draft is None else draft.hidden_layers
        if not (outcome.states or layers):
            return None
        # Without new nodes, only its unconditional sequence reads on.
        reads = layers and outcome.finish is None and outcome.out.work.num_new
        hidden = outcome.hidden(layers, target.length(outcome.seq.cache_row)) if reads else None
        return Commit(outcome.seq, outcome.path, outcome.num_text, hidden)

    def update(self, messages: Sequence[Commit]) -> None:
        """Gives drafts their messages of a round."""
        by_seq: dict[Any, Commit] = {message.seq: message for message in messages}
        for opened, group in grouped(by_seq, self.of):
            with self.guard(group):
                opened.proposer.update([by_seq[seq] for seq in group])

    def release(self, seqs: Sequence[RunningSequence]) -> None:
        """Takes sequences away from their proposers.

        One that cannot drop them is dropped itself; its other requests go on without a draft, as a new proposer has
        not followed their texts.
        """
        for opened, group in grouped(seqs, self.of):
            try:
                opened.proposer.drop([seq.id for seq in group])
            except Exception as error:
                _log.warning("%r could not drop ended texts and is left out from now on: %r", opened.draft, error)
                del self.open[id(opened.draft)]
                for request in self.requests.values():
                    request.draft = None if request.draft is opened.draft else request.draft


def _allowed(seq: RunningSequence, tree: Tree) -> Tree:
    """A guess for a text whose chain ends before the first token that processors forbid."""
    stem = tree.stem
    if not seq.task.allowed or not stem or tree.q is not None or seq.tree.tokens:
        return tree
    counts = [allowed(seq.tokens, tree.tokens[:stem]) for allowed in seq.task.allowed]
    if wrong := [count for count in counts if not is_whole(count)]:
        raise DraftError(f"`allowed` of a processor must return how many tokens may follow, got {wrong[0]!r}")
    count = max(min(*counts, stem), 0)
    nodes = [node for node, parent in enumerate(tree.parents) if (node if node < stem else parent) < count]
    sure = tree.confidence and [tree.confidence[node] for node in nodes]
    tokens, parents = [tree.tokens[node] for node in nodes], [tree.parents[node] for node in nodes]
    return Tree(tokens, parents, sure, source=tree.source, siblings=len(nodes) - count)


def _budgets(schedule: Schedule, seqs: Sequence[RunningSequence]) -> dict[int, Budget]:
    """The schedule's budgets by sequence id; raises OptionError unless it is a list with one `Budget` per sequence."""
    budgets = schedule.budgets(seqs)
    limits = [getattr(budget, "limit", None) for budget in budgets] if isinstance(budgets, Sequence) else []
    if len(limits) != len(seqs) or not all(map(is_whole, limits)):
        raise OptionError.of(
            "schedule", f"one whose `budgets` returns a list of {len(seqs)} budgets, one per sequence", budgets
        )
    return {seq.id: budget for seq, budget in zip(seqs, budgets, strict=True)}


def grouped(items: Iterable[Item], of: Callable[[Item], Any]) -> list[tuple[Any, list[Item]]]:
    """The items grouped by the identity of `of(item)`, groups in the order of their first item.

    Items whose `of(item)` is None are left out.
    """
    groups: dict[int, tuple[Any, list[Item]]] = {}
    for item in items:
        if (owner := of(item)) is not None:
            groups.setdefault(id(owner), (owner, []))[1].append(item)
    return list(groups.values())
