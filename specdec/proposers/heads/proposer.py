"""Drafts with a head: their first guess goes on from what the target said of the text, in its hidden states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.core.drafts import BatchDrafter, Chained, ChainRule, Commit, Hidden, Kept, Plan
from specdec.core.rounds import SequenceView
from specdec.core.tree import EMPTY, Scores, Tree
from specdec.models import prefix_bytes
from specdec.proposers.growth import CachedText
from specdec.proposers.model import CHUNK, ModelSession, goes_on_by_one

if TYPE_CHECKING:
    from specdec.proposers.heads import Head, Stages


_PENDING = 64  # tokens that are read although nobody asks for guesses, so that their features can go


class HeadDrafter(BatchDrafter):
    """Drafts with a head (EAGLE-3, arXiv 2503.01840; multi-token prediction, arXiv 2412.19437)."""

    reads_predictions = False

    def __init__(self, head: Head, *, source: str = "head") -> None:
        self.head, self.source = head, source
        self.models, self.hidden_layers = head.stages, head.hidden_layers

    def __repr__(self) -> str:
        return f"HeadDrafter({self.head!r})"

    def start(self, vocab_size: int) -> HeadSession:
        """A session without sequences."""
        kind = HeadSession if self.head.block is None else BlockSession
        return kind(self.head, vocab_size, self.source)


@dataclass(eq=False, slots=True)
class _Known:
    """What the head may read of a sequence: features `states` `[tokens, width]` of its tokens from number `first` on.

    `branches` are those of the sequence's own branches that the target has seen. `own` branches had the sequence when
    it was drafted for. `written` is what the stages wrote in this round, by stage and node: -1 is the end of the text.
    `texts` is what all stages but the last wrote at the tokens of the text, which the next ones read wherever it goes
    on.
    """

    first: int
    states: Tensor
    branches: list[Tensor] = field(default_factory=list)
    own: int = 0
    written: list[dict[int, Tensor]] = field(default_factory=list)
    texts: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def end(self) -> int:
        """One past the last token that it knows."""
        return self.first + len(self.states)

    @property
    def bytes(self) -> int:
        """What was written at the tokens of the text takes."""
        return sum(one.numel() * one.element_size() for said in self.texts.values() for one in said)

    def beginning(self, count: int) -> _Known:
        """A copy for a text that goes on from the first `count` tokens; the feature of the last one is gone."""
        known = _Known(count - 1, self.states[:0].clone())
        known.texts.update((stage, [*torch.stack(said[:count])]) for stage, said in self.texts.items() if said)
        return known


class HeadSession(ModelSession):
    """A head at work: like a draft model, whose inputs are embeddings and features.

    What was fed of a guess was made of the head's own features. It is forgotten after every round, and fed again with
    the target's where it became text, in the pass that makes the next guess.
    """

    keeps_guesses = False

    def __init__(self, head: Head, vocab_size: int, source: str = "head") -> None:
        super().__init__(head, vocab_size, source)  # type: ignore[arg-type]
        self._head = head
        self._shift = 1  # how far a token's feature lies before it
        self._known: dict[int, _Known] = {}

    def propose(self, seqs: Sequence[SequenceView], plans: Sequence[Plan]) -> list[Tree]:
        """One proposal per sequence; none for a sequence of whose text the target has not told yet."""
        for seq in seqs:
            if (known := self._known.get(seq.id)) is not None:
                known.own = len(seq.tree)
        return super().propose(seqs, plans)

    def join(self, seq: SequenceView, source: int | Kept, length: int) -> int:
        """A copy of what was read of the other text, all but the last token of it, whose feature is gone."""
        count = min(length, source.length if isinstance(source, Kept) else self._read_of(source))
        if count < 2:
            return 0
        if isinstance(source, Kept):
            prefix, known = source.state
            cache_row = self._session.read_from(prefix, count)
        else:
            known, cache_row = self._known[source], self._session.fork(self._cached[source].cache_row, count)
        self._cached[seq.id], self._rows[seq.id] = CachedText(cache_row, count), seq
        self._known[seq.id] = known.beginning(count)
        return count - 1

    def keep(self, seq: SequenceView, length: int) -> Kept | None:
        """A copy of what is in the cache by now; nothing is read for that."""
        cached, known = self._cached.get(seq.id), self._known.get(seq.id)
        if cached is None or known is None or cached.open or (count := min(length, cached.text)) < 2:
            return None
        prefix, known = self._session.keep_prefix(cached.cache_row, count), known.beginning(count)
        return Kept(count, (prefix, known), prefix_bytes(prefix) + known.bytes)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Takes in the features of new text; what was guessed goes. Prompts are read as they come, in chunks."""
        read = []
        for seq, path, text, hidden in commits:
            if seq.id not in self._cached:
                if hidden is None:
                    continue
                self._admit([seq])
            cached, known = self._cached[seq.id], self._known.get(seq.id)
            kept = known.own if known is not None and len(self._stages.stages) == 1 else 0
            cached.where = {node: at for node, at in cached.where.items() if node < kept}
            if hidden is not None:
                known = self._hear(seq, path, text, hidden)
                if known.end < len(seq.tokens) - 1 or known.end - cached.text > _PENDING:
                    read.append(seq)
        self._stages.first = 0
        super().commit(commits)
        self._absorb(read)

    def rewind(self, seq: SequenceView, length: int) -> None:
        super().rewind(seq, length)
        if (known := self._known.get(seq.id)) is not None and length < known.end:
            known.states, known.branches = known.states[: max(length - known.first, 0)], []

    def release(self, keys: Sequence[int]) -> None:
        super().release(keys)
        for key in keys:
            self._known.pop(key, None)

    def _hear(self, seq: SequenceView, path: list[int], text: int, hidden: Hidden) -> _Known:
        """Notes the features of the nodes on a path, as text or as branches, and of text that was read before them."""
        features = self._head.features(hidden.states)
        fresh = [node for node in path if node >= hidden.num_cached]
        unread = len(features) - len(fresh)
        known = self._known.setdefault(seq.id, _Known(hidden.first, features[:0]))
        of = dict(zip(fresh, features[unread:], strict=True))
        kept = [of[node] if node in of else known.branches[node] for node in path]
        if not known.first <= hidden.first <= known.end:  # read again, or nobody told of what lies between
            known.first, known.states = hidden.first, features[:0]
        before = known.states[: hidden.first - known.first] if unread else known.states
        known.states = torch.cat([before, features[:unread], *(one[None] for one in kept[:text])])
        known.branches = kept[text:]
        if (gone := self._cached[seq.id].text - 2 - known.first) > 0:  # the last token may have to be fed again
            known.first, known.states = known.first + gone, known.states[gone:]
        return known

    def _read_of(self, key: int) -> int:
        """How many tokens of a sequence's text the head has read, after all that is known of it."""
        cached = self._cached.get(key)
        if cached is None or cached.unreadable:
            return 0
        if key in self._known:
            self._absorb([self._rows[key]])
        return cached.text

    def _absorb(self, seqs: Sequence[SequenceView]) -> None:
        """Reads what is known of these sequences' texts."""
        seqs = [seq for seq in seqs if self._is_continuous(seq)]
        while behind := [seq for seq in seqs if self._end(seq) > self._cached[seq.id].text]:
            self._read(behind, CHUNK)

    def _leader(self, seq: SequenceView, here: set[int]) -> int | None:
        """Nobody: a sequence joins another one when the target lets it."""
        return None

    def _limit(self, seq: SequenceView, plan: Plan) -> int:
        known = self._known.get(seq.id)
        told = known is not None and seq.id in self._cached and known.end >= len(seq.tokens) - 1
        return super()._limit(seq, plan) if told and self._is_continuous(seq) else 0

    def _end(self, seq: SequenceView) -> int:
        return min(super()._end(seq), self._known[seq.id].end + self._shift)

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
        """A pass of every stage that later guesses build on; scores are those of the first of them."""
        session = self._stages
        if level and len(session.stages) == 1 and goes_on_by_one(trees, texts):
            return self._next(
                [self._known[seq.id] for seq in seqs], [self._cached[seq.id].cache_row for seq in seqs], trees
            )
        session.first = min(level, len(session.stages) - 1)
        cache_rows = [self._cached[seq.id].cache_row for seq in seqs]
        parts = [
            _Part(seq, tree, session.pending(cache_row), text)
            for seq, tree, cache_row, text in zip(seqs, trees, cache_rows, texts, strict=True)
        ]
        if not level:
            for seq in seqs:
                self._known[seq.id].written = [{} for _ in session.stages]
        scores: list[Scores] = []
        for stage in range(session.first, len(session.stages)):
            source = stage if level > stage else stage - 1  # the last stage goes on from itself
            inputs = [self._head.inputs(part.tokens, self._features(part, source)) for part in parts]
            said = session.stages[stage].forward(
                cache_rows,
                trees,
                [0] * len(keep) if scores else keep,
                embeds=inputs,
                text_lengths=text_lengths,
                output_hidden_states=True,
            )
            scores = scores or said
            for part, one in zip(parts, said, strict=True):
                self._note(part, stage, one)
        session.commit(cache_rows, [list(range(len(tree))) for tree in trees], texts=texts, final=not level)
        for part in parts:
            self._renumber(part, guessed=level > 0)
        return scores

    def _next(self, known: Sequence[_Known], cache_rows: Sequence[int], trees: Sequence[Tree]) -> list[Scores]:
        """A pass of the only stage over one more guess each, which go on from what was written before them."""
        tokens, before = [tree.tokens[0] for tree in trees], torch.stack([one.written[0][-1] for one in known])
        logits, states = self._stages.advance(cache_rows, tokens, self._head.inputs(tokens, before))
        assert states is not None
        for one, state in zip(known, states, strict=True):
            one.written = [{-1: state}]
        return [Scores(tree, 0, own) for tree, own in zip(trees, logits[:, None], strict=True)]

    def _draft_chain(
        self, seqs: Sequence[SequenceView], texts: Sequence[Tree], rules: Sequence[ChainRule]
    ) -> Chained | None:
        parts = [_Part(seq, text, 0, len(text)) for seq, text in zip(seqs, texts, strict=True)]
        inputs = [self._head.inputs(part.tokens, self._features(part, -1)) for part in parts]
        cache_rows = [self._cached[seq.id].cache_row for seq in seqs]
        return self._stages.draft_chain(cache_rows, [text.tokens for text in texts], rules, inputs)

    def _features(self, part: _Part, source: int) -> Tensor:
        """What a stage reads of new nodes: what stage `source` wrote before them; -1 is the target."""
        known = self._known[part.seq.id]
        if source < 0:
            return torch.cat([self._of_text(part), *(one[None] for one in self._of_branches(part))])
        written, blank = known.written[source], known.states.new_zeros(known.states.shape[1])
        before = [part.tree.parents[node] for node in range(part.num_cached, len(part.tree))]
        said, length = known.texts[source], self._cached[part.seq.id].text
        end = said[length - 1] if 0 < length <= len(said) else blank
        return torch.stack([written.get(node, end if node < 0 else blank) for node in before])

    def _of_text(self, part: _Part) -> Tensor:
        """The target's features of text that is fed; the first token of all has none before it."""
        known, begin = self._known[part.seq.id], self._cached[part.seq.id].text
        first = known.states.new_zeros(int(part.text > 0 and begin < self._shift), known.states.shape[1])
        at = begin - self._shift + len(first) - known.first
        return torch.cat([first, known.states[at : at + part.text - len(first)]])

    def _of_branches(self, part: _Part) -> list[Tensor]:
        """Those of the sequence's own branches that are fed."""
        seq, known = part.seq, self._known[part.seq.id]
        fresh = sorted(node for node, at in self._cached[seq.id].where.items() if at >= part.num_cached)
        parents = [seq.tree.parents[node] for node in fresh]
        return [known.branches[node] if node >= 0 else known.states[-1] for node in parents]

    def _note(self, part: _Part, stage: int, scores: Scores) -> None:
        """What a stage wrote at the new nodes; the last one, where something may follow."""
        assert scores.hidden_states is not None
        last = stage == len(self._stages.stages) - 1
        first = max(part.num_cached, part.text - 1) if last else part.num_cached
        states = scores.hidden_states[0][first - part.num_cached :]
        self._known[part.seq.id].written[stage].update(zip(range(first, len(part.tree)), states, strict=True))

    def _renumber(self, part: _Part, *, guessed: bool) -> None:
        """Numbers what was written as nodes are from now on, and keeps what is of text that is not `guessed`."""
        known, begin = self._known[part.seq.id], self._cached[part.seq.id].text
        if part.text:
            if not guessed:
                for stage, written in enumerate(known.written[:-1]):
                    known.texts[stage][begin:] = [written[node] for node in range(part.text)]
            known.written = [
                {node - part.text: one for node, one in written.items() if node >= part.text - 1}
                for written in known.written
            ]

    @property
    def _stages(self) -> Stages:
        return self._session  # type: ignore[return-value]

    def _is_continuous(self, seq: SequenceView) -> bool:
        """Whether nothing is missing between what was read of a text and what is known of it."""
        return self._known[seq.id].first <= max(self._cached[seq.id].text - self._shift, 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """A sequence's part of a pass: a tree of which `num_cached` nodes are in the cache, and the next `text` ones will
    be text.
    """

    seq: SequenceView
    tree: Tree
    num_cached: int
    text: int

    @property
    def tokens(self) -> list[int]:
        """Those of the new nodes."""
        return self.tree.tokens[self.num_cached :]


class BlockSession(HeadSession):
    """A head that makes all guesses of a round in one pass (`Block`): what a guess is does not change the next ones.

    After the branches of a search it guesses nothing.
    """

    guesses_branches = False

    def __init__(self, head: Head, vocab_size: int, source: str = "head") -> None:
        super().__init__(head, vocab_size, source)
        assert head.block is not None
        self._block = head.block
        self._shift = 0 if head.block.reads_itself else 1
        self._said: dict[int, Tensor] = {}  # logits of a sequence's guesses in this round `[guesses, vocab]`

    def commit(self, commits: Sequence[Commit]) -> None:
        """What was guessed is not in the cache."""
        self._forget([commit.seq for commit in commits])
        super().commit(commits)

    def _draft_chain(
        self, seqs: Sequence[SequenceView], texts: Sequence[Tree], rules: Sequence[ChainRule]
    ) -> Chained | None:
        """All guesses come of one pass."""
        return None

    def _forget(self, seqs: Sequence[SequenceView]) -> None:
        for seq in seqs:
            self._said.pop(seq.id, None)
            if (cached := self._cached.get(seq.id)) is not None:
                cached.text, cached.guesses, cached.branches = self._session.length(cached.cache_row), 0, EMPTY
                cached.where, cached.open = {}, False

    def _close(self, seqs: Sequence[SequenceView]) -> None:
        self._forget(seqs)

    def _limit(self, seq: SequenceView, plan: Plan) -> int:
        return 0 if seq.tree.tokens else min(super()._limit(seq, plan), self._block.guesses)

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
        """A pass over text, and where guesses are asked for, over the block after it; they are known afterwards."""
        if not level:
            self._read_block(seqs, trees, guesses=any(keep), text_lengths=text_lengths)
        said = [
            self._said[seq.id][level].expand(kept, -1) if kept else None for seq, kept in zip(seqs, keep, strict=True)
        ]
        blank = torch.empty(0, 0)
        return [
            Scores(tree, len(tree) - kept, blank if logits is None else logits)
            for tree, kept, logits in zip(trees, keep, said, strict=True)
        ]

    def _read_block(
        self, seqs: Sequence[SequenceView], trees: Sequence[Tree], *, guesses: bool, text_lengths: Sequence[int] | None
    ) -> None:
        block, cache_rows = self._block, [self._cached[seq.id].cache_row for seq in seqs]
        masks = [block.token] * block.masks if guesses else []
        blind = int(guesses and block.reads_itself)  # the last token is one of the block
        texts = [len(tree) - blind for tree in trees]
        inputs = []
        for seq, tree, text in zip(seqs, trees, texts, strict=True):
            known = self._of_text(_Part(seq, tree, 0, text))
            masked = block.feature.expand(blind + len(masks), -1)
            inputs.append(self._head.inputs(tree.tokens + masks, torch.cat([known, masked.to(known)])))
        fed = [Tree.chain(tree.tokens + masks) for tree in trees]
        kept = block.guesses if guesses else 0
        scores = self._session.forward(cache_rows, fed, [kept] * len(fed), embeds=inputs, text_lengths=text_lengths)
        self._session.commit(cache_rows, [list(range(text)) for text in texts])
        if guesses:
            self._said |= {seq.id: one.logits for seq, one in zip(seqs, scores, strict=True)}
