"""Drafts with a head, which reads the target's hidden states of the text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Draft, Hidden, SavedState, SequenceView
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import CHUNK, Logits, Work
from specdec.decoding.samplers import fit
from specdec.models import prefix_bytes
from specdec.models.capability import Capability
from specdec.models.language_model import LanguageModel
from specdec.proposers.growth import CachedText, Feed, Growth
from specdec.proposers.heads.stage import Block, Stage, Stages
from specdec.proposers.model import ModelProposer

_UNREAD = 64  # tokens whose features are known; above, they are read in a pass of their own
_UNHEARD = 1024  # tokens whose hidden states are kept until a guess is wanted; above, they are read without one


class HeadDraft(Draft):
    """Drafts with a head (EAGLE-3, arXiv 2503.01840; multi-token prediction, arXiv 2412.19437).

    The head reads the target's hidden states of `hidden_layers`, and has logits over the target's vocabulary. `models`
    are its stages as language models. With a `block` it guesses several tokens in one pass. For its proposer it is a
    model, whose inputs are embeddings and features.
    """

    guesses_trees = True
    is_encoder_decoder = False
    max_positions = None

    def __init__(
        self,
        stages: Sequence[Stage],
        hidden_layers: Sequence[int],
        *,
        backend: str = "auto",
        block: Block | None = None,
        source: str = "head",
    ) -> None:
        self.hidden_layers, self.block, self.source = tuple(hidden_layers), block, source
        self.models: list[LanguageModel] = []
        for stage in stages:  # each owns its weights, so that they may be packed
            capability = Capability("kv", "ids", "dict", stage.kinds, inputs="embeds")
            own = "packed" if backend == "compiled" and not stage.compiles else backend
            language = LanguageModel(stage.eval(), backend=own, owned=True, capability=capability)
            if language.ragged is not None and not stage.compiles:
                language.ragged.compiled = None
            self.models.append(language)
        self.vocab_size, self.device = self.models[0].vocab_size, self.models[0].device
        self.num_ids = self.models[0].num_ids
        self.embedding, self.dtype = stages[0].embedding, stages[0].dtype
        self.feature_width = stages[0].width

    def __repr__(self) -> str:
        stage = self.models[0]
        return (
            f"HeadDraft({type(stage.model).__name__}({len(self.models)} × {stage.num_layers} layers, {stage.device}))"
        )

    def start(self, vocab_size: int) -> HeadProposer:
        kind = HeadProposer if self.block is None else BlockProposer
        return kind(self, vocab_size)

    @torch.no_grad()
    def features(self, states: Tensor) -> Tensor:
        """The first stage's features `[tokens, features]` of hidden states `[tokens, layers, width]`."""
        return self.models[0].model.features(states.to(self.device, self.dtype))

    def inputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """The inputs of a stage for tokens with `features` `[tokens, features]`."""
        embeds = self.embedding(torch.tensor(tokens, device=self.device)).to(features)
        return torch.cat([embeds, features], dim=-1)

    def session(self) -> Stages:
        """A new session without rows."""
        return Stages([stage.session() for stage in self.models])


@dataclass(eq=False, slots=True)
class _KnownText:
    """What the head may read of `seq`: features `states`, each `[width]`, of its tokens from number `first` on.

    `unheard`: rounds that are not among them yet. `branches`: the features of the sequence's own branches. `written`:
    by stage and node (-1: the end of the text), the features that stages wrote in this round. `texts`: by stage, except
    the last, the features that it wrote at the tokens of the text, for the next stage.
    """

    seq: SequenceView
    first: int
    states: list[Tensor] = field(default_factory=list)
    unheard: list[tuple[list[int], int, Hidden]] = field(default_factory=list)
    branches: list[Tensor] = field(default_factory=list)
    written: list[dict[int, Tensor]] = field(default_factory=list)
    texts: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def end(self) -> int:
        """The number of the first token after `states`."""
        return self.first + len(self.states)

    def add(self, features: Tensor, path: list[int], num_text: int, hidden: Hidden) -> None:
        """Stores the `features` of `hidden`: of text read before the path, and of its nodes, as text or branches."""
        fresh = [node for node in path if node >= hidden.num_cached]
        unread = len(features) - len(fresh)
        rows = list(features)
        of = dict(zip(fresh, rows[unread:], strict=True))
        kept = [of[node] if node in of else self.branches[node] for node in path]
        if not self.first <= hidden.first <= self.end:  # read again, or features are missing between
            self.first, self.states = hidden.first, []
        if unread:
            self.states[hidden.first - self.first :] = rows[:unread]
        self.states += kept[:num_text]
        self.branches = kept[num_text:]

    def forget(self, count: int) -> None:
        """Drops the features of the first `count` tokens."""
        if (gone := count - self.first) > 0:
            self.first += gone
            del self.states[:gone]


def _copied(texts: Mapping[int, list[Tensor]], count: int) -> defaultdict[int, list[Tensor]]:
    """Copies of the features that stages wrote at the first `count` tokens."""
    return defaultdict(list, {stage: [*torch.stack(states[:count])] for stage, states in texts.items() if states})


class HeadProposer(ModelProposer):
    """Drafts like a model whose inputs are embeddings and features.

    Guesses are fed with the head's own features. After every round they are forgotten; accepted ones are fed again with
    the target's features, in the pass that makes the next guess.
    """

    keeps_guesses = False
    _session: Stages

    def __init__(self, draft: HeadDraft, vocab_size: int) -> None:
        super().__init__(draft, vocab_size, draft.source)
        self._head, block = draft, draft.block
        # A token is fed with the feature of the token this far before it.
        self._shift = 0 if block is not None and block.reads_itself else 1
        self._known: dict[int, _KnownText] = {}
        self._blank = torch.zeros(draft.feature_width, dtype=draft.dtype, device=draft.device)

    def _readers(
        self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]
    ) -> list[tuple[SequenceView, Budget, int]]:
        """As any model's; of a sequence that may have no guess, it reads nothing."""
        self._catch_up([seq for seq, budget in zip(seqs, budgets, strict=True) if budget.limit > 0])
        return super()._readers(seqs, budgets)

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Copies what was read of the other text, except the last token, whose feature is not kept."""
        with self._kept_whole():
            count = min(length, source.length if isinstance(source, SavedState) else self._num_read(source))
            if count < 2:
                return 0
            if isinstance(source, SavedState):
                prefix, texts = source.state
                cache_row = self._session.read_from(prefix, count)
            else:
                texts, cache_row = self._known[source].texts, self._session.fork(self._cached[source].cache_row, count)
        self._cached[seq.id] = CachedText(cache_row, seq, seq.tokens, count)
        self._known[seq.id] = _KnownText(seq, count - 1, texts=_copied(texts, count))
        return count - 1

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        with self._kept_whole():
            count = min(length, self._num_read(seq.id))
        if count < 2:
            return None
        prefix = self._session.keep_prefix(self._cached[seq.id].cache_row, count)
        texts = _copied(self._known[seq.id].texts, count)
        features = sum(one.nbytes for states in texts.values() for one in states)
        return SavedState(count, (prefix, texts), prefix_bytes(prefix) + features)

    def update(self, commits: Sequence[Commit]) -> None:
        """Keeps hidden states until a guess is wanted, and reads those of long texts."""
        long = []
        for seq, path, num_text, hidden in commits:
            if hidden is None:
                continue
            known = self._known.setdefault(seq.id, _KnownText(seq, hidden.first))
            known.unheard.append((path, num_text, hidden))
            if hidden.first + len(hidden.by_layer[0]) - known.unheard[0][2].first > _UNHEARD:
                long.append(seq)
        if long:
            with self._kept_whole():
                self._catch_up(long)

    def drop(self, seq_ids: Sequence[int]) -> None:
        super().drop(seq_ids)
        for seq_id in seq_ids:
            self._known.pop(seq_id, None)

    def _catch_up(self, seqs: Sequence[SequenceView]) -> None:
        """Takes in the features of these sequences' texts and forgets guesses; much text is read at once."""
        seqs = [seq for seq in seqs if seq.id in self._known]
        for seq in seqs:
            self._row(seq)
        for known in [self._known[seq.id] for seq in seqs]:
            if known.unheard:
                states = [hidden.states for _, _, hidden in known.unheard]
                features = torch.split(self._head.features(torch.cat(states)), [len(one) for one in states])
                for own, (path, num_text, hidden) in zip(features, known.unheard, strict=True):
                    known.add(own, path, num_text, hidden)
                known.unheard = []
        self._settle(seqs)
        self._read_known([seq for seq in seqs if self._known[seq.id].end - self._cached[seq.id].num_text > _UNREAD])
        for seq in seqs:
            self._known[seq.id].forget(self._cached[seq.id].num_text - 2)  # the last token may have to be fed again

    def _num_read(self, seq_id: int) -> int:
        """Reads all that is known of a sequence's text; returns how many tokens the cache then holds."""
        if (known := self._known.get(seq_id)) is None:
            return 0
        self._catch_up([known.seq])
        cached = self._cached[seq_id]
        if not self._can_read(known.seq):
            return 0
        self._read_known([known.seq])
        return cached.num_text

    def _read_known(self, seqs: Sequence[SequenceView]) -> None:
        """Reads the texts of these sequences as far as their features are known."""
        seqs = [seq for seq in seqs if self._is_continuous(seq)]
        while behind := [seq for seq in seqs if self._end(seq) > self._cached[seq.id].num_text]:
            self.read(behind, CHUNK)

    def _settle(self, seqs: Sequence[SequenceView]) -> None:
        self._session.first = 0
        super()._settle(seqs)

    def _reusable(self, cached: CachedText) -> int:
        """Those that were fed with the target's features, unless later stages need more of them."""
        return cached.num_own if len(self._session.stages) == 1 else 0

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        known = self._known.get(seq.id)
        complete = known is not None and seq.id in self._cached and known.end >= len(seq.tokens) - 1
        return super()._limit(seq, budget) if complete and self._is_continuous(seq) else 0

    def _end(self, seq: SequenceView) -> int:
        return min(super()._end(seq), self._known[seq.id].end + self._shift)

    def _run(self, feeds: Sequence[Feed], level: int = 0) -> list[Logits]:
        """A pass of every stage that later guesses read; returns the output of the first of them."""
        session, works = self._session, [feed.work for feed in feeds]
        session.first = min(level, len(session.stages) - 1)
        if not level:
            for feed in feeds:
                self._known[feed.cached.seq.id].written = [{} for _ in session.stages]
        outputs: list[Logits] = []
        for stage in range(session.first, len(session.stages)):
            source = stage if level > stage else stage - 1  # the last stage reads its own features
            embeds = self._embeds(feeds, source)
            fed = [replace(work, embeds=one) for work, one in zip(works, embeds, strict=True)]
            found = session.stages[stage].run(fed, hidden=True)
            if not outputs:
                outputs, works = found, [replace(work, num_logits=0) for work in works]
            for (cached, work), out in zip(feeds, found, strict=True):
                assert out.hidden_states is not None
                first = work.num_cached
                if stage == len(session.stages) - 1:  # nodes that others may follow
                    first = max(first, work.num_text - 1)
                states = out.hidden_states[0][first - work.num_cached :]
                self._known[cached.seq.id].written[stage].update(zip(range(first, len(work.tree)), states, strict=True))
        self._keep(feeds, final=not level)
        for feed in feeds:
            self._renumber(feed, guessed=level > 0)
        return outputs

    def _embeds(self, feeds: Sequence[Feed], source: int = -1) -> list[Tensor]:
        return [self._head.inputs(feed.work.new_tokens, self._features(feed, source)) for feed in feeds]

    def _features(self, feed: Feed, source: int) -> Tensor:
        """The features `[new nodes, width]` that stage `source` (-1: the target) wrote before new nodes."""
        known = self._known[feed.cached.seq.id]
        if source < 0:
            parents, where = feed.cached.seq.tree.parents, feed.cached.branch_of
            fresh = sorted(node for node, at in where.items() if at >= feed.work.num_cached)
            branches = [(known.branches[parents[n]] if parents[n] >= 0 else known.states[-1])[None] for n in fresh]
            return torch.cat([self._text_features(feed, feed.work.num_text), *branches])
        written, blank = known.written[source], self._blank
        before = feed.work.tree.parents[feed.work.num_cached :]
        texts, length = known.texts[source], feed.cached.num_text
        end = texts[length - 1] if 0 < length <= len(texts) else blank
        return torch.stack([written.get(node, end if node < 0 else blank) for node in before])

    def _text_features(self, feed: Feed, count: int) -> Tensor:
        """The target's features for the next `count` tokens of text; the first token of a text gets zeros."""
        known, begin = self._known[feed.cached.seq.id], feed.cached.num_text
        first = [self._blank] * (count > 0 and begin < self._shift)
        at = begin - self._shift + len(first) - known.first
        rows = [*first, *known.states[at : at + count - len(first)]]
        return torch.stack(rows) if rows else self._blank.new_empty(0, len(self._blank))

    def _renumber(self, feed: Feed, *, guessed: bool) -> None:
        """Renumbers `written` as text nodes leave the tree, and stores it in `texts` unless it is `guessed`."""
        if not feed.work.num_text:
            return
        known, begin = self._known[feed.cached.seq.id], feed.cached.num_text
        for stage, written in enumerate(known.written[:-1] if not guessed else ()):
            known.texts[stage][begin:] = [written[node] for node in range(feed.work.num_text)]
        known.written = [
            {node - feed.work.num_text: one for node, one in written.items() if node >= feed.work.num_text - 1}
            for written in known.written
        ]

    def _is_continuous(self, seq: SequenceView) -> bool:
        """Whether no features are missing between the tokens read so far and those known."""
        return self._known[seq.id].first <= max(self._cached[seq.id].num_text - self._shift, 0)


class BlockProposer(HeadProposer):
    """Drafts with a head that makes all guesses of a round in one pass (`Block`), independently of each other.

    It proposes nothing for the branches of a search.
    """

    @property
    def _block(self) -> Block:
        assert self._head.block is not None
        return self._head.block

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        return 0 if seq.tree.tokens else min(super()._limit(seq, budget), self._block.guesses)

    def _grow(self, growths: Sequence[Growth]) -> None:
        """One pass over missing text and blocks, whose logits are the levels; the cache holds no guesses."""
        works = [(growth, work) for growth in growths if (work := growth.first()) is not None]
        passed = self._run([Feed(growth.cached, work) for growth, work in works]) if works else []
        for (growth, work), out in zip(works, passed, strict=True):
            level: Work | None = work
            for logits in fit(out.logits, self._vocab_size):
                level = level and growth.take(level, logits.expand(level.num_logits, -1))
            growth.cached.num_text, growth.cached.guesses = self._session.length(growth.cached.cache_row), []
            growth.cached.branches = EMPTY

    def _run(self, feeds: Sequence[Feed], level: int = 0) -> list[Logits]:
        """A pass over text and, if logits are wanted, the block; returns those of the block `[guesses, vocab]`."""
        block = self._block
        guesses = block.guesses if any(feed.work.num_logits for feed in feeds) else 0
        masks = [block.token] * block.masks if guesses else []
        blind = int(guesses > 0 and block.reads_itself)  # the last token is one of the block
        fed = []
        for feed in feeds:
            tokens = feed.work.new_tokens
            known = self._text_features(feed, len(tokens) - blind)
            masked = block.feature.expand(blind + len(masks), -1)
            embeds = self._head.inputs(tokens + masks, torch.cat([known, masked.to(known)]))
            fed.append(replace(feed.work, tree=Tree.chain(tokens + masks), num_logits=guesses, embeds=embeds))
        outputs = self._session.run(fed)
        rows = [feed.work.row for feed in feeds]
        self._session.commit(rows, [list(range(feed.work.num_text - blind)) for feed in feeds])
        return outputs
