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

    A row holds a text and, beyond its end, a *crown*: nodes of branches that are not settled yet (beams).
    `lengths` are the tokens of text per row, `passes` the forward passes run so far. Where `reread` is set, a text that
    grows longer must be read again from its beginning: no node of a pass may lie beyond while the text does not.
    """

    reread: int | None
    lengths: list[int]
    passes: int

    @property
    @abstractmethod
    def crowns(self) -> list[Tree]:
        """Every row's crown: the tree with which it sits out a pass."""

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
        wholes: Sequence[int] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> list[Scores]:
        """One pass over every row's tree; scores hold logits of the last `keep[row]` nodes; nothing is committed.

        A tree's first nodes are the row's crown, as it was committed; they are not computed again. A node's position is
        the row's length plus its depth. A tree without new nodes sits the pass out. `embeds[row]` `[nodes, width]`
        replace the embeddings of the row's first new nodes. `wholes[row]` is the length of the text that these nodes
        are a chunk of; otherwise it ends with the first of the kept nodes.
        """

    @abstractmethod
    def commit(self, paths: Sequence[list[int]], *, trunks: Sequence[int] | None = None, final: bool = True) -> None:
        """Holds the nodes `paths[row]` of the last tree, parents first, and forgets the others.

        The first `trunks[row]` of them (all, if None) are a chain that extends the row's text, the rest is its crown.
        `final=False` says that they are guesses which `truncate` may take back.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Forgets rows, crowns included, whose text has come to `reread`, so that all of it is fed again."""

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets tokens beyond `lengths[row]`, and the crown with them, of every row that has more text."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; a row may be repeated."""


def add_rows(
    session: Session, texts: Sequence[Sequence[int]], sources: Sequence[int], encoding: Encoding | None, chunk: int
) -> None:
    """Adds a row per text; of several that continue one source alike, all but the last token is read once, for all.

    `sources[row]` is the number of the row's input and of its entry in `encoding`; a pass takes `chunk` tokens per row.
    """
    alike = list(zip(sources, map(tuple, texts), strict=True))
    firsts = list(dict.fromkeys(alike))
    held = len(session.lengths)
    session.add(len(firsts), None if encoding is None else encoding.select([source for source, _ in firsts]))
    if len(firsts) == len(alike):
        return
    shared = [list(text[:-1]) if alike.count((source, text)) > 1 else [] for source, text in firsts]
    for begin in range(0, max(map(len, shared)), chunk):
        chunks = [Tree.chain(text[begin : begin + chunk]) for text in shared]
        trees = [*session.crowns[:held], *chunks]
        session.forward(trees, [0] * len(trees), wholes=[0] * held + [len(text) + 1 for _, text in firsts])
        session.commit([list(range(len(tree))) for tree in trees], trunks=[0] * held + list(map(len, chunks)))
    place = {one: held + i for i, one in enumerate(firsts)}
    session.select([*range(held), *(place[one] for one in alike)])


def check_trees(trees: Sequence[Tree], keep: Sequence[int], crowns: Sequence[int]) -> None:
    """Raises unless every row has a tree that begins with its crown, and a `keep` of at most the new nodes."""
    rows = len(crowns)
    if len(trees) != rows or len(keep) != rows:
        raise OptionError.of("trees", f"one tree and one `keep` for each of {rows} rows", (len(trees), len(keep)))
    for tree, kept, crown in zip(trees, keep, crowns, strict=True):
        if len(tree) < crown:
            raise OptionError.of("trees", f"trees that begin with the {crown} nodes of the row's crown", len(tree))
        if not 0 <= kept <= len(tree) - crown:
            raise OptionError.of("keep", f"between 0 and the {len(tree) - crown} new nodes of the row", kept)


def check_paths(paths: Sequence[list[int]], trunks: Sequence[int] | None, rows: int) -> None:
    """Raises unless there is one path, and if so one trunk, per row."""
    if len(paths) != rows or (trunks is not None and len(trunks) != rows):
        raise OptionError.of("paths", f"one for each of {rows} rows", len(paths))


def check_rows(rows: Sequence[int], held: int) -> None:
    """Raises unless every entry names one of the `held` rows."""
    if any(not 0 <= row < held for row in rows):
        raise OptionError.of("rows", f"row numbers below {held}", list(rows))
