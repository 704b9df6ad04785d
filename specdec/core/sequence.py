"""What the engine runs: a text that grows token by token, or a search over branches of one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.drafts import DraftTask
from specdec.core.strategies import Trace, View
from specdec.core.tree import EMPTY, Step, Tree
from specdec.core.work import VOID_COLUMNS, Pictures, Work


class Context(NamedTuple):
    """What keys and values depend on besides the tokens: sequences share them only where their contexts are equal.

    `epoch` of the target; `call`: the number of the call within which alone they are shared, None without this limit;
    `salt`: the caller's; `inputs`: digest of embeddings or encoder inputs. `exactness` of the call, since torch's
    settings of precision change it without a change of the model.
    """

    epoch: int
    call: int | None = None
    salt: str = ""
    inputs: bytes = b""
    exactness: str = ""


@dataclass(eq=False, kw_only=True)
class RunningSequence:
    """One text, or a search: the text that all its branches share, and the `tree` of branches that grows from it.

    In every round it gives the target its `works`, and the `Outcome` changes it. `strategy` decides its tokens, with
    `state`; a search returns `returned` texts, and keeps the states of all steps where `history` is a list. `id`: the
    engine's number of the sequence; `cache_row`: its row of the target's cache while it runs. `task`: the draft's
    instructions. `unconditional`: the same sequence without its condition (guidance); it gets the same tokens. `embeds`
    `[length, width]` replace the prompt's tokens; where their ids are unknown, `tokens` starts empty and
    `num_embeds_only` counts them, and columns of pictures before the text. `pictures` are read with the prompt.
    `context`: None where keys and values are never shared; while it runs, sequences with an equal `sharing_key` share
    what was read, sequences without one share nothing. `encoding`: the encoder's output. The target's cache holds
    the first `num_cached` nodes of `tree`, cached nodes first; `views`: the target's output at nodes that an earlier
    pass computed. `cached_prompt_tokens` were not read for it, but for an earlier or another one.
    `cache_reset_length`: the length of text beyond which the target must read all of it again.
    """

    tokens: list[int]
    max_length: int
    task: DraftTask
    strategy: Any = None  # a `Strategy`; None of unconditional sequences
    returned: int = 1
    history: list[Any] | None = None
    encoder_tokens: list[int] | None = None
    prediction: list[int] | None = None
    embeds: Tensor | None = None
    pictures: Pictures | None = None
    unconditional: RunningSequence | None = None
    id: int = -1
    cache_row: Any = None  # an int while it has a row
    context: Context | None = None
    sharing_key: Hashable = None
    encoding: Any = None
    prompt_length: int = field(init=False)
    tree: Tree = EMPTY
    num_cached: int = 0
    leaves: Sequence[int] = (-1,)
    views: dict[int, View] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    finish: str | None = None
    prefilled: bool = False
    cached_prompt_tokens: int = 0
    cache_reset_length: int | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self._written = len(self.tokens)
        self.num_embeds_only = 0 if self.embeds is None else len(self.embeds) - self.prompt_length
        self.num_embeds_only += 0 if self.pictures is None else self.pictures.before
        self._ids = torch.tensor(self.tokens, dtype=torch.long)
        self.state: Any = None if self.strategy is None else self.strategy.begin()
        self.is_search: bool = self.strategy is not None and self.strategy.is_search
        # what the target runs for it: itself, and its unconditional sequence if it has one
        self.batch_seqs = (self,) if self.unconditional is None else (self, self.unconditional)

    @property
    def remaining(self) -> int:
        """How many tokens may follow a leaf, to the length limit, and at most one beyond the cache's reset length."""
        length = self.prompt_length + self.state.length if self.is_search else len(self.tokens)
        room = self.max_length - length
        for seq in self.batch_seqs:
            if seq.cache_reset_length is not None:
                until_reset = seq.cache_reset_length - (length + seq.length - len(self.tokens))
                room = min(room, until_reset + 1) if until_reset >= 0 else room
        return room

    @property
    def leaf_scores(self) -> Sequence[float]:
        """One score per leaf."""
        return self.state.leaf_scores if self.is_search else (0.0,)

    @property
    def width(self) -> int:
        """How many rows it has in outputs: the number of beams."""
        return 1 if self.strategy is None else int(self.strategy.num_beams)

    @property
    def most_positions(self) -> int:
        """The most columns of a cache that its longer row needs, proposals not counted: no branches share a token."""
        prompt = max(seq.num_embeds_only + seq.prompt_length for seq in self.batch_seqs)
        new = self.width * (self.max_length - self.prompt_length)
        return prompt + new + (VOID_COLUMNS if self.is_search else 0)

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of the sequence's texts; for a search, of the best `returned` hypotheses, best first."""
        if not self.is_search:
            return [self.tokens[self.prompt_length :]]
        return [list(hypothesis.tokens) for hypothesis in self.state.finished[: self.returned]]

    @property
    def length(self) -> int:
        """Positions of its text, embeddings without ids included."""
        return self.num_embeds_only + len(self.tokens)

    @property
    def text_ids(self) -> list[int]:
        """The ids of all positions; 0 where only an embedding is known."""
        return [0] * self.num_embeds_only + self.tokens if self.num_embeds_only else self.tokens

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The text followed by `extra`, as ids `[1, length]`; valid until the next call."""
        length, total = len(self.tokens), len(self.tokens) + len(extra)
        if total > self._ids.shape[0]:
            grown = self._ids.new_zeros(2 * total)
            grown[: self._written] = self._ids[: self._written]
            self._ids = grown
        if total > self._written:
            fresh = [*self.tokens[self._written :], *extra]
            self._ids[self._written : total] = torch.tensor(fresh)
            self._written = length
        return self._ids[:total][None]

    def works(self, lengths: Sequence[int], proposal: Tree = EMPTY, *, chunk: int | None = None) -> list[Work]:
        """Its work in the next pass, and its unconditional sequence's: text, branches, then the proposal.

        `lengths[i]` positions of the text are in the cache. With `chunk`: at most that many further positions of the
        text; never the last, whose pass needs logits.
        """
        works = []
        for seq, length in zip(self.batch_seqs, lengths, strict=True):
            pictures, end = None if length else seq.pictures, None
            if chunk is not None:
                end = min(length + chunk, seq.length - 1) if pictures is None else pictures.length
            text = seq.text_ids[length:end]
            tree, num_text, extras = Tree.chain(text), len(text), dict[str, Any](pictures=pictures)
            if seq.embeds is not None and length < len(seq.embeds):
                extras["embeds"] = seq.embeds[length : length + num_text]
            if chunk is not None:
                works.append(Work(seq.cache_row, tree, 0, num_text, text_length=seq.length, **extras))
                continue
            if seq.tree.tokens:
                tree = tree.graft(seq.tree)
            if proposal.tokens:
                tree = tree.graft(proposal, [num_text + leaf for leaf in seq.leaves])
            new_leaves = len(seq.tree.tokens) - seq.num_cached if seq.tree.tokens else 1  # or the end of the text
            num_logits = new_leaves + len(proposal.tokens)
            # branches without their text: the row was emptied, to be read again
            num_cached = 0 if text else seq.num_cached
            works.append(Work(seq.cache_row, tree, num_logits, num_text, num_cached, proposal, **extras))
        return works
