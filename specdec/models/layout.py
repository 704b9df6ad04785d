"""Where the nodes of one pass sit: slots in the store, positions in the text, and who may look at whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.types import Tree


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of attention layer: its name in the mask dict, and what it sees of the past (None: everything)."""

    name: str
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """Who may look at whom: positions of nodes `[rows, nodes]` and slots `[rows, end]`, `seen` `[rows, nodes, end]`."""

    positions: Tensor
    key_positions: Tensor
    seen: Tensor

    def mask(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        """`[rows, 1, nodes, end]`, added to attention scores: 0 where a node may look, the lowest number elsewhere."""
        seen = self.seen
        query, key = self.positions[:, :, None], self.key_positions[:, None]
        if kind.window is not None:
            seen = seen & (key > query - kind.window)
        if kind.chunk is not None:
            seen = seen & (key // kind.chunk == query // kind.chunk)
        # Additive, because eager attention adds whatever it is given; finite, because rows of -inf are NaN.
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[:, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of one pass, `[rows, nodes]` padded: row r's node i is written to slot `lengths[r] + i`.

    `slots` is None when every row starts at `start`; `sight` is None when, besides, every tree is a chain of the same
    length, so that the library's own causal mask and positions are right.
    """

    lengths: list[int]
    sizes: list[int]
    nodes: int
    start: int
    slots: Tensor | None = None
    sight: Sight | None = None

    @classmethod
    def of(cls, trees: Sequence[Tree], lengths: list[int]) -> Layout:
        """The layout of `trees` after rows of `lengths` tokens (on the CPU)."""
        sizes = [len(tree) for tree in trees]
        nodes, start = max(sizes), max(lengths)
        level = min(lengths) == start
        if level and min(sizes) == nodes and all(tree.is_chain for tree in trees):
            return cls(lengths, sizes, nodes, start)
        layout = cls(lengths, sizes, nodes, start)
        slots = layout.all_slots()
        return replace(layout, slots=None if level else slots, sight=layout._sight(trees, slots))

    @property
    def end(self) -> int:
        """One past the last slot that the pass may write."""
        return self.start + self.nodes

    def all_slots(self) -> Tensor:
        """`[rows, nodes]`, also where every row starts at the same slot."""
        return torch.tensor(self.lengths)[:, None] + torch.arange(self.nodes)

    def causal(self) -> Sight:
        """What a layout without `sight` means, for a forward that derives nothing itself."""
        key_positions = torch.arange(self.end).expand(len(self.lengths), -1)
        positions = key_positions[:, self.start :]
        return Sight(positions, key_positions, key_positions[:, None] <= positions[:, :, None])

    def _sight(self, trees: Sequence[Tree], slots: Tensor) -> Sight:
        rows, nodes = slots.shape
        positions = torch.zeros(rows, nodes, dtype=torch.long)
        kin = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
        for row, (tree, size) in enumerate(zip(trees, self.sizes, strict=True)):
            # Padding keeps position 0 and sees only itself: a softmax over nothing would be NaN.
            positions[row, :size] = self.lengths[row] + torch.tensor(tree.depths(), dtype=torch.long)
            kin[row, :size, :size] = tree.ancestry()
        index = torch.arange(self.end)
        seen = (index < slots[:, :1])[:, None].repeat(1, nodes, 1)
        seen.scatter_(2, slots[:, None].expand(-1, nodes, -1), kin)
        return Sight(positions, index.repeat(rows, 1).scatter_(1, slots, positions), seen)
