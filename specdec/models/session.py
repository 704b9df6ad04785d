"""What a running set of rows of one model can do, whatever its layers are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from specdec.errors import OptionError
from specdec.models.encoding import Encoding
from specdec.types import Scores, Tree


class Session(ABC):
    """The keys and values of some rows of one model; the buffers belong to the session, the weights to everyone.

    `lengths` are the tokens held per row, `passes` the forward passes run so far.
    """

    lengths: list[int]
    passes: int

    @abstractmethod
    def add(self, rows: int, encoding: Encoding | None = None) -> None:
        """Appends `rows` empty rows, also while others run; `encoding` is their encoder output, if there is one."""

    @abstractmethod
    def forward(
        self,
        trees: Sequence[Tree],
        keep: Sequence[int],
        *,
        embeds: Sequence[Tensor | None] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> list[Scores]:
        """One pass over every row's tree; scores hold logits of the last `keep[row]` nodes; nothing is committed.

        A node's position is the row's length plus its depth. An empty tree sits the pass out. `embeds[row]`
        `[nodes, width]` replace the embeddings of the row's first nodes.
        """

    @abstractmethod
    def commit(self, paths: Sequence[list[int]], *, final: bool = True) -> None:
        """Makes the nodes `paths[row]` of the last pass, root first, the row's text and forgets the others.

        `final=False` says that they are guesses which `truncate` may take back.
        """

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets every row's tokens beyond `lengths[row]`."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; a row may be repeated."""


def check_trees(trees: Sequence[Tree], keep: Sequence[int], rows: int) -> None:
    """Raises unless there is one tree and one `keep` per row, and no row keeps more nodes than it has."""
    if len(trees) != rows or len(keep) != rows:
        raise OptionError.of("trees", f"one tree and one `keep` for each of {rows} rows", (len(trees), len(keep)))
    for tree, kept in zip(trees, keep, strict=True):
        if not 0 <= kept <= len(tree):
            raise OptionError.of("keep", f"between 0 and the {len(tree)} nodes of the row", kept)


def check_rows(rows: Sequence[int], held: int) -> None:
    """Raises unless every entry names one of the `held` rows."""
    if any(not 0 <= row < held for row in rows):
        raise OptionError.of("rows", f"row numbers below {held}", list(rows))
