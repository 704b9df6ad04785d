"""Drafts with a head, which reads the target's hidden states of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.core.budget import Budget
from specdec.core.drafts import Commit, Draft, Hidden, SavedState, SequenceView
from specdec.core.work import CHUNKS, Logits, Work
from specdec.models.language_model import LanguageModel
from specdec.models.protocols import Capability
from specdec.proposers.growth import CachedText, Feed
from specdec.proposers.heads.stage import Stage
from specdec.proposers.model import ModelProposer, Reader

_PENDING = 1024  # tokens whose hidden states wait until a guess is wanted; above, they are read without one


class HeadDraft(Draft):
    """Drafts with a head (EAGLE-3, arXiv 2503.01840; multi-token prediction, arXiv 2412.19437).

    The head reads the target's hidden states of `hidden_layers`, and has logits over the target's vocabulary. `model`
    is its stage as a language model, whose inputs are embeddings and features.
    """

    guesses_trees = True
    shared_encoder = reads_media = False

    def __init__(self, stage: Stage, *, backend: str = "auto", source: str = "head") -> None:
        self.hidden_layers, self.source = tuple(stage.reads), source
        capability = Capability("kv", "ids", "dict", stage.kinds, inputs="embeds", records=stage.records)
        # It owns its weights, so that they may be packed.
        self.model = LanguageModel(stage.eval(), backend=backend, owned=True, capability=capability)
        self.models = [self.model]

    def __repr__(self) -> str:
        name, layers = type(self.stage).__name__, self.model.num_layers
        return f"HeadDraft({name}({layers} layer{'s' * (layers > 1)}, {self.model.device}))"

    @property
    def stage(self) -> Any:
        """The stage, with packed weights where its model has packed them."""
        return self.model.model

    def start(self, vocab_size: int) -> HeadProposer:
        return (self.stage.proposer or HeadProposer)(self, vocab_size)

    @torch.no_grad()
    def features(self, states: Tensor) -> Tensor:
        """The features `[tokens, features]` of the target's hidden states `[tokens, layers, width]`."""
        return self.stage.features(states.to(self.model.device, self.stage.dtype))

    def inputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """The stage's inputs for tokens with `features` `[tokens, features]`."""
        embeds = self.stage.embedding(torch.tensor(tokens, device=self.model.device)).to(features)
        return torch.cat([embeds, features], dim=-1)


@dataclass(eq=False, slots=True)
class _Features:
    """The features that the head may read of `seq`: `text` `[tokens, width]`, of its tokens from number `first` on.

    `branches`: one `[width]` for each of the sequence's own branches. `written`: by node (-1: the end of the text), the
    features that the head wrote in this round. `pending`: rounds whose hidden states wait: path, its text, states.
    """

    seq: SequenceView
    first: int
    text: Tensor
    branches: list[Tensor] = field(default_factory=list)
    written: dict[int, Tensor] = field(default_factory=dict)
    pending: list[tuple[list[int], int, Hidden]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of the first token after `text`."""
        return self.first + len(self.text)

    def add(self, features: Tensor, path: list[int], num_text: int, hidden: Hidden) -> None:
        """Stores the `features` of `hidden`: of text read before the path, and of its nodes, as text or branches."""
        fresh = [node for node in path if node >= hidden.num_cached]
        unread = len(features) - len(fresh)
        by_node = dict(zip(fresh, features[unread:], strict=True))
        nodes = [by_node[node] if node in by_node else self.branches[node] for node in path]
        if not self.first <= hidden.first <= self.end:  # read again, or features are missing between
            self.first, self.text = hidden.first, self.text[:0]
        before = self.text[: hidden.first - self.first] if unread else self.text
        self.text = torch.cat([before, features[:unread], *(node[None] for node in nodes[:num_text])])
        self.branches = nodes[num_text:]

    def forget(self, count: int) -> None:
        """Drops the features of the first `count` tokens."""
        if (gone := count - self.first) > 0:
            self.first, self.text = self.first + gone, self.text[gone:]

    def note(self, work: Work, written: Tensor) -> None:
        """Stores what the head wrote at the new nodes of a pass, by their numbers after it."""
        if work.num_text:
            self.written = dict(enumerate(written[work.num_text - 1 :], -1))
        else:
            self.written.update(enumerate(written, work.num_cached))


class HeadProposer(ModelProposer):
    """Drafts like a model whose inputs are embeddings and features.

    Guesses are fed with the head's own features. After every round they are forgotten; accepted ones are fed again with
    the target's features, in the pass that makes the next guess. A token is fed with the feature of the token `shift`
    before it.
    """

    keeps_guesses = False
    shift: ClassVar[int] = 1

    def __init__(self, draft: HeadDraft, vocab_size: int) -> None:
        super().__init__(draft, vocab_size)
        self._head = draft
        self._features: dict[int, _Features] = {}
        self._none = torch.zeros(0, draft.stage.width, dtype=draft.stage.dtype, device=draft.model.device)

    def _readers(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Reader]:
        """As any model's; hidden states of sequences that may have no guess wait."""
        self._take_in([seq for seq, budget in zip(seqs, budgets, strict=True) if budget.limit > 0])
        return super()._readers(seqs, budgets)

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Copies what was read of the other text, except the last token, whose feature is not kept."""
        if not isinstance(source, SavedState):
            self._read_whole(source)
        if (count := super().fork(seq, source, length)) < 2:
            self.drop([seq.id])
            return 0
        self._features[seq.id] = _Features(seq, count - 1, self._none)
        return count - 1

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        self._read_whole(seq.id)
        return super().save(seq, length)

    def update(self, commits: Sequence[Commit]) -> None:
        """Keeps hidden states until a guess is wanted, and reads long texts."""
        for seq, path, num_text, hidden in commits:
            if hidden is None:
                continue
            features = self._features.setdefault(seq.id, _Features(seq, hidden.first, self._none))
            features.pending.append((path, num_text, hidden))
            read = self._cached[seq.id].num_text if seq.id in self._cached else 0
            if hidden.first + len(hidden.by_layer[0]) - read > _PENDING:
                self._read_whole(seq.id)

    def drop(self, seq_ids: Sequence[int]) -> None:
        super().drop(seq_ids)
        for seq_id in seq_ids:
            self._features.pop(seq_id, None)

    def _take_in(self, seqs: Sequence[SequenceView]) -> None:
        """Makes features of the hidden states that wait, and forgets the guesses of these sequences."""
        seqs = [seq for seq in seqs if seq.id in self._features]
        for seq in seqs:
            self._row(seq)
        self._settle(seqs)
        for features in [self._features[seq.id] for seq in seqs]:
            if features.pending:
                states = [hidden.states for _, _, hidden in features.pending]
                rows = torch.split(self._head.features(torch.cat(states)), [len(tokens) for tokens in states])
                for part, (path, num_text, hidden) in zip(rows, features.pending, strict=True):
                    features.add(part, path, num_text, hidden)
                features.pending = []
            # The last token may have to be fed again.
            features.forget(self._cached[features.seq.id].num_text - 2)

    def _read_whole(self, seq_id: int) -> None:
        """Reads a sequence's text as far as its hidden states came in."""
        if (features := self._features.get(seq_id)) is None:
            return
        seq = features.seq
        with self._reset_on_error():
            self._take_in([seq])
            while self._can_read(seq) and self._is_continuous(seq) and self._end(seq) > self._cached[seq_id].num_text:
                self.read([seq], CHUNKS[0])

    def _reusable(self, cached: CachedText) -> int:
        """The branches that were fed with the target's features."""
        return cached.num_own

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        features = self._features.get(seq.id)
        complete = features is not None and seq.id in self._cached and features.end >= len(seq.tokens) - 1
        return super()._limit(seq, budget) if complete and self._is_continuous(seq) else 0

    def _end(self, seq: SequenceView) -> int:
        return min(super()._end(seq), self._features[seq.id].end + self.shift)

    def _run(self, feeds: Sequence[Feed], level: int = 0) -> list[Logits]:
        embeds = self._embeds(feeds, level)
        fed = [replace(feed.work, embeds=inputs) for feed, inputs in zip(feeds, embeds, strict=True)]
        outputs = self._session.run(fed, hidden=True)
        for feed, out in zip(feeds, outputs, strict=True):
            assert out.hidden_states is not None
            self._features[feed.cached.seq.id].note(feed.work, out.hidden_states[0])
        self._keep(feeds, final=not level)
        return outputs

    def _embeds(self, feeds: Sequence[Feed], level: int = 0) -> list[Tensor]:
        """Inputs with features of the target (`level` 0), or with those that the head wrote."""
        read = self._from_head if level else self._from_target
        return [self._head.inputs(feed.work.new_tokens, read(feed)) for feed in feeds]

    def _from_head(self, feed: Feed) -> Tensor:
        """The head's own features `[new nodes, width]` before new nodes."""
        written, work = self._features[feed.cached.seq.id].written, feed.work
        return torch.stack([written[node] for node in work.tree.parents[work.num_cached :]])

    def _from_target(self, feed: Feed) -> Tensor:
        """The target's features `[new nodes, width]` before new text and the sequence's own branches."""
        features, parents = self._features[feed.cached.seq.id], feed.cached.seq.tree.parents
        fresh = sorted(node for node, at in feed.cached.branch_of.items() if at >= feed.work.num_cached)
        before = [features.branches[parents[n]] if parents[n] >= 0 else features.text[-1] for n in fresh]
        return torch.cat([self._text(feed, feed.work.num_text), *(feature[None] for feature in before)])

    def _text(self, feed: Feed, count: int) -> Tensor:
        """The target's features for the next `count` tokens of text; tokens before the first feature get zeros."""
        features, begin = self._features[feed.cached.seq.id], feed.cached.num_text - self.shift
        blank = self._none.new_zeros(min(count, max(-begin, 0)), self._none.shape[1])
        at = begin + len(blank) - features.first
        return torch.cat([blank, features.text[at : at + count - len(blank)]])

    def _is_continuous(self, seq: SequenceView) -> bool:
        """Whether no features are missing between the tokens read so far and the features."""
        return self._features[seq.id].first <= max(self._cached[seq.id].num_text - self.shift, 0)
