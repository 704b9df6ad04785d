"""A draft that is a language model: chains for texts, trees for texts and searches, from one cache per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.draft.best_leaf import branch_tokens
from specdec.errors import UnsupportedError
from specdec.select.rules import fit
from specdec.types import EMPTY, BatchDrafter, Branch, Commit, DraftSession, Plan, Row, Scores, Tree

if TYPE_CHECKING:
    from specdec.models import Encoding, LanguageModel, Session

GoesOn = Callable[[Row, int], bool]  # whether a guess may follow a token of a row

CHUNK = 2048
"""Prompt tokens that a pass reads while nobody waits for it."""
SHARED_CHUNK = 256
"""The same while other rows are drafted for: they wait for no more than this."""
_FEW = 16  # tokens that are fed together with the rows that go on


class ModelDrafter(BatchDrafter):
    """Drafts with a smaller language model (Leviathan et al., arXiv 2211.17192, section 2.1).

    An encoder-decoder draft with `shared_encoder` reads the target's encoding of a row, another one encodes the inputs
    in the row's task. A decoder-only draft reads the decoder's tokens alone.
    """

    reads_predictions = False

    def __init__(self, model: LanguageModel, *, source: str = "model", shared_encoder: bool = False) -> None:
        self.model = model
        self.models = (model,)
        self.source = source
        self.shared_encoder = shared_encoder

    def __repr__(self) -> str:
        return f"ModelDrafter({self.model!r})"

    def start(self, vocab_size: int) -> ModelSession:
        """A session without rows."""
        return ModelSession(self.model, vocab_size, self.source, shared_encoder=self.shared_encoder)


@dataclass(eq=False, slots=True)
class _Held:
    """What the draft's cache holds of one row, number `slot` of the model's session.

    `text` tokens of the row's text, then `guesses` of a chain. In place of a chain there may be `branches`; `where`
    says which of them a node is, of the row's branches followed by the proposal. A row is `unreadable` once its text
    has a token that the draft has no embedding for. `open` rows wait to hear what became of their proposal.
    """

    slot: int
    text: int = 0
    guesses: int = 0
    branches: Tree = EMPTY
    where: dict[int, int] = field(default_factory=dict)
    unreadable: bool = False
    open: bool = False


class ModelSession(DraftSession):
    """A draft model at work: a round takes one pass per level over all rows that still go on.

    `keeps_guesses`: what it has fed of a guess is as good as text once the guess has become text.
    """

    guesses_branches = True
    keeps_guesses = True

    def __init__(
        self, model: LanguageModel, vocab_size: int, source: str = "model", *, shared_encoder: bool = False
    ) -> None:
        self._model, self._vocab_size, self._source = model, vocab_size, source
        self._shared_encoder = shared_encoder
        self._session: Session = model.session()
        self._held: dict[int, _Held] = {}
        self._rows: dict[int, Row] = {}
        self._encoded: dict[int, tuple[object, Encoding]] = {}  # by the identity of the inputs, which are kept alive

    @property
    def cache(self) -> Session:
        """The draft's own keys and values."""
        return self._session

    def propose(self, rows: Sequence[Row], plans: Sequence[Plan]) -> list[Tree]:
        """One proposal per row; none for a row whose prompt is still being read, a chunk per round."""
        limits = [self._limit(row, plan) for row, plan in zip(rows, plans, strict=True)]
        if not any(limits):
            return [EMPTY] * len(rows)
        try:
            ready = self._caught_up([row for row, limit in zip(rows, limits, strict=True) if limit])
            growths: dict[int, _Chain | _Branches] = {
                row.key: self._growth(row, plan, limit)
                for row, plan, limit in zip(rows, plans, limits, strict=True)
                if limit and row.key in ready
            }
            self._grow(list(growths.values()))
            for key in growths:
                self._held[key].open = True
            return [growths[row.key].proposal(self._source) if row.key in growths else EMPTY for row in rows]
        except BaseException:
            # The cache may hold half a round: forget it, the next round reads the texts again.
            self._session, self._held, self._rows = self._model.session(), {}, {}
            raise

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keeps of the cache what became text or is still a branch; leaves are fed again, for their logits."""
        cut, lengths = [], []
        for row, path, text, _ in commits:
            held = self._held.get(row.key)
            if held is None:
                continue
            held.open = False
            if held.guesses:
                kept = min(text, held.guesses) if self.keeps_guesses else 0
                held.text += kept
                if kept < held.guesses:
                    cut.append(held.slot)
                    lengths.append(held.text)
                held.guesses = 0
            elif held.branches.tokens:
                self._settle(held, row, path, text)
        if cut:
            self._session.truncate(cut, lengths)

    def rewind(self, row: Row, length: int) -> None:
        """Takes the cache back."""
        held = self._held.get(row.key)
        if held is not None and length < held.text:
            held.text, held.guesses, held.branches, held.where, held.unreadable = length, 0, EMPTY, {}, False
            self._session.truncate([held.slot], [length])

    def release(self, keys: Sequence[int]) -> None:
        """Frees the cache of rows."""
        gone = [held.slot for key in keys if (held := self._held.pop(key, None)) is not None]
        for key in keys:
            self._rows.pop(key, None)
        if gone:
            self._session.remove(gone)
        used = {id(row.task.inputs) for row in self._rows.values()}
        self._encoded = {key: value for key, value in self._encoded.items() if key in used}

    def _limit(self, row: Row, plan: Plan) -> int:
        """The most nodes worth drafting: the target adds one token itself, and the draft has only so many positions."""
        limit = min(plan.limit, row.remaining - 1)
        if limit <= 0 or not row.tokens:
            return 0
        most: int | None = self._model.max_positions
        if most is not None:
            beyond = row.tree.depth  # of a search, whose leaves are that far from its text
            limit = min(limit, most - len(row.tokens) - beyond + 1)
        return limit if limit > 0 and plan.go_on([[]]) else 0

    def _caught_up(self, rows: Sequence[Row]) -> set[int]:
        """Reads at most a chunk of the texts of rows that are far behind; which rows can be drafted for."""
        followers = self._admit(rows)
        self._close([row for row in rows if row.key in self._held and self._held[row.key].open])
        for row in rows:
            held = self._held.get(row.key)
            if held is not None and not self._is_readable(held, row):
                held.unreadable = True
        self._refresh(rows)
        ready = [row for row in rows if row.key in self._held and not self._held[row.key].unreadable]
        missing = [len(row.tokens) - self._held[row.key].text for row in ready]
        # Where some rows only go on, the others' texts get a pass of their own, and no more than a chunk of it.
        few = min(_FEW, SHARED_CHUNK)
        most, chunk = (few, SHARED_CHUNK) if any(count <= few for count in missing) else (CHUNK, CHUNK)
        sizes = {row.key: self._behind(row, most, followers) for row in ready}
        batch: list[Row] = []
        for row in ready:
            widest = max(min(sizes[one.key], chunk) for one in [*batch, row])
            if sizes[row.key] and (not batch or (len(batch) + 1) * widest <= chunk):
                batch.append(row)
        self._read(batch, chunk)
        joined = self._join_followers(followers)
        return {row.key for row in [*ready, *joined] if not self._behind(row, most, {})}

    def _behind(self, row: Row, most: int, followers: dict[int, list[Row]]) -> int:
        """How many tokens must be read before the row can be drafted for; all but the last where others wait for it."""
        held = self._held[row.key].text
        missing = len(row.tokens) - held
        awaited = max((len(one.tokens) - 1 for one in followers.get(row.key, ())), default=0)
        return missing - 1 if missing > most or held < awaited else 0

    def _read(self, rows: Sequence[Row], chunk: int) -> None:
        """One pass over the next tokens of these rows' texts."""
        if not rows:
            return
        held = [self._held[row.key] for row in rows]
        self._drop_branches([one for one in held if one.branches.tokens])
        pieces = [row.tokens[h.text : min(h.text + chunk, self._end(row))] for row, h in zip(rows, held, strict=True)]
        texts, wholes = [len(piece) for piece in pieces], [len(row.tokens) for row in rows]
        self._run(rows, [Tree.chain(piece) for piece in pieces], [0] * len(rows), texts, wholes=wholes)
        for one, piece in zip(held, pieces, strict=True):
            one.text += len(piece)

    def _end(self, row: Row) -> int:
        """How far the row's text may be read; its last token is fed when guesses are made."""
        return len(row.tokens) - 1

    def _run(
        self,
        rows: Sequence[Row],
        trees: Sequence[Tree],
        keep: Sequence[int],
        texts: Sequence[int],
        *,
        wholes: Sequence[int] | None = None,
        level: int = 0,
    ) -> list[Scores]:
        """One pass over the new nodes of `trees`: known text and branches (`level` 0), or guesses of this round.

        The cache holds them all afterwards, the first `texts[i]` nodes of a tree as text.
        """
        slots = [self._held[row.key].slot for row in rows]
        if level and all(len(tree) == text == 1 for tree, text in zip(trees, texts, strict=True)):
            logits = self._session.advance(slots, [tree.tokens[0] for tree in trees])
            return [Scores(tree, 0, own) for tree, own in zip(trees, logits[:, None], strict=True)]
        scores = self._session.forward(slots, trees, keep, wholes=wholes)
        self._session.commit(slots, [list(range(len(tree))) for tree in trees], texts=texts, final=not level)
        return scores

    def _admit(self, rows: Sequence[Row]) -> dict[int, list[Row]]:
        """Gives new rows a place in the cache, but for those that can continue what another row reads or has read.

        Returns these, by the other row's key.
        """
        followers: dict[int, list[Row]] = {}
        here = {row.key for row in rows}
        for row in rows:
            if row.key in self._held:
                continue
            leader = self._leader(row, here)
            if leader is None:
                self._held[row.key] = _Held(self._session.add(1, self._encoding(row))[0])
                self._rows[row.key] = row
            else:
                followers.setdefault(leader, []).append(row)
        return followers

    def _leader(self, row: Row, here: set[int]) -> int | None:
        """The key of a row of the same source that has read this one's text but for its last token, or does so now."""
        count = len(row.tokens) - 1
        if row.task.source is None or not count:
            return None
        for key, other in self._rows.items():
            held = self._held[key]
            comes = not held.unreadable and (held.text >= count or key in here)
            if comes and other.task.source == row.task.source and other.tokens[:count] == row.tokens[:count]:
                return key
        return None

    def _join_followers(self, followers: dict[int, list[Row]]) -> list[Row]:
        """Rows that continue what a leader has read by now, with a copy of it."""
        joined = []
        for key, rows in followers.items():
            leader = self._held[key]
            for row in rows:
                count = len(row.tokens) - 1
                if leader.text >= count:
                    slot = self._session.fork(leader.slot, count)
                    self._held[row.key] = _Held(slot, count, unreadable=leader.unreadable)
                    self._rows[row.key] = row
                    joined.append(row)
        return joined

    def _encoding(self, row: Row) -> Encoding | None:
        """What the draft's encoder, or the target's, made of the row's input."""
        if not self._model.is_encoder_decoder:
            return None
        if self._shared_encoder:
            return row.encoding  # type: ignore[return-value]
        inputs = row.task.inputs
        if inputs is None:
            raise UnsupportedError("the draft is an encoder-decoder model, but the call brings it no encoder inputs")
        if id(inputs) not in self._encoded:
            self._encoded[id(inputs)] = (inputs, self._model.encode(inputs))
        return self._encoded[id(inputs)][1].select([row.task.place])

    def _is_readable(self, held: _Held, row: Row) -> bool:
        """Whether the draft has embeddings for all that its cache lacks of the row's text."""
        return not held.unreadable and max(row.tokens[held.text :], default=0) < self._model.vocab_size

    def _refresh(self, rows: Sequence[Row]) -> None:
        """Texts that must be read again from their beginning, since their scaling changes."""
        if self._session.cache_reset_length is None:
            return
        held = [self._held[row.key] for row in rows if row.key in self._held]
        self._session.refresh([one.slot for one in held])
        for one in held:
            if (length := self._session.length(one.slot)) < one.text:
                one.text, one.branches, one.where = length, EMPTY, {}

    def _close(self, rows: Sequence[Row]) -> None:
        """Forgets proposals of which nothing was heard."""
        for row in rows:
            held = self._held[row.key]
            self._session.truncate([held.slot], [held.text])
            if held.branches.tokens:
                self._drop_branches([held])
            held.guesses, held.open = 0, False

    def _drop_branches(self, held: Sequence[_Held]) -> None:
        """Forgets branches of rows whose text went on without this draft."""
        if held:
            self._session.commit([one.slot for one in held], [[] for _ in held])
            for one in held:
                one.branches, one.where = EMPTY, {}

    def _settle(self, held: _Held, row: Row, path: list[int], text: int) -> None:
        """Of a tree in the cache, keeps the part of `path` that it has, the first nodes as text."""
        leaves = {text + leaf for leaf in row.leaves if leaf >= 0}
        number = {node: i for i, node in enumerate(path)}
        kept: list[int] = []
        nodes: list[int] = []
        for node in path:
            at = held.where.get(node)
            if at is None or number[node] in leaves or held.branches.parents[at] not in {-1, *nodes}:
                continue
            kept.append(node)
            nodes.append(at)
        settled = sum(number[node] < text for node in kept)
        self._session.commit([held.slot], [nodes], texts=[settled])
        held.text += settled
        held.branches = held.branches.part(nodes, settled)
        held.where = {number[node] - text: i for i, node in enumerate(kept[settled:])}

    def _growth(self, row: Row, plan: Plan, limit: int) -> _Chain | _Branches:
        held = self._held[row.key]
        goes_on = self._goes_on
        if -1 in row.leaves and held.text >= len(row.tokens):  # its last token is fed again, for its logits
            self.rewind(row, len(row.tokens) - 1)
        if row.task.branching is None or (plan.branches == 1 and not row.tree.tokens):
            return _Chain(row, plan, limit, held, goes_on)
        if row.tree.tokens and max(row.tree.tokens) >= self._model.vocab_size:
            return _Branches(row, plan, 0, held, goes_on)
        return _Branches(row, plan, limit, held, goes_on)

    def _goes_on(self, row: Row, token: int) -> bool:
        """Whether a guess may follow `token`: no text ends with it, and the draft can read what processors forced."""
        return token < self._model.vocab_size and token not in row.task.ends

    def _grow(self, growths: list[_Chain | _Branches]) -> None:
        """Feeds what texts and branches are ahead by, then one level after the other."""
        feeds = [(growth, tree) for growth in growths if (tree := growth.first()) is not None]
        level = 0
        while feeds:
            trees = [tree for _, tree in feeds]
            keep = [growth.keep(tree) for growth, tree in feeds]
            texts = [growth.text for growth, _ in feeds]
            scores = self._run([growth.row for growth, _ in feeds], trees, keep, texts, level=level)
            feeds = [
                (growth, following)
                for (growth, tree), found in zip(feeds, scores, strict=True)
                if (following := growth.take(tree, fit(found.logits, self._vocab_size))) is not None
            ]
            level += 1


class _Chain:
    """The chain that grows for one row in this round; its guesses lie behind the row's text in the cache."""

    def __init__(self, row: Row, plan: Plan, limit: int, held: _Held, goes_on: GoesOn) -> None:
        self.row, self.plan, self.limit, self.held, self._goes_on = row, plan, limit, held, goes_on
        self.tokens: list[int] = []
        self.confidence: list[float] = []
        self.q: list[Tensor] = []
        self.text = 0

    def first(self) -> Tree | None:
        """What the cache lacks of the text."""
        missing = self.row.tokens[self.held.text :]
        self.text = len(missing)
        return Tree.chain(missing)

    def keep(self, tree: Tree) -> int:
        """Only the last node's logits are wanted."""
        return 1

    def take(self, tree: Tree, logits: Tensor) -> Tree | None:
        """One guess from `logits` `[1, vocab]`; it is fed if the next draft pass pays."""
        self._fed(tree)
        rule = self.row.task.rule
        token, confidence, q = rule.pick(self.row, self.tokens, logits[-1], confident=self.plan.needs_confidence)
        if math.isnan(confidence):
            return None  # a draft that overflowed has nothing to say
        self.confidence.append(confidence)
        # A token drawn at random must not be dropped after it was seen: that would bend the output's distribution.
        if not rule.needs_q and not self.plan.keep(self.confidence):
            self.confidence.pop()
            return None
        self.tokens.append(token)
        if q is not None:
            self.q.append(q)
        goes_on = len(self.tokens) < self.limit and self.plan.go_on([self.confidence])
        self.text = 1
        return Tree.chain([token]) if goes_on and self._goes_on(self.row, token) else None

    def proposal(self, source: str) -> Tree:
        """The guesses."""
        return Tree.chain(self.tokens, self.confidence, torch.stack(self.q).float() if self.q else None, source)

    def _fed(self, tree: Tree) -> None:
        """Notes what the cache holds now."""
        if self.tokens:
            self.held.guesses += 1
        else:
            self.held.text += len(tree)


class _Branches:
    """The levels that grow from one row's leaves in this round; the cache holds them as branches.

    Of every end, `at` says which of the cache's branches it is (-1: the end of the text), and `_proposed` which node of
    the levels (-1 - i: the row's leaf i).
    """

    def __init__(self, row: Row, plan: Plan, limit: int, held: _Held, goes_on: GoesOn) -> None:
        self.row, self.plan, self.held, self._limit, self._goes_on = row, plan, held, limit, goes_on
        leaves = zip(row.leaves, row.leaf_scores, strict=True)
        self.ends = [Branch(branch_tokens(row, leaf), score) for leaf, score in leaves]
        self.at: list[int] = []
        self.text = 0
        self._proposed = [-1 - i for i in range(len(self.ends))]
        self._nodes: list[Branch] = []
        self._parents: list[int] = []
        self._fed: dict[int, int] = {}  # node of the levels -> branch of the cache
        self._levels: list[float] = []

    def first(self) -> Tree | None:
        """The cache's branches, and what it lacks of the text and of the row's own branches."""
        if not self._limit:
            return None
        row, held = self.row, self.held
        missing = row.tokens[held.text :]
        known = len(held.branches) + len(missing)
        fresh = [node for node in range(len(row.tree)) if node not in held.where]
        number = {**held.where, **{node: known + i for i, node in enumerate(fresh)}, -1: known - 1 if missing else -1}
        parents = [number[row.tree.parents[node]] for node in fresh]
        chain = Tree.chain(missing) if missing else held.branches  # text that is missing has no branches after it
        self.at = [number[leaf] for leaf in row.leaves]
        self.text = len(missing)
        held.where = {node: i - len(missing) for node, i in number.items() if node >= 0}
        return Tree(chain.tokens + [row.tree.tokens[node] for node in fresh], chain.parents + parents)

    def keep(self, tree: Tree) -> int:
        """From the first of the ends on."""
        return len(tree) - min(self.at)

    def take(self, tree: Tree, logits: Tensor) -> Tree | None:
        """The next level, from `logits` `[nodes, vocab]`; what the cache's branches become, None if no pass pays."""
        first = len(tree) - len(logits)
        at = torch.tensor([end - first for end in self.at], device=logits.device)
        text, self.text = self.text, 0
        self.held.text += text
        self.held.branches = tree.part(range(len(tree)), text)
        self.at = [max(end - text, -1) for end in self.at]
        branching = self.row.task.branching
        assert branching is not None
        return self._level(branching.expand(self.row, self.ends, logits[at], self.plan))

    def _level(self, level: list[tuple[int, Branch]]) -> Tree | None:
        cached, first = self.held.branches, len(self._nodes)
        self._nodes += [branch for _, branch in level]
        self._parents += [self._proposed[end] for end, _ in level]
        self._levels.append(max((branch.confidence for _, branch in level), default=0.0))
        best = set(self._best())
        open_ = [
            i for i, (_, branch) in enumerate(level) if first + i in best and self._goes_on(self.row, branch.tokens[-1])
        ]
        chosen = [(first + i, *level[i]) for i in open_[: self.plan.branches]]
        parents = [self.at[end] for _, end, _ in chosen]
        self.ends = [branch for _, _, branch in chosen]
        self.at = list(range(len(cached), len(cached) + len(chosen)))
        self._proposed = [node for node, _, _ in chosen]
        if not chosen or len(self._levels) >= self._limit or not self.plan.go_on(self._paths(), len(chosen)):
            return None
        self._fed |= dict(zip(self._proposed, self.at, strict=True))
        return Tree(cached.tokens + [end.tokens[-1] for end in self.ends], cached.parents + parents)

    def _paths(self) -> list[Sequence[float]]:
        """The draft's belief in what it would continue; the branches of a search are one path."""
        return [end.chances for end in self.ends if end.chances] or [self._levels]

    def _best(self) -> Sequence[int]:
        """The nodes worth proposing: the best, as many as chains of the planned length would have; of a search, all."""
        nodes = range(len(self._nodes))
        if self.plan.branches is None or not self._nodes or not self._nodes[0].chances:
            return nodes
        best = sorted(nodes, key=lambda node: -self._nodes[node].score)  # no node is better than its parent
        return sorted(best[: self.plan.branches * self.plan.limit])

    def proposal(self, source: str) -> Tree:
        """The nodes worth proposing; from here on the cache goes by their numbers."""
        nodes = self._best()
        place = {node: i for i, node in enumerate(nodes)}
        kept = [self._nodes[node] for node in nodes]
        drawn = [node.q for node in kept if node.q is not None]
        own = len(self.row.tree)
        self.held.where |= {own + place[node]: at for node, at in self._fed.items() if node in place}
        return Tree(
            [node.tokens[-1] for node in kept],
            [place.get(self._parents[node], self._parents[node]) for node in nodes],
            [node.confidence for node in kept],
            drawn or None,
            source,
        )
