"""Where the nodes of one pass are: columns of the buffers, positions in the text, and the columns each attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.core.tree import Tree, depths_of
from specdec.core.work import Work
from specdec.models.protocols import AttentionKind

WORD = 32  # columns per word of bits


@dataclass(frozen=True, slots=True)
class AttentionView:
    """What the nodes of a pass attend to, windows left out.

    `positions` `[rows, nodes]` of the nodes, `key_positions` `[rows, end]` of the columns; `visible` `[rows, nodes,
    end]`: whether the node sees the column.
    """

    positions: Tensor
    key_positions: Tensor
    visible: Tensor

    def mask(self, kind: AttentionKind, dtype: torch.dtype) -> Tensor:
        """`[rows, 1, nodes, end]`, added to attention scores: 0 where a node may look, the lowest number elsewhere."""
        visible = self.visible
        if kind.window is not None or kind.chunk is not None or kind.first:
            visible = visible & (self.key_positions[:, None] >= kind.first_seen(self.positions)[:, :, None])
        # Added to scores, as eager attention adds any mask; finite, because a softmax over -inf alone is NaN.
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )
        return mask[:, None]


@dataclass(slots=True)
class ColumnMap:
    """The columns of one row: positions below `base` lie in the columns of the same number, later nodes are scattered.

    `scattered[i]` is the column of scattered node i, `parents[i]` its parent among them (-1: position `base - 1`). The
    first `num_text` scattered nodes are a chain of text, the others pending branches. Columns from `top` on are free.
    `initial_length` is the length of the text that the row began with. `shift` is added to positions where models take
    them as an argument.
    """

    base: int = 0
    num_text: int = 0
    scattered: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    top: int = 0
    initial_length: int = 0
    shift: int = 0

    @property
    def length(self) -> int:
        return self.base + self.num_text

    @property
    def extent(self) -> int:
        """Tokens of the longest path, including the text."""
        return self.base + max(depths_of(self.parents), default=-1) + 1

    @property
    def pending(self) -> int:
        return len(self.scattered) - self.num_text

    def with_new(self, tree: Tree) -> tuple[list[int], list[int]]:
        """Columns and parents of all scattered nodes once `tree`, which begins with the pending branches, is added."""
        nodes = range(self.pending, len(tree))
        parents = [self.num_text + tree.parents[node] for node in nodes]  # -1 becomes the last node of text
        return self.scattered + [self.top + i for i in range(len(nodes))], self.parents + parents

    def keep(self, tree: Tree, path: list[int], num_text: int) -> None:
        """Keeps only the nodes `path` of the last pass; the first `num_text` of them become text."""
        if not self.scattered and num_text == len(path) and (not num_text or path[-1] == num_text - 1):
            self.base = self.top = self.base + num_text
            return
        columns, parents = self.with_new(tree)
        places = [*range(self.num_text), *(self.num_text + node for node in path)]
        number = {node: i for i, node in enumerate(places)} | {-1: -1}
        self.parents = [number[parents[node]] for node in places]
        self.scattered = [columns[node] for node in places]
        self.num_text += num_text
        self.top = max([self.base, *(column + 1 for column in self.scattered)])

    def compact(self, slack: int) -> list[tuple[int, int]]:
        """Closes the gaps between scattered nodes; returns the moves `(source column, target column)`.

        Does nothing while branches are pending, whose passes need a mask anyway, and at most `slack` columns are void
        (-1: always closes).
        """
        if not self.scattered or (self.pending and self.top - self.base - len(self.scattered) <= slack):
            return []
        moves = [(column, self.base + i) for i, column in enumerate(self.scattered) if column != self.base + i]
        num_text = self.num_text
        self.base, self.num_text = self.base + num_text, 0
        self.scattered = [self.base + i for i in range(len(self.scattered) - num_text)]
        self.parents = [max(parent - num_text, -1) for parent in self.parents[num_text:]]
        self.top = self.base + len(self.scattered)
        return moves

    def begin(self, work: Work) -> None:
        """Sets the initial length of an empty row."""
        if not self.top and work.tree.tokens:
            self.initial_length = work.initial_length

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Cuts the text, which is longer, to `length` tokens, and drops branches; returns moves as `compact` does."""
        self.scattered, self.parents = self.scattered[: self.num_text], self.parents[: self.num_text]
        moves = self.compact(0)
        self.base = self.top = length
        return moves


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """The new nodes of one row: `columns` and `positions` `[nodes]`, and the columns that each node sees.

    `base` `[nodes]` is one past the range that a node sees: the settled text, or in chains the node itself. `ancestors`
    `[nodes, width]`: its ancestors and itself among the columns from the settled text on, whose positions are `depth`
    `[width]`.
    """

    columns: np.ndarray
    positions: np.ndarray
    base: np.ndarray
    ancestors: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, row: ColumnMap, tree: Tree) -> NodePlaces:
        """The places of the nodes of `tree` behind the pending branches of `row`, with which it begins."""
        size = max(len(tree) - row.pending, 0)
        if not row.scattered and tree.is_chain:
            columns = np.arange(row.top, row.top + size)
            return cls(columns, columns, columns + 1, np.zeros((size, 0), dtype=bool), np.zeros(0, dtype=np.int64))
        node_columns, parents = row.with_new(tree)
        count, width = len(row.scattered), row.top + size - row.base
        places = np.array(node_columns) - row.base
        ancestors = np.zeros((size, width), dtype=bool)
        ancestors[:, places] = ancestry(parents)[count:]
        depth = np.zeros(width, dtype=np.int64)
        depth[places] = np.array(depths_of(parents)) + row.base
        columns, base = np.array(node_columns[count:], dtype=np.int64), np.full(size, row.base)
        return cls(columns, depth[places[count:]], base, ancestors, depth)


@dataclass(frozen=True, slots=True)
class Layout:
    """The new nodes of one padded pass, `[rows, nodes]`: node i of row r is written to column `maps[r].top + i`.

    `columns` is None if all rows start at `start`. `view` is None if, besides, no row has scattered nodes and all trees
    are chains of one length, so that the library's own causal mask and positions are right.
    """

    maps: list[ColumnMap]
    sizes: list[int]
    nodes: int
    start: int
    columns: Tensor | None
    view: AttentionView | None
    device: torch.device

    @classmethod
    def of(cls, trees: Sequence[Tree], maps: list[ColumnMap], device: torch.device) -> Layout:
        """The layout of `trees`, which begin with the pending branches of `maps`, or are empty."""
        sizes = [max(len(tree) - column_map.pending, 0) for tree, column_map in zip(trees, maps, strict=True)]
        tops = [column_map.top for column_map in maps]
        nodes, start = max(sizes), max(tops)
        level = min(tops) == start
        any_scattered = any(column_map.scattered for column_map in maps)
        if level and not any_scattered and min(sizes) == nodes and all(tree.is_chain for tree in trees):
            return cls(maps, sizes, nodes, start, None, None, device)
        columns = None if level else torch.tensor(tops, device=device)[:, None] + torch.arange(nodes, device=device)
        return cls(maps, sizes, nodes, start, columns, _view(trees, maps, nodes, start + nodes, device), device)

    @property
    def end(self) -> int:
        """One past the last column that the pass may write."""
        return self.start + self.nodes

    def causal(self) -> AttentionView:
        """The view that a layout without `view` stands for, for models that derive none themselves."""
        key_positions = torch.arange(self.end, device=self.device).expand(len(self.maps), -1)
        positions = key_positions[:, self.start :]
        return AttentionView(positions, key_positions, key_positions[:, None] <= positions[:, :, None])

    def shifted(self) -> Tensor:
        """Positions `[rows, nodes]` as an argument of the model."""
        shifts = torch.tensor([column_map.shift for column_map in self.maps], device=self.device)
        positions = (self.view or self.causal()).positions + shifts[:, None]
        return positions.clamp(min=0)  # nodes of padding are at position 0, and a shift may be negative

    def spans(self) -> Tensor:
        """Length of the text when plain decoding read each node, `[rows, nodes]`."""
        initial = torch.tensor([column_map.initial_length for column_map in self.maps], device=self.device)[:, None]
        return torch.maximum((self.view or self.causal()).positions + 1, initial)


def _view(trees: Sequence[Tree], maps: list[ColumnMap], nodes: int, end: int, device: torch.device) -> AttentionView:
    """What the nodes see by their `NodePlaces`; nodes of padding see the settled text and themselves."""
    columns, positions = np.arange(end), np.zeros((len(maps), nodes), dtype=np.int64)
    key_positions = np.tile(columns, (len(maps), 1))
    visible = np.zeros((len(maps), nodes, end), dtype=bool)
    for row, (column_map, tree) in enumerate(zip(maps, trees, strict=True)):
        places = NodePlaces.of(column_map, tree)
        size, width = places.ancestors.shape
        scattered = slice(column_map.base, column_map.base + width)
        positions[row, :size], key_positions[row, scattered] = places.positions, places.depth
        visible[row, :size] = columns < places.base[:, None]
        visible[row, :size, scattered] |= places.ancestors
        # A softmax over nothing would be NaN.
        visible[row, size:, : column_map.base] = True
        padding = np.arange(size, nodes)
        visible[row, padding, column_map.top + padding] = True
    arrays = positions, key_positions, visible
    return AttentionView(*(torch.from_numpy(array).to(device) for array in arrays))


def ancestry(parents: list[int]) -> np.ndarray:
    """`[nodes, nodes]`: whether the column's node is the row's node or one of its ancestors."""
    n = len(parents)
    if parents == list(range(-1, n - 1)):
        return np.tri(n, dtype=bool)
    ancestors = np.eye(n, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def visible_columns(is_visible: np.ndarray) -> list[int]:
    """The end of a table's row for columns that `is_visible` marks or not: a range, then words of bits."""
    columns = np.flatnonzero(is_visible)
    first = int(columns[0]) if len(columns) else 0
    gaps = np.flatnonzero(~is_visible[first:])
    base = first + int(gaps[0]) if len(gaps) else len(is_visible)
    after = is_visible[base : int(columns[-1]) + 1] if len(columns) else is_visible[:0]
    bits = np.zeros(-(-len(after) // WORD) * WORD, dtype=bool)
    bits[: len(after)] = after
    words: list[int] = np.packbits(bits, bitorder="little").view(np.int32).tolist()
    return [first, base, *words]
