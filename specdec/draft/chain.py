"""Chains from a draft model: a cache per row, fed lazily, one pass per guess for all rows together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.draft.cached import PREFILL_CHUNK, CachedSession
from specdec.select.rules import fit
from specdec.types import EMPTY, DraftRule, Plan, Row, Tree

_LOOKBACK = 32


@dataclass(slots=True)
class _Held:
    """What the draft's cache holds for one row, and how much of it was the row's text when last compared.

    `unknown` is set once the text has a token that the draft has no embedding for.
    """

    tokens: list[int] = field(default_factory=list)
    known: int = 0
    unknown: bool = False


@dataclass(slots=True)
class _Chain:
    """The chain that grows for one row in this round."""

    row: Row
    plan: Plan
    limit: int
    slot: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    def draw(self, rule: DraftRule, logits: Tensor) -> bool:
        """Adds one guess from `logits` `[vocab]`; whether the next draft pass pays."""
        token, confidence, q = rule.pick(self.row, self.tokens, logits)
        if math.isnan(confidence):
            return False  # a draft that overflowed has nothing to say
        self.confidence.append(confidence)
        # A token drawn at random must not be dropped after it was seen: that would bend the output's distribution.
        if not rule.needs_q and not self.plan.keep(self.confidence):
            self.confidence.pop()
            return False
        self.tokens.append(token)
        if q is not None:
            self.q.append(q)
        return len(self.tokens) < self.limit and self.plan.go_on([self.confidence])

    def tree(self, source: str) -> Tree:
        q = torch.stack(self.q).float() if self.q else None
        return Tree.chain(self.tokens, self.confidence, q, source)


class ChainSession(CachedSession[_Held]):
    """A draft model at work on the rows of one call, with a chain of guesses for each."""

    def _draft(self, rows: Sequence[Row], plans: Sequence[Plan], limits: Sequence[int]) -> list[Tree]:
        """The chains of rows that have a place in the cache; none where the limit is 0."""
        chains = [
            _Chain(row, plan, limit, self._slots[row.key]) if limit else None
            for row, plan, limit in zip(rows, plans, limits, strict=True)
        ]
        self._grow([chain for chain in chains if chain is not None])
        return [chain.tree(self._source) if chain is not None and chain.tokens else EMPTY for chain in chains]

    def _grow(self, chains: list[_Chain]) -> None:
        """Feeds what the rows' texts are ahead by and draws, until no row goes on."""
        rule = self._call.rule
        self._rewind(chains)
        fed = self._missing(chains)
        while any(len(tokens) > PREFILL_CHUNK for _, tokens in fed):
            self._feed([(chain, tokens[:-1][:PREFILL_CHUNK]) for chain, tokens in fed if len(tokens) > 1], final=True)
            fed = self._missing(chains)
        final = True
        while fed:
            logits = self._feed(fed, final=final)
            going = [chain for (chain, _), last in zip(fed, logits, strict=True) if chain.draw(rule, last)]
            fed = [(chain, chain.tokens[-1:]) for chain in going if self._goes_on(chain.tokens[-1])]
            final = False

    def _rewind(self, chains: list[_Chain]) -> None:
        """Takes the cache back to where it agrees with the rows' texts, at least one token before their end."""
        assert self._session is not None
        lengths = [len(held.tokens) for held in self._held]
        for chain in chains:
            lengths[chain.slot] = _agreement(self._held[chain.slot], chain.row.tokens)
        if any(length < len(held.tokens) for length, held in zip(lengths, self._held, strict=True)):
            self._session.truncate(lengths)
        self._session.refresh()
        for held, length in zip(self._held, self._session.lengths, strict=True):
            if length < len(held.tokens):
                del held.tokens[length:]
        for chain in chains:
            self._held[chain.slot].known = len(chain.row.tokens)

    def _missing(self, chains: list[_Chain]) -> list[tuple[_Chain, list[int]]]:
        """The text that the cache lacks, of every row that the draft can read."""
        missing = [(chain, chain.row.tokens[len(self._held[chain.slot].tokens) :]) for chain in chains]
        return [(chain, tokens) for chain, tokens in missing if self._readable(chain.slot, tokens)]

    def _readable(self, slot: int, tokens: list[int]) -> bool:
        """Whether the draft has embeddings for `tokens`; a row whose text left its vocabulary is out for good."""
        held = self._held[slot]
        held.unknown = held.unknown or max(tokens) >= self._model.vocab_size
        return not held.unknown

    def _feed(self, pieces: Sequence[tuple[_Chain, list[int]]], *, final: bool) -> list[Tensor]:
        """One pass over `pieces`; the logits `[vocab of the target]` after each, and the cache holds them."""
        assert self._session is not None
        trees, keep = [EMPTY] * len(self._held), [0] * len(self._held)
        paths: list[list[int]] = [[] for _ in self._held]
        for chain, tokens in pieces:
            trees[chain.slot], keep[chain.slot] = Tree.chain(tokens), 1
            paths[chain.slot] = list(range(len(tokens)))
        scores = self._session.forward(trees, keep)
        self._session.commit(paths, final=final)
        for chain, tokens in pieces:
            self._held[chain.slot].tokens += tokens
        return [fit(scores[chain.slot].logits[-1], self._call.vocab_size) for chain, _ in pieces]

    def _new_held(self, tokens: list[int]) -> _Held:
        return _Held(tokens, len(tokens))


def _agreement(held: _Held, text: list[int]) -> int:
    """How many held tokens are the row's text; at least the text's last token is left out, to be fed for its logits.

    Text once seen rarely changes, and if so at its end (a bridge between tokenizers), so only that much is compared.
    """
    end = min(len(held.tokens), len(text) - 1)
    same = min(held.known, end)
    recent = max(same - _LOOKBACK, 0)
    if held.tokens[recent:same] != text[recent:same]:
        same = 0
    while same < end and held.tokens[same] == text[same]:
        same += 1
    return same
