"""What a set of rows of one model can do, whatever its layers are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.tree import Scores, Tree
from specdec.errors import OptionError, UnsupportedError
from specdec.models.cache.buffers import Prefix
from specdec.models.encoding import Encoding


class Session(ABC):
    """The keys and values of some rows of one model; the buffers belong to the session, the weights to everyone.

    A row is a number that `add` or `fork` gave out; it never changes. It holds a text and, beyond the text's end,
    *pending branches*: a tree of nodes that may still become text (beams). `passes` counts the forward passes so far.
    Where `cache_reset_length` is set, a text that grows longer must be read again from its beginning: no node of a pass
    may lie beyond that length while the text does not. `keeps_prefixes`: texts can be kept and continued by new rows.
    """

    cache_reset_length: int | None
    draft_chains: bool = False  # whether `draft_chain` may return chains
    passes: int
    keeps_prefixes = False

    @property
    @abstractmethod
    def bytes(self) -> int:
        """What all buffers take, as far as they are the session's own."""

    def bound(self, rows: int, columns: int) -> None:
        """Says how many rows of how many positions there will be at the most, for now."""

    @abstractmethod
    def add(self, rows: int, encoding: Encoding | None = None) -> list[int]:
        """New empty rows, also while others run; `encoding` is their encoder output, one entry each."""

    @abstractmethod
    def fork(self, row: int, length: int | None = None) -> int:
        """A new row that holds the first `length` tokens of `row`'s text (all, if None) and reads the same encoding.

        None keeps the pending branches as well. Raises OptionError for more tokens than the row holds.
        """

    def keep_prefix(self, row: int, length: int) -> Prefix:
        """A copy of the keys and values of the row's first `length` tokens, which must be its settled text.

        Raises UnsupportedError, as `read_from` does, unless the session `keeps_prefixes`.
        """
        raise UnsupportedError(f"{type(self).__name__} keeps no texts of rows that have left")

    def read_from(self, prefix: Prefix, length: int) -> int:
        """A new row that begins with the first `length` tokens of keys and values kept by `keep_prefix`."""
        raise UnsupportedError(f"{type(self).__name__} continues no texts of rows that have left")

    @abstractmethod
    def remove(self, rows: Sequence[int]) -> None:
        """Forgets these rows; nobody else's keys and values are touched, but for one row that may fill the gap."""

    @abstractmethod
    def length(self, row: int) -> int:
        """Tokens of text that the row holds."""

    @abstractmethod
    def pending(self, row: int) -> int:
        """How many nodes of pending branches the row holds."""

    @abstractmethod
    def forward(
        self,
        rows: Sequence[int],
        trees: Sequence[Tree],
        keep: Sequence[int],
        *,
        embeds: Sequence[Tensor | None] | None = None,
        text_lengths: Sequence[int] | None = None,
        output_hidden_states: bool | Sequence[int] = False,
        output_attentions: bool = False,
    ) -> list[Scores]:
        """One pass over a tree for each of `rows`; scores hold logits of its last `keep` nodes; nothing is committed.

        A tree's first nodes are the row's pending branches, as they were committed; they are not computed again. A
        node's position is the row's length plus its depth. A tree without new nodes sits the pass out, and rows that
        are not named cost nothing. `embeds[i]` `[nodes, width]` replace the embeddings of the row's first new nodes.
        `text_lengths[i]` is the length of the text that these nodes are a chunk of (0, or none given: it ends with the
        first of the kept nodes). `output_hidden_states`: of all layers, or of those with these numbers (`hidden_states`
        of transformers). Where the model cannot run all rows in one pass there are several.
        """

    @abstractmethod
    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        """Holds the nodes `paths[i]` of the row's last tree, parents first, and forgets the others.

        The first `texts[i]` of them (all, if None) are a chain that extends the row's text, the rest are its pending
        branches. `final=False` says that they are guesses which `truncate` may take back.
        """

    def advance(
        self, rows: Sequence[int], tokens: Sequence[int], embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Continues the texts of rows by a guess each, which `truncate` may take back; logits `[rows, vocab]` after it.

        With `embeds` `[rows, width]`, for models that read no tokens, also the last hidden states `[rows, width]`. The
        same as `forward` and `commit`, which it saves a chain's passes the detail of.
        """
        trees, inputs = [Tree.chain([token]) for token in tokens], None if embeds is None else list(embeds[:, None])
        returned = embeds is not None
        scores = self.forward(rows, trees, [1] * len(rows), embeds=inputs, output_hidden_states=returned)
        self.commit(rows, [[0]] * len(rows), final=False)
        states = [one.hidden_states[-1][-1] for one in scores if one.hidden_states is not None]
        return torch.stack([one.logits[-1] for one in scores]), torch.stack(states) if returned else None

    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Continues texts, and guesses tokens after them as the rules say, in one call; None where that cannot be.

        Rows hold all their guesses but the last, as `advance` leaves them. `embeds` `[tokens, width]` of the
        texts are for models that read no tokens.
        """
        return None

    @abstractmethod
    def refresh(self, rows: Sequence[int]) -> None:
        """Forgets those rows, branches included, whose text has come to `cache_reset_length`: all is fed again."""

    @abstractmethod
    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forgets tokens beyond `lengths[i]`, and pending branches with them, of rows that have more text."""


def check_trees(rows: Sequence[int], trees: Sequence[Tree], keep: Sequence[int], pending: Sequence[int]) -> None:
    """Raises unless every row has a tree that begins with its branches, and a `keep` of at most the new nodes."""
    if len(trees) != len(rows) or len(keep) != len(rows):
        raise OptionError.of("trees", f"one tree and one `keep` for each of {len(rows)} rows", (len(trees), len(keep)))
    for tree, kept, held in zip(trees, keep, pending, strict=True):
        if len(tree) < held:
            raise OptionError.of("trees", f"trees that begin with the {held} nodes of pending branches", len(tree))
        if not 0 <= kept <= len(tree) - held:
            raise OptionError.of("keep", f"between 0 and the {len(tree) - held} new nodes of the row", kept)


def check_paths(rows: Sequence[int], paths: Sequence[list[int]], texts: Sequence[int] | None) -> None:
    """Raises unless there is one path, and if so one number of text nodes, per row."""
    if len(paths) != len(rows) or (texts is not None and len(texts) != len(rows)):
        raise OptionError.of("paths", f"one for each of {len(rows)} rows", len(paths))
