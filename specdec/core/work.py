"""One row's share of a pass, and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.core.tree import EMPTY, Tree

CHUNKS = 2048, 256
"""The most prompt tokens of one pass; and of one that sequences which have read their prompts wait for."""
CPU_CHUNKS = 256, 64
"""The same for weights in a CPU's memory, where passes over more tokens are no faster."""
READ_ALONG = 16
"""The most tokens of a text that a draft model reads in the pass of its first guess, while another text can guess."""
VOID_COLUMNS = 64
"""Columns of a row of the cache that dead branches may leave empty before the row is compacted."""


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The first `length` columns of a prompt, to the last picture or recording, which a model reads in one pass.

    `inputs`: arguments of its forward, ids included. `shift`: what is added to positions after them, where a picture
    takes fewer than it has tokens. `before`: columns of a picture that stands before the text and has no tokens.
    """

    inputs: Mapping[str, Any]
    length: int
    shift: int = 0
    before: int = 0


@dataclass(slots=True, eq=False)  # not frozen: that takes four times as long to make, in every pass
class Work:
    """What a pass computes for one row of the cache: logits of the last `num_logits` nodes of `tree`.

    The tree begins with `num_text` tokens that extend the row's text, or with the `num_cached` branches that it holds
    already, never both. It ends with the `proposal`. Nodes after the text, branches included, have numbers from 0 on;
    -1 is the end of the text. Node n has the index `num_text + n` in `tree`. A node's position is the row's length plus
    its depth. `embeds` `[nodes, width]` replace the embeddings of the first new nodes. `text_length`: how long the
    whole text is, where `tree` holds only a chunk of it; 0 otherwise. `pictures`: what the model reads beside the tree,
    a chain that begins the text.
    """

    row: int
    tree: Tree
    num_logits: int = 1
    num_text: int = 0
    num_cached: int = 0
    proposal: Tree = EMPTY
    text_length: int = 0
    embeds: Tensor | None = None
    pictures: Pictures | None = None

    @classmethod
    def text(cls, row: int, tokens: list[int], num_logits: int = 1) -> Work:
        """Tokens that extend a row's text."""
        return cls(row, Tree.chain(tokens), num_logits, len(tokens))

    @property
    def num_new(self) -> int:
        """How many nodes the pass computes."""
        return len(self.tree.tokens) - self.num_cached

    @property
    def new_tokens(self) -> list[int]:
        """The tokens of the nodes that the pass computes."""
        return self.tree.tokens[self.num_cached :]

    @property
    def first(self) -> int:
        """The first node with logits."""
        return len(self.tree.tokens) - self.num_logits

    @property
    def initial_length(self) -> int:
        """The length of a text that begins with this work: all of it, or up to the first node with logits."""
        return self.text_length or len(self.tree.path(min(self.first, len(self.tree.tokens) - 1)))

    def path(self, numbers: Sequence[int]) -> list[int]:
        """The new text followed by these nodes, in numbers of `tree`."""
        return [*range(self.num_text), *(self.num_text + number for number in numbers)]


@dataclass(slots=True, eq=False)
class Logits:
    """The output of a pass for one `Work`.

    `logits` `[num_logits, vocab]`: unprocessed; strategies get them in the CPU's memory. `unconditional`: the same of
    the unconditional sequence, under guidance. `hidden_states` and `attentions`: per requested layer `[new nodes,
    width]` and `[heads, new nodes, text + nodes]`, None for other layers. `passes`: the numbers of the passes that
    computed it. `cache`: results that the strategy computed for all nodes at once.
    """

    work: Work
    logits: Tensor
    unconditional: Tensor | None = None
    hidden_states: tuple[Any, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    passes: Sequence[int] = ()
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
