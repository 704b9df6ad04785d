"""The interface of a session: rows of one model, their caches and their passes."""

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
    """Rows of one model with their keys and values, which belong to the session.

    `add` and `fork` return a row's number, which never changes. A row holds a text and, after its end, *pending
    branches*: a tree of nodes that may become text (beams). `passes` counts forward passes. With a `cache_reset_length`
    a text that grows beyond it must be read again from its beginning: no node of a pass may lie beyond that length
    while the text does not. `keeps_prefixes`: whether `keep_prefix` and `read_from` work.
    """

    cache_reset_length: int | None
    draft_chains: bool = False  # whether `draft_chain` may return chains
    passes: int
    keeps_prefixes = False

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of the session's own buffers."""

    def bound(self, rows: int, columns: int) -> None:
        """Bounds the session to this many rows and positions, for now."""

    @abstractmethod
    def add(self, rows: int, encoding: Encoding | None = None) -> list[int]:
        """Adds empty rows and returns their numbers; `encoding` is their encoder output, one entry each."""

    @abstractmethod
    def fork(self, row: int, length: int | None = None) -> int:
        """Adds a row with the first `length` tokens of `row`'s text (None: all, and its branches) and the same
        encoding.

        Raises OptionError if the row has fewer tokens.
        """

    def keep_prefix(self, row: int, length: int) -> Prefix:
        """Copies the keys and values of the first `length` tokens, which must be settled text.

        Raises UnsupportedError, as `read_from` does, unless the session `keeps_prefixes`.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot copy prefixes: check `keeps_prefixes`")

    def read_from(self, prefix: Prefix, length: int) -> int:
        """Adds a row with the first `length` tokens of a prefix from `keep_prefix`."""
        raise UnsupportedError(f"{type(self).__name__} cannot read prefixes: check `keeps_prefixes`")

    @abstractmethod
    def remove(self, rows: Sequence[int]) -> None:
        """Removes these rows; no other row changes."""

    @abstractmethod
    def length(self, row: int) -> int:
        """Tokens of the row's text."""

    @abstractmethod
    def pending(self, row: int) -> int:
        """Nodes of the row's pending branches."""

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
        """One pass over a tree per row; returns the logits of its last `keep` nodes, and commits nothing.

        A tree begins with the row's pending branches, which are not computed again. A node's position is the row's
        length plus its depth. Trees without new nodes, and rows that are not named, cost nothing. `embeds[i]` `[nodes,
        width]` replace the embeddings of the first new nodes. `text_lengths[i]` is the length of the text that the new
        nodes are a chunk of (0 for a complete text). `output_hidden_states`: of all layers, or of
        these numbers, as transformers counts. Runs several passes where the model cannot run all rows in one.
        """

    @abstractmethod
    def commit(
        self, rows: Sequence[int], paths: Sequence[list[int]], *, texts: Sequence[int] | None = None, final: bool = True
    ) -> None:
        """Keeps the nodes `paths[i]` of the row's last tree, parents first, and drops the others.

        The first `texts[i]` of them (None: all) are a chain that extends the text, the others pending branches.
        `final=False`: they are guesses, which `truncate` may take back.
        """

    def advance(
        self, rows: Sequence[int], tokens: Sequence[int], embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Extends each text by one guess, which `truncate` may take back; returns the logits `[rows, vocab]` after it.

        A shortcut for `forward` and `commit`. With `embeds` `[rows, width]`, for models that read embeddings, it also
        returns the last hidden states `[rows, width]`.
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
        """Extends texts and drafts a chain after each by its rule, in one call; None where that is not possible.

        Rows then hold all guesses but the last, as after `advance`. `embeds` `[tokens, width]` of each text are for
        models that read embeddings.
        """
        return None

    def refresh(self, rows: Sequence[int]) -> None:
        """Empties the rows whose text has reached `cache_reset_length`, if they must be fed their text again."""

    @abstractmethod
    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts texts to `lengths[i]` tokens, and drops the branches of those that were longer."""


def check_trees(rows: Sequence[int], trees: Sequence[Tree], keep: Sequence[int], pending: Sequence[int]) -> None:
    """Raises OptionError unless every row has a tree that begins with its branches, and a valid `keep`."""
    if len(trees) != len(rows) or len(keep) != len(rows):
        raise OptionError.of("trees", f"one tree and one `keep` for each of {len(rows)} rows", (len(trees), len(keep)))
    for tree, kept, held in zip(trees, keep, pending, strict=True):
        if len(tree) < held:
            raise OptionError.of("trees", f"trees that begin with the {held} nodes of pending branches", len(tree))
        if not 0 <= kept <= len(tree) - held:
            raise OptionError.of("keep", f"between 0 and the {len(tree) - held} new nodes of the row", kept)


def check_paths(rows: Sequence[int], paths: Sequence[list[int]], texts: Sequence[int] | None) -> None:
    """Raises OptionError unless there is one path, and one of `texts` if given, per row."""
    if len(paths) != len(rows) or (texts is not None and len(texts) != len(rows)):
        raise OptionError.of("paths", f"one for each of {len(rows)} rows", len(paths))
