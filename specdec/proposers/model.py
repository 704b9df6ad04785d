"""A draft that is a language model: chains for texts, trees for texts and searches, from one cache per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from specdec.core.drafts import BatchDrafter, Chained, ChainRule, Commit, DraftSession, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Scores, Tree
from specdec.decoding.samplers import fit
from specdec.errors import UnsupportedError
from specdec.proposers.growth import Branches, Chain, Held

if TYPE_CHECKING:
    from specdec.models import Encoding, LanguageModel, Session


CHUNK = 2048
"""Prompt tokens that a pass reads while nobody waits for it."""
SHARED_CHUNK = 256
"""The same while other rows are drafted for: they wait for no more than this."""
_FEW = 16  # tokens that are fed together with the rows that go on


def goes_on_by_one(trees: Sequence[Tree], texts: Sequence[int]) -> bool:
    """Whether a pass reads one more guess of every row's chain."""
    return all(len(tree) == text == 1 for tree, text in zip(trees, texts, strict=True))


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
        self._held: dict[int, Held] = {}
        self._rows: dict[int, SequenceView] = {}
        self._encoded: dict[int, tuple[object, Encoding]] = {}  # by the identity of the inputs, which are kept alive

    @property
    def cache(self) -> Session:
        """The draft's own keys and values."""
        return self._session

    def propose(self, rows: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One proposal per row; none for a row whose prompt is still being read, a chunk per round."""
        limits = [self._limit(row, plan) for row, plan in zip(rows, plans, strict=True)]
        if not any(limits):
            return [EMPTY] * len(rows)
        try:
            ready = self._caught_up([row for row, limit in zip(rows, limits, strict=True) if limit])
            growths: dict[int, Chain | Branches] = {
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

    def rewind(self, row: SequenceView, length: int) -> None:
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

    def _limit(self, row: SequenceView, plan: Plan) -> int:
        """The most nodes worth drafting: the target adds one token itself, and the draft has only so many positions."""
        limit = min(plan.limit, row.remaining - 1)
        if limit <= 0 or not row.tokens:
            return 0
        most: int | None = self._model.max_positions
        if most is not None:
            beyond = row.tree.depth  # of a search, whose leaves are that far from its text
            limit = min(limit, most - len(row.tokens) - beyond + 1)
        return limit if limit > 0 and plan.go_on([[]]) else 0

    def _caught_up(self, rows: Sequence[SequenceView]) -> set[int]:
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
        batch: list[SequenceView] = []
        for row in ready:
            widest = max(min(sizes[one.key], chunk) for one in [*batch, row])
            if sizes[row.key] and (not batch or (len(batch) + 1) * widest <= chunk):
                batch.append(row)
        self._read(batch, chunk)
        joined = self._join_followers(followers)
        return {row.key for row in [*ready, *joined] if not self._behind(row, most, {})}

    def _behind(self, row: SequenceView, most: int, followers: dict[int, list[SequenceView]]) -> int:
        """How many tokens must be read before the row can be drafted for; all but the last where others wait for it."""
        held = self._held[row.key].text
        missing = len(row.tokens) - held
        awaited = max((len(one.tokens) - 1 for one in followers.get(row.key, ())), default=0)
        return missing - 1 if missing > most or held < awaited else 0

    def _read(self, rows: Sequence[SequenceView], chunk: int) -> None:
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

    def _end(self, row: SequenceView) -> int:
        """How far the row's text may be read; its last token is fed when guesses are made."""
        return len(row.tokens) - 1

    def _run(
        self,
        rows: Sequence[SequenceView],
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
        if level and goes_on_by_one(trees, texts):
            logits, _ = self._session.advance(slots, [tree.tokens[0] for tree in trees])
            return [Scores(tree, 0, own) for tree, own in zip(trees, logits[:, None], strict=True)]
        scores = self._session.forward(slots, trees, keep, wholes=wholes)
        self._session.commit(slots, [list(range(len(tree))) for tree in trees], texts=texts, final=not level)
        return scores

    def _admit(self, rows: Sequence[SequenceView]) -> dict[int, list[SequenceView]]:
        """Gives new rows a place in the cache, but for those that can continue what another row reads or has read.

        Returns these, by the other row's key.
        """
        followers: dict[int, list[SequenceView]] = {}
        here = {row.key for row in rows}
        for row in rows:
            if row.key in self._held:
                continue
            leader = self._leader(row, here)
            if leader is None:
                self._held[row.key] = Held(self._session.add(1, self._encoding(row))[0])
                self._rows[row.key] = row
            else:
                followers.setdefault(leader, []).append(row)
        return followers

    def _leader(self, row: SequenceView, here: set[int]) -> int | None:
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

    def _join_followers(self, followers: dict[int, list[SequenceView]]) -> list[SequenceView]:
        """Rows that continue what a leader has read by now, with a copy of it."""
        joined = []
        for key, rows in followers.items():
            leader = self._held[key]
            for row in rows:
                count = len(row.tokens) - 1
                if leader.text >= count:
                    slot = self._session.fork(leader.slot, count)
                    self._held[row.key] = Held(slot, count, unreadable=leader.unreadable)
                    self._rows[row.key] = row
                    joined.append(row)
        return joined

    def _encoding(self, row: SequenceView) -> Encoding | None:
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

    def _is_readable(self, held: Held, row: SequenceView) -> bool:
        """Whether the draft has embeddings for all that its cache lacks of the row's text."""
        return not held.unreadable and max(row.tokens[held.text :], default=0) < self._model.vocab_size

    def _refresh(self, rows: Sequence[SequenceView]) -> None:
        """Texts that must be read again from their beginning, since their scaling changes."""
        if self._session.cache_reset_length is None:
            return
        held = [self._held[row.key] for row in rows if row.key in self._held]
        self._session.refresh([one.slot for one in held])
        for one in held:
            if (length := self._session.length(one.slot)) < one.text:
                one.text, one.branches, one.where = length, EMPTY, {}

    def _close(self, rows: Sequence[SequenceView]) -> None:
        """Forgets proposals of which nothing was heard."""
        for row in rows:
            held = self._held[row.key]
            self._session.truncate([held.slot], [held.text])
            if held.branches.tokens:
                self._drop_branches([held])
            held.guesses, held.open = 0, False

    def _drop_branches(self, held: Sequence[Held]) -> None:
        """Forgets branches of rows whose text went on without this draft."""
        if held:
            self._session.commit([one.slot for one in held], [[] for _ in held])
            for one in held:
                one.branches, one.where = EMPTY, {}

    def _settle(self, held: Held, row: SequenceView, path: list[int], text: int) -> None:
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

    def _growth(self, row: SequenceView, plan: Plan, limit: int) -> Chain | Branches:
        held = self._held[row.key]
        goes_on = self._goes_on
        if -1 in row.leaves and held.text >= len(row.tokens):  # its last token is fed again, for its logits
            self.rewind(row, len(row.tokens) - 1)
        if row.task.branching is None or (plan.branches == 1 and not row.tree.tokens):
            return Chain(row, plan, limit, held, goes_on)
        if row.tree.tokens and max(row.tree.tokens) >= self._model.vocab_size:
            return Branches(row, plan, 0, held, goes_on)
        return Branches(row, plan, limit, held, goes_on)

    def _goes_on(self, row: SequenceView, token: int) -> bool:
        """Whether a guess may follow `token`: no text ends with it, and the draft can read what processors forced."""
        return token < self._model.vocab_size and token not in row.task.ends

    def _at_once(self, feeds: Sequence[tuple[Chain | Branches, Tree]]) -> bool:
        """Lets chains grow to their ends in one call of the model, where they all are such; whether they have."""
        chains = [(growth, text) for growth, text in feeds if isinstance(growth, Chain)]
        if not chains or len(chains) < len(feeds) or not self._session.chains:
            return False
        rules = [rule for growth, _ in chains if (rule := growth.rule(self._vocab_size)) is not None]
        if len(rules) < len(chains):
            return False
        chained = self._chain([growth.row for growth, _ in chains], [text for _, text in chains], rules)
        if chained is None:
            return False
        for (growth, text), guesses, q in zip(chains, chained.guesses, chained.q, strict=True):
            growth.take_all(text, guesses, None if q is None else pad(q, (0, self._vocab_size - q.shape[-1])))
        return True

    def _chain(self, rows: Sequence[SequenceView], texts: Sequence[Tree], rules: Sequence[ChainRule]) -> Chained | None:
        """One call over known text, and the guesses after it; None where that cannot be."""
        slots = [self._held[row.key].slot for row in rows]
        return self._session.chain(slots, [text.tokens for text in texts], rules)

    def _grow(self, growths: list[Chain | Branches]) -> None:
        """Feeds what texts and branches are ahead by, then one level after the other."""
        feeds = [(growth, tree) for growth in growths if (tree := growth.first()) is not None]
        level = 0
        if self._at_once(feeds):
            return
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
