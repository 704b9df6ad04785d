"""A draft that is a language model: chains for texts, trees for texts and searches, from one cache per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.functional import pad

from specdec.core.drafts import BatchDrafter, Chained, ChainRule, Commit, DraftSession, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Scores, Tree
from specdec.decoding.samplers import fit
from specdec.errors import UnsupportedError
from specdec.proposers.growth import Branches, CachedText, Chain

if TYPE_CHECKING:
    from specdec.models import Encoding, LanguageModel, Session


CHUNK = 2048
"""Prompt tokens that a pass reads while nobody waits for it."""
SHARED_CHUNK = 256
"""The same while other sequences are drafted for: they wait for no more than this."""
_FEW = 16  # tokens that are fed together with the sequences that go on


def goes_on_by_one(trees: Sequence[Tree], texts: Sequence[int]) -> bool:
    """Whether a pass reads one more guess of every sequence's chain."""
    return all(len(tree) == text == 1 for tree, text in zip(trees, texts, strict=True))


class ModelDrafter(BatchDrafter):
    """Drafts with a smaller language model (Leviathan et al., arXiv 2211.17192, section 2.1).

    An encoder-decoder draft with `shared_encoder` reads the target's encoding of a sequence, another one encodes the
    inputs in the sequence's task. A decoder-only draft reads the decoder's tokens alone.
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
        """A session without sequences."""
        return ModelSession(self.model, vocab_size, self.source, shared_encoder=self.shared_encoder)


class ModelSession(DraftSession):
    """A draft model at work: a round takes one pass per level over all sequences that still go on.

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
        self._cached: dict[int, CachedText] = {}
        self._rows: dict[int, SequenceView] = {}
        self._encoded: dict[int, tuple[object, Encoding]] = {}  # by the identity of the inputs, which are kept alive

    @property
    def cache(self) -> Session:
        """The draft's own keys and values."""
        return self._session

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One proposal per sequence; none for a sequence whose prompt is still being read, a chunk per round."""
        limits = [self._limit(seq, plan) for seq, plan in zip(seqs, plans, strict=True)]
        if not any(limits):
            return [EMPTY] * len(seqs)
        try:
            ready = self._caught_up([seq for seq, limit in zip(seqs, limits, strict=True) if limit])
            growths: dict[int, Chain | Branches] = {
                seq.id: self._growth(seq, plan, limit)
                for seq, plan, limit in zip(seqs, plans, limits, strict=True)
                if limit and seq.id in ready
            }
            self._grow(list(growths.values()))
            for key in growths:
                self._cached[key].open = True
            return [growths[seq.id].proposal(self._source) if seq.id in growths else EMPTY for seq in seqs]
        except BaseException:
            # The cache may hold half a round: forget it, the next round reads the texts again.
            self._session, self._cached, self._rows = self._model.session(), {}, {}
            raise

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keeps of the cache what became text or is still a branch; leaves are fed again, for their logits."""
        cut, lengths = [], []
        for seq, path, text, _ in commits:
            cached = self._cached.get(seq.id)
            if cached is None:
                continue
            cached.open = False
            if cached.guesses:
                kept = min(text, cached.guesses) if self.keeps_guesses else 0
                cached.text += kept
                if kept < cached.guesses:
                    cut.append(cached.cache_row)
                    lengths.append(cached.text)
                cached.guesses = 0
            elif cached.branches.tokens:
                self._settle(cached, seq, path, text)
        if cut:
            self._session.truncate(cut, lengths)

    def rewind(self, seq: SequenceView, length: int) -> None:
        """Takes the cache back."""
        cached = self._cached.get(seq.id)
        if cached is not None and length < cached.text:
            cached.text, cached.guesses, cached.branches, cached.where, cached.unreadable = length, 0, EMPTY, {}, False
            self._session.truncate([cached.cache_row], [length])

    def release(self, keys: Sequence[int]) -> None:
        """Frees the cache of sequences."""
        gone = [cached.cache_row for key in keys if (cached := self._cached.pop(key, None)) is not None]
        for key in keys:
            self._rows.pop(key, None)
        if gone:
            self._session.remove(gone)
        used = {id(seq.task.inputs) for seq in self._rows.values()}
        self._encoded = {key: value for key, value in self._encoded.items() if key in used}

    def _limit(self, seq: SequenceView, plan: Plan) -> int:
        """The most nodes worth drafting: the target adds one token itself, and the draft has only so many positions."""
        limit = min(plan.limit, seq.remaining - 1)
        if limit <= 0 or not seq.tokens:
            return 0
        most: int | None = self._model.max_positions
        if most is not None:
            beyond = seq.tree.depth  # of a search, whose leaves are that far from its text
            limit = min(limit, most - len(seq.tokens) - beyond + 1)
        return limit if limit > 0 and plan.go_on([[]]) else 0

    def _caught_up(self, seqs: Sequence[SequenceView]) -> set[int]:
        """Reads at most a chunk of the texts of sequences that are far behind; which sequences can be drafted for."""
        followers = self._admit(seqs)
        self._close([seq for seq in seqs if seq.id in self._cached and self._cached[seq.id].open])
        for seq in seqs:
            cached = self._cached.get(seq.id)
            if cached is not None and not self._is_readable(cached, seq):
                cached.unreadable = True
        self._refresh(seqs)
        ready = [seq for seq in seqs if seq.id in self._cached and not self._cached[seq.id].unreadable]
        missing = [len(seq.tokens) - self._cached[seq.id].text for seq in ready]
        # Where some sequences only go on, the others' texts get a pass of their own, and no more than a chunk of it.
        few = min(_FEW, SHARED_CHUNK)
        most, chunk = (few, SHARED_CHUNK) if any(count <= few for count in missing) else (CHUNK, CHUNK)
        sizes = {seq.id: self._behind(seq, most, followers) for seq in ready}
        batch: list[SequenceView] = []
        for seq in ready:
            widest = max(min(sizes[one.id], chunk) for one in [*batch, seq])
            if sizes[seq.id] and (not batch or (len(batch) + 1) * widest <= chunk):
                batch.append(seq)
        self._read(batch, chunk)
        joined = self._join_followers(followers)
        return {seq.id for seq in [*ready, *joined] if not self._behind(seq, most, {})}

    def _behind(self, seq: SequenceView, most: int, followers: dict[int, list[SequenceView]]) -> int:
        """How many tokens must be read before the sequence can be drafted for; all but the last where others
        wait for it.
        """
        cached = self._cached[seq.id].text
        missing = len(seq.tokens) - cached
        awaited = max((len(one.tokens) - 1 for one in followers.get(seq.id, ())), default=0)
        return missing - 1 if missing > most or cached < awaited else 0

    def _read(self, seqs: Sequence[SequenceView], chunk: int) -> None:
        """One pass over the next tokens of these sequences' texts."""
        if not seqs:
            return
        cached = [self._cached[seq.id] for seq in seqs]
        self._drop_branches([one for one in cached if one.branches.tokens])
        pieces = [seq.tokens[h.text : min(h.text + chunk, self._end(seq))] for seq, h in zip(seqs, cached, strict=True)]
        texts, text_lengths = [len(piece) for piece in pieces], [len(seq.tokens) for seq in seqs]
        self._run(seqs, [Tree.chain(piece) for piece in pieces], [0] * len(seqs), texts, text_lengths=text_lengths)
        for one, piece in zip(cached, pieces, strict=True):
            one.text += len(piece)

    def _end(self, seq: SequenceView) -> int:
        """How far the sequence's text may be read; its last token is fed when guesses are made."""
        return len(seq.tokens) - 1

    def _run(
        self,
        seqs: Sequence[SequenceView],
        trees: Sequence[Tree],
        keep: Sequence[int],
        texts: Sequence[int],
        *,
        text_lengths: Sequence[int] | None = None,
        level: int = 0,
    ) -> list[Scores]:
        """One pass over the new nodes of `trees`: known text and branches (`level` 0), or guesses of this round.

        The cache holds them all afterwards, the first `texts[i]` nodes of a tree as text.
        """
        cache_rows = [self._cached[seq.id].cache_row for seq in seqs]
        if level and goes_on_by_one(trees, texts):
            logits, _ = self._session.advance(cache_rows, [tree.tokens[0] for tree in trees])
            return [Scores(tree, 0, own) for tree, own in zip(trees, logits[:, None], strict=True)]
        scores = self._session.forward(cache_rows, trees, keep, text_lengths=text_lengths)
        self._session.commit(cache_rows, [list(range(len(tree))) for tree in trees], texts=texts, final=not level)
        return scores

    def _admit(self, seqs: Sequence[SequenceView]) -> dict[int, list[SequenceView]]:
        """Gives new sequences a place in the cache, but for those that can continue what another sequence reads or has
        read.

        Returns these, by the other sequence's key.
        """
        followers: dict[int, list[SequenceView]] = {}
        here = {seq.id for seq in seqs}
        for seq in seqs:
            if seq.id in self._cached:
                continue
            leader = self._leader(seq, here)
            if leader is None:
                self._cached[seq.id] = CachedText(self._session.add(1, self._encoding(seq))[0])
                self._rows[seq.id] = seq
            else:
                followers.setdefault(leader, []).append(seq)
        return followers

    def _leader(self, seq: SequenceView, here: set[int]) -> int | None:
        """The key of a sequence of the same source that has read this one's text but for its last token, or
        does so now.
        """
        count = len(seq.tokens) - 1
        if seq.task.source is None or not count:
            return None
        for key, other in self._rows.items():
            cached = self._cached[key]
            comes = not cached.unreadable and (cached.text >= count or key in here)
            if comes and other.task.source == seq.task.source and other.tokens[:count] == seq.tokens[:count]:
                return key
        return None

    def _join_followers(self, followers: dict[int, list[SequenceView]]) -> list[SequenceView]:
        """Sequences that continue what a leader has read by now, with a copy of it."""
        joined = []
        for key, seqs in followers.items():
            leader = self._cached[key]
            for seq in seqs:
                count = len(seq.tokens) - 1
                if leader.text >= count:
                    cache_row = self._session.fork(leader.cache_row, count)
                    self._cached[seq.id] = CachedText(cache_row, count, unreadable=leader.unreadable)
                    self._rows[seq.id] = seq
                    joined.append(seq)
        return joined

    def _encoding(self, seq: SequenceView) -> Encoding | None:
        """What the draft's encoder, or the target's, made of the sequence's input."""
        if not self._model.is_encoder_decoder:
            return None
        if self._shared_encoder:
            return seq.encoding  # type: ignore[return-value]
        inputs = seq.task.inputs
        if inputs is None:
            raise UnsupportedError("the draft is an encoder-decoder model, but the call brings it no encoder inputs")
        if id(inputs) not in self._encoded:
            self._encoded[id(inputs)] = (inputs, self._model.encode(inputs))
        return self._encoded[id(inputs)][1].select([seq.task.place])

    def _is_readable(self, cached: CachedText, seq: SequenceView) -> bool:
        """Whether the draft has embeddings for all that its cache lacks of the sequence's text."""
        return not cached.unreadable and max(seq.tokens[cached.text :], default=0) < self._model.vocab_size

    def _refresh(self, seqs: Sequence[SequenceView]) -> None:
        """Texts that must be read again from their beginning, since their scaling changes."""
        if self._session.cache_reset_length is None:
            return
        cached = [self._cached[seq.id] for seq in seqs if seq.id in self._cached]
        self._session.refresh([one.cache_row for one in cached])
        for one in cached:
            if (length := self._session.length(one.cache_row)) < one.text:
                one.text, one.branches, one.where = length, EMPTY, {}

    def _close(self, seqs: Sequence[SequenceView]) -> None:
        """Forgets proposals of which nothing was heard."""
        for seq in seqs:
            cached = self._cached[seq.id]
            self._session.truncate([cached.cache_row], [cached.text])
            if cached.branches.tokens:
                self._drop_branches([cached])
            cached.guesses, cached.open = 0, False

    def _drop_branches(self, cached: Sequence[CachedText]) -> None:
        """Forgets branches of sequences whose text went on without this draft."""
        if cached:
            self._session.commit([one.cache_row for one in cached], [[] for _ in cached])
            for one in cached:
                one.branches, one.where = EMPTY, {}

    def _settle(self, cached: CachedText, seq: SequenceView, path: list[int], text: int) -> None:
        """Of a tree in the cache, keeps the part of `path` that it has, the first nodes as text."""
        leaves = {text + leaf for leaf in seq.leaves if leaf >= 0}
        number = {node: i for i, node in enumerate(path)}
        kept: list[int] = []
        nodes: list[int] = []
        for node in path:
            at = cached.where.get(node)
            if at is None or number[node] in leaves or cached.branches.parents[at] not in {-1, *nodes}:
                continue
            kept.append(node)
            nodes.append(at)
        settled = sum(number[node] < text for node in kept)
        self._session.commit([cached.cache_row], [nodes], texts=[settled])
        cached.text += settled
        cached.branches = cached.branches.part(nodes, settled)
        cached.where = {number[node] - text: i for i, node in enumerate(kept[settled:])}

    def _growth(self, seq: SequenceView, plan: Plan, limit: int) -> Chain | Branches:
        cached = self._cached[seq.id]
        goes_on = self._goes_on
        if -1 in seq.leaves and cached.text >= len(seq.tokens):  # its last token is fed again, for its logits
            self.rewind(seq, len(seq.tokens) - 1)
        if seq.task.branching is None or (plan.branches == 1 and not seq.tree.tokens):
            return Chain(seq, plan, limit, cached, goes_on)
        if seq.tree.tokens and max(seq.tree.tokens) >= self._model.vocab_size:
            return Branches(seq, plan, 0, cached, goes_on)
        return Branches(seq, plan, limit, cached, goes_on)

    def _goes_on(self, seq: SequenceView, token: int) -> bool:
        """Whether a guess may follow `token`: no text ends with it, and the draft can read what processors forced."""
        return token < self._model.vocab_size and token not in seq.task.ends

    def _at_once(self, feeds: Sequence[tuple[Chain | Branches, Tree]]) -> bool:
        """Lets chains grow to their ends in one call of the model, where they all are such; whether they have."""
        chains = [(growth, text) for growth, text in feeds if isinstance(growth, Chain)]
        if not chains or len(chains) < len(feeds) or not self._session.draft_chains:
            return False
        rules = [rule for growth, _ in chains if (rule := growth.rule(self._vocab_size)) is not None]
        if len(rules) < len(chains):
            return False
        chained = self._draft_chain([growth.seq for growth, _ in chains], [text for _, text in chains], rules)
        if chained is None:
            return False
        for (growth, text), guesses, q in zip(chains, chained.guesses, chained.q, strict=True):
            growth.take_all(text, guesses, None if q is None else pad(q, (0, self._vocab_size - q.shape[-1])))
        return True

    def _draft_chain(
        self, seqs: Sequence[SequenceView], texts: Sequence[Tree], rules: Sequence[ChainRule]
    ) -> Chained | None:
        """One call over known text, and the guesses after it; None where that cannot be."""
        cache_rows = [self._cached[seq.id].cache_row for seq in seqs]
        return self._session.draft_chain(cache_rows, [text.tokens for text in texts], rules)

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
            scores = self._run([growth.seq for growth, _ in feeds], trees, keep, texts, level=level)
            feeds = [
                (growth, following)
                for (growth, tree), found in zip(feeds, scores, strict=True)
                if (following := growth.take(tree, fit(found.logits, self._vocab_size))) is not None
            ]
            level += 1
