"""A draft that is a language model: chains for texts, trees for texts and searches, from one cache per sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

from specdec.core.budget import Budget, pays
from specdec.core.drafts import Draft, Proposer, SavedState, SequenceView, path_limit
from specdec.core.tree import EMPTY, Tree
from specdec.core.work import Logits, Work
from specdec.decoding.samplers import fit
from specdec.models import prefix_bytes
from specdec.proposers.growth import CachedText, ChainGrowth, Feed, Growth, TreeGrowth

if TYPE_CHECKING:
    from specdec.core.work import Pictures
    from specdec.models import Encoding, LanguageModel, Session


Reader = tuple[SequenceView, Budget, int]
"""A sequence to guess for, its budget, and the length of its longest path."""


class ModelDraft(Draft):
    """Drafts with a smaller language model (Leviathan et al., arXiv 2211.17192, section 2.1).

    An encoder-decoder draft with `shared_encoder` reads the target's encoder output; without, it encodes the inputs of
    the sequence's task itself. A decoder-only draft reads the decoder's tokens alone; one that `reads_media` also reads
    the task's pictures.
    """

    guesses_trees = True

    def __init__(
        self, model: LanguageModel, *, source: str = "model", shared_encoder: bool = False, reads_media: bool = False
    ) -> None:
        self.model, self.models, self.source = model, (model,), source
        self.shared_encoder, self.reads_media = shared_encoder, reads_media
        self.needs_encoder_inputs = model.is_encoder_decoder and not shared_encoder

    def __repr__(self) -> str:
        return f"ModelDraft({self.model!r})"

    def start(self, vocab_size: int) -> Proposer:
        return ModelProposer(self, vocab_size)


class GrowingProposer(Proposer):
    """Drafts over the rows of `_session`, with one pass per level over all sequences that still grow."""

    _session: Session

    def __init__(self, draft: Any, vocab_size: int) -> None:
        self._model, self._source, self._vocab_size = draft.model, draft.source, vocab_size

    @abstractmethod
    def _row(self, seq: SequenceView) -> CachedText:
        """What the session holds of a sequence."""

    def _readers(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Reader]:
        """The sequences to guess for, their budgets and limits."""
        limits = [self._limit(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        gains = [budget.gain([[]]) if limit > 0 else 0.0 for budget, limit in zip(budgets, limits, strict=True)]
        if not pays(budgets, gains):
            return []
        readers = zip(seqs, budgets, limits, strict=True)
        return [reader for reader, gain in zip(readers, gains, strict=True) if gain > 0]

    def _limit(self, seq: SequenceView, budget: Budget) -> int:
        """The longest chain worth drafting: the target adds one token itself, and the draft's positions may run out."""
        limit = path_limit(seq, budget) if seq.tokens else 0
        if self._model.max_positions is not None:
            limit = min(limit, self._model.max_positions - len(seq.tokens) - seq.tree.depth + 1)
        return limit

    def _trees(self, seqs: Sequence[SequenceView], readers: Sequence[Reader]) -> list[Tree]:
        """One tree per sequence, without nodes for those that are no readers."""
        growths = {seq.id: self._growth(seq, budget, limit) for seq, budget, limit in readers}
        self._grow(list(growths.values()))
        nothing = Tree([], [], source=self._source)
        return [growths[seq.id].proposal(self._source) if seq.id in growths else nothing for seq in seqs]

    def _run(self, feeds: Sequence[Feed], level: int = 0) -> list[Logits]:
        """One pass over text and branches (`level` 0), or guesses of this round; all nodes stay in the cache."""
        outputs = self._session.run([feed.work for feed in feeds])
        self._keep(feeds, final=not level)
        return outputs

    def _keep(self, feeds: Sequence[Feed], *, final: bool) -> None:
        """Keeps all nodes of a pass in the cache; guesses of this round are not `final`."""
        works = [feed.work for feed in feeds]
        paths = [list(range(len(work.tree.tokens))) for work in works]
        self._session.commit([w.row for w in works], paths, num_texts=[w.num_text for w in works], final=final)

    def _growth(self, seq: SequenceView, budget: Budget, limit: int) -> Growth:
        cached, usual, readable = self._row(seq), seq.task.sampler.branches, self._model.num_ids
        if not usual or ((budget.branches or usual) == 1 and not seq.tree.tokens):
            return ChainGrowth(budget, limit, cached, readable)
        can_read = max(seq.tree.tokens, default=0) < readable
        return TreeGrowth(budget, limit if can_read else 0, cached, readable)

    def _grow_in_one_call(self, works: Sequence[tuple[Growth, Work]]) -> bool:
        """Drafts whole chains in one call if the model and all rules allow it; returns whether it did."""
        chains = [(growth, work) for growth, work in works if isinstance(growth, ChainGrowth)]
        rules = [rule for growth, _ in chains if (rule := growth.rule(self._vocab_size)) is not None]
        if not works or len(rules) < len(works):
            return False
        rows, tokens = [work.row for _, work in chains], [work.new_tokens for _, work in chains]
        embeds = self._embeds([Feed(growth.cached, work) for growth, work in chains])
        chained = self._session.draft_chain(rows, tokens, rules, embeds)
        if chained is None:
            return False
        for (growth, work), guesses, q, siblings in zip(chains, *chained, strict=True):
            growth.take_all(work, guesses, None if q is None else pad(q, (0, self._vocab_size - q.shape[-1])), siblings)
        return True

    def _embeds(self, feeds: Sequence[Feed]) -> list[Tensor] | None:
        """Inputs `[new nodes, width]` in place of ids; None for a model that reads ids."""
        return None

    def _grow(self, growths: Sequence[Growth]) -> None:
        """Feeds the missing text and branches, then one level of guesses after the other."""
        works = [(growth, work) for growth in growths if (work := growth.first()) is not None]
        if self._session.draft_chains and self._grow_in_one_call(works):
            return
        level = 0
        while works:
            outputs = self._run([Feed(growth.cached, work) for growth, work in works], level)
            works = [
                (growth, following)
                for (growth, work), out in zip(works, outputs, strict=True)
                if (following := growth.take(work, fit(out.logits.cpu(), self._vocab_size))) is not None
            ]
            if not pays([growth.budget for growth, _ in works], [growth.gain for growth, _ in works]):
                return
            level += 1


class ModelProposer(GrowingProposer):
    """Reads texts into a cache of its own.

    A round begins by comparing the cache with the texts. `keeps_guesses`: guesses that became text stay in it. False:
    they are fed again, with the target's hidden states.
    """

    keeps_guesses = True

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size)
        self._session = self._model.session()
        self._shared_encoder, self._reads_media = draft.shared_encoder, draft.reads_media
        self._cached: dict[int, CachedText] = {}
        self._chosen: dict[int, Reader] | None = None  # for this round
        # by id(inputs); the inputs are kept alive, so that the id stays theirs
        self._encoded: dict[int, tuple[object, Encoding]] = {}

    def propose(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Tree]:
        """One tree per sequence; what is unread of a text is read in the pass that makes the first guess."""
        with self._reset_on_error():
            chosen, self._chosen = self._chosen, None
            if chosen is None:
                readers = self._readers(seqs, budgets)
            else:
                readers = [chosen[seq.id] for seq in seqs if seq.id in chosen]
            if unseen := [seq for seq, _, _ in readers if self._unseen(seq) is not None]:
                self.read(unseen, 1)
            return self._trees(seqs, readers)

    def begin_round(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> Collection[int]:
        """The ids of those whose budgets a draft pass pays, and whose texts the draft has embeddings for."""
        with self._reset_on_error():
            self._chosen = {reader[0].id: reader for reader in self._readers(seqs, budgets)}
        return self._chosen

    def unread(self, seq: SequenceView) -> int:
        cached = self._cached.get(seq.id)
        return len(seq.tokens) - (0 if cached is None else cached.num_text)

    def read(self, seqs: Sequence[SequenceView], most: int) -> None:
        """Pictures are read with the whole prompt up to the last of them."""
        with self._reset_on_error():
            feeds = []
            for seq in seqs:
                cached, pictures = self._row(seq), self._unseen(seq)
                end = min(cached.num_text + most, self._end(seq)) if pictures is None else pictures.length
                piece, length = seq.tokens[cached.num_text : end], len(seq.tokens)
                work = Work(cached.cache_row, Tree.chain(piece), 0, len(piece), text_length=length, pictures=pictures)
                feeds.append(Feed(cached, work))
            self._run(feeds)
            for feed in feeds:
                feed.cached.num_text += feed.work.num_text

    def fork(self, seq: SequenceView, source: int | SavedState, length: int) -> int:
        """Copies keys and values, pictures of the prompt all or none."""
        pictures = seq.task.pictures if self._reads_media else None
        with self._reset_on_error():
            if isinstance(source, SavedState):
                count = min(length, source.length)
            else:
                count = min(length, self._cached[source].num_text) if source in self._cached else 0
            if count < 1 or (pictures is not None and count < pictures.length):
                return 0
            if isinstance(source, SavedState):
                cache_row = self._session.read_from(source.state, count, 0 if pictures is None else pictures.shift)
            else:
                cache_row = self._session.fork(self._cached[source].cache_row, count)
            if (shorter := self._cached.get(seq.id)) is not None:
                self._session.remove([shorter.cache_row])
            self._cached[seq.id] = CachedText(cache_row, seq, seq.tokens, count)
        return count

    def save(self, seq: SequenceView, length: int) -> SavedState | None:
        """None for models whose keys and values depend on the length of the text, or cannot be copied."""
        stays = self._session.keeps_prefixes and self._model.capability.boundary is None
        if not stays or seq.id not in self._cached:
            return None
        with self._reset_on_error():
            self._settle([seq])
            count = min(length, self._cached[seq.id].num_text)
            if not count:
                return None
            prefix = self._session.keep_prefix(self._cached[seq.id].cache_row, count)
        return SavedState(count, prefix, prefix_bytes(prefix))

    @contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """An exception in it leaves an empty cache instead of half a round: the next round reads the texts again."""
        try:
            yield
        except BaseException:
            self._session, self._cached = self._model.session(), {}
            raise

    def _readers(self, seqs: Sequence[SequenceView], budgets: Sequence[Budget]) -> list[Reader]:
        """As of any draft; guesses that were rejected are forgotten."""
        readers = super()._readers(seqs, budgets)
        self._settle([seq for seq, _, _ in readers])
        return [reader for reader in readers if self._can_read(reader[0])]

    def drop(self, seq_ids: Sequence[int]) -> None:
        gone = [cached.cache_row for seq_id in seq_ids if (cached := self._cached.pop(seq_id, None)) is not None]
        if gone:
            self._session.remove(gone)
        used = {id(cached.seq.task.inputs) for cached in self._cached.values()}
        self._encoded = {key: value for key, value in self._encoded.items() if key in used}

    def bound(self, rows: int, columns: int) -> None:
        self._session.bound(rows, columns)

    def _settle(self, seqs: Sequence[SequenceView]) -> None:
        """Takes back what these sequences do not have; what they have of guesses and branches stays.

        Texts whose rotary scaling changes with their length are forgotten: they are read again.
        """
        cut: list[CachedText] = []
        for seq in seqs:
            if (cached := self._cached.get(seq.id)) is None:
                continue
            cached.seq = seq
            if cached.forget_rejected(keeps_guesses=self.keeps_guesses):
                cut.append(cached)
            elif cached.branches.tokens:
                path, num_text = cached.settle(self._reusable(cached))
                self._session.commit([cached.cache_row], [path], num_texts=[num_text])
        if cut:
            self._session.truncate([cached.cache_row for cached in cut], [cached.num_text for cached in cut])
        if self._session.cache_reset_length is not None:
            for cached in [self._cached[seq.id] for seq in seqs if seq.id in self._cached]:
                self._session.refresh([cached.cache_row])
                if (length := self._session.length(cached.cache_row)) < cached.num_text:
                    cached.num_text, cached.branches, cached.branch_of = length, EMPTY, {}

    def _reusable(self, cached: CachedText) -> int:
        """How many of the cached branches may stay."""
        return len(cached.branches)

    def _can_read(self, seq: SequenceView) -> bool:
        """Whether the draft has embeddings for what it has not read of the text."""
        cached = self._cached.get(seq.id)
        return max(seq.tokens[0 if cached is None else cached.num_text :], default=0) < self._model.num_ids

    def _unseen(self, seq: SequenceView) -> Pictures | None:
        """The sequence's pictures, if the draft sees and has not read them."""
        cached = self._cached.get(seq.id)
        return seq.task.pictures if self._reads_media and (cached is None or not cached.num_text) else None

    def _row(self, seq: SequenceView) -> CachedText:
        """What the cache holds of a sequence; a new one gets an empty row."""
        if (cached := self._cached.get(seq.id)) is None:
            encoding = self._encoding(seq) if self._model.is_encoder_decoder else None
            cached = self._cached[seq.id] = CachedText(self._session.add(encoding), seq, seq.tokens)
        return cached

    def _end(self, seq: SequenceView) -> int:
        """How many tokens of the text may be read; the last one is fed with the first guess."""
        return len(seq.tokens) - 1

    def _encoding(self, seq: SequenceView) -> Encoding | None:
        """The output of the draft's encoder, or of the target's."""
        if self._shared_encoder:
            return seq.encoding  # type: ignore[return-value]
        inputs = seq.task.inputs
        assert inputs is not None  # the call was checked
        if id(inputs) not in self._encoded:
            self._encoded[id(inputs)] = (inputs, self._model.encode(inputs))
        return self._encoded[id(inputs)][1].select([seq.task.encoder_row])
