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
class Layout:
    """The nodes of one pass, `[rows, nodes]` padded: row r's node i is written to slot `lengths[r] + i`.

    `slots` is None when every row starts at `start`; `plain` when, besides, every tree is a chain of the same
    length, so that the library's own causal mask and positions are right.
    """

    lengths: list[int]
    sizes: list[int]
    nodes: int
    start: int
    end: int
    plain: bool
    slots: Tensor | None
    positions: Tensor
    key_positions: Tensor | None
    seen: Tensor | None

    @classmethod
    def of(cls, trees: Sequence[Tree], lengths: list[int]) -> Layout:
        """The layout of `trees` after rows of `lengths` tokens (on the CPU)."""
        sizes = [len(tree) for tree in trees]
        nodes, start = max(sizes), max(lengths)
        level = min(lengths) == start
        plain = level and min(sizes) == nodes and all(tree.is_chain for tree in trees)
        if plain:
            positions = torch.arange(start, start + nodes).expand(len(lengths), nodes)
            return cls(lengths, sizes, nodes, start, start + nodes, True, None, positions, None, None)
        return cls._ragged(trees, lengths, sizes, nodes, level)

    @classmethod
    def _ragged(cls, trees: Sequence[Tree], lengths: list[int], sizes: list[int], nodes: int, level: bool) -> Layout:
        start = max(lengths)
        held = torch.tensor(lengths)[:, None]
        slots = held + torch.arange(nodes)
        positions = torch.zeros(len(trees), nodes, dtype=torch.long)
        kin = torch.eye(nodes, dtype=torch.bool).repeat(len(trees), 1, 1)
        for row, tree in enumerate(trees):
            size = sizes[row]
            # Padding keeps position 0 and sees only itself: a softmax over nothing would be NaN.
            positions[row, :size] = lengths[row] + torch.tensor(tree.depths(), dtype=torch.long)
            kin[row, :size, :size] = tree.ancestry()
        index = torch.arange(start + nodes)
        seen = (index < held)[:, None].repeat(1, nodes, 1)
        seen.scatter_(2, slots[:, None].expand(-1, nodes, -1), kin)
        key_positions = index.repeat(len(trees), 1).scatter_(1, slots, positions)
        ragged = None if level else slots
        return cls(lengths, sizes, nodes, start, start + nodes, False, ragged, positions, key_positions, seen)

    def all_slots(self) -> Tensor:
        """`[rows, nodes]`, also where every row starts at the same slot."""
        return torch.tensor(self.lengths)[:, None] + torch.arange(self.nodes)

    def explicit(self) -> Layout:
        """The same pass with a mask, for a forward that derives nothing itself."""
        if not self.plain:
            return self
        key_positions = torch.arange(self.end).expand(len(self.lengths), -1)
        seen = key_positions[:, None] <= self.positions[:, :, None]
        return replace(self, plain=False, key_positions=key_positions, seen=seen)

    def mask(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        """`[rows, 1, nodes, end]`, added to attention scores: 0 where a node may look, the lowest number elsewhere."""
        if self.seen is None or self.key_positions is None:
            raise ValueError("a plain layout has no mask")
        seen = self.seen
        query, key = self.positions[:, :, None], self.key_positions[:, None]
        if kind.window is not None:
            seen = seen & (key > query - kind.window)
        if kind.chunk is not None:
            seen = seen & (key // kind.chunk == query // kind.chunk)
        # Additive, because eager attention adds whatever it is given; finite, because rows of -inf are NaN.
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[:, None]
