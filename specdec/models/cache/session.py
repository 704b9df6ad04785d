"""The interface of a session: rows of one model, with their keys and values, and passes over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from specdec.core.drafts import Chained, ChainRule
from specdec.core.work import Logits, Work
from specdec.errors import UnsupportedError
from specdec.models.cache.buffers import Prefix
from specdec.models.encoding import Encoding


class Session(ABC):
    """Rows of one model with their keys and values, and passes over them.

    `add` and `fork` return a row's number, which never changes. A row holds a text and, after its end, *pending
    branches*: a tree of nodes that may become text (beams). With a `cache_reset_length` a text that grows beyond it
    must be read again from its beginning: no node of a pass may lie beyond that length while the text does not.
    `keeps_prefixes`: whether `keep_prefix` and `read_from` work; `draft_chains`: whether `draft_chain` may return
    chains.
    """

    cache_reset_length: int | None
    keeps_prefixes = False
    draft_chains: bool = False

    def bound(self, rows: int, columns: int) -> None:
        """Bounds the session to this many rows and positions, for now."""

    @abstractmethod
    def add(self, encoding: Encoding | None = None) -> int:
        """Adds an empty row; `encoding` is its encoder output."""

    @abstractmethod
    def fork(self, row: int, length: int) -> int:
        """Adds a row with the first `length` tokens of `row`'s text, and its encoding.

        Raises OptionError if the row has fewer tokens.
        """

    def keep_prefix(self, row: int, length: int) -> Prefix:
        """Copies the keys and values of the first `length` tokens, which must be settled text.

        Raises UnsupportedError, as `read_from` does, unless the session `keeps_prefixes`.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot copy prefixes: check `keeps_prefixes`")

    def read_from(self, prefix: Prefix, length: int, shift: int = 0) -> int:
        """Adds a row with the first `length` tokens of a kept prefix, whose positions go on by `shift`."""
        raise UnsupportedError(f"{type(self).__name__} cannot read prefixes: check `keeps_prefixes`")

    @abstractmethod
    def remove(self, rows: Sequence[int]) -> None:
        """Removes these rows; no other row changes."""

    @abstractmethod
    def length(self, row: int) -> int:
        """Tokens of the row's text."""

    @abstractmethod
    def run(
        self, works: Sequence[Work], *, hidden: bool | Sequence[int] = False, attentions: bool = False
    ) -> list[Logits]:
        """One pass over the new nodes of these rows, several where the model cannot run all in one; commits nothing.

        `hidden`: hidden states of all layers are returned, or those of these numbers, as transformers counts. Rows
        without a work, and works without new nodes, cost nothing.
        """

    def draft_chain(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        rules: Sequence[ChainRule],
        embeds: Sequence[Tensor] | None = None,
    ) -> Chained | None:
        """Extends texts and drafts a chain after each by its rule, in one call; None where that is not possible.

        Rows then hold all guesses but the last. `embeds` `[tokens, width]` of each text are for models that read them.
        """
        return None

    @abstractmethod
    def commit(
        self,
        rows: Sequence[int],
        paths: Sequence[list[int]],
        *,
        num_texts: Sequence[int] | None = None,
        final: bool = True,
    ) -> None:
        """Keeps the nodes `paths[i]` of the row's last tree, parents first, and drops the others.

        The first `num_texts[i]` of them (None: all) are a chain that extends the text, the others pending branches.
        `final=False`: they are guesses, which `truncate` may take back.
        """

    def refresh(self, rows: Sequence[int]) -> None:
        """Empties the rows whose text has reached `cache_reset_length`, if they must be fed their text again."""

    @abstractmethod
    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Cuts texts to `lengths[i]` tokens, and drops the branches of those that were longer."""
