"""Where the nodes of one pass sit: slots in the store, positions in the text, and who may look at whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
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


@dataclass(slots=True)
class Place:
    """Where one row's nodes sit: the first `base` positions in slots 0 to `base - 1`, all nodes after them in `slots`.

    `parents` are numbered among those loose nodes (-1: position `base - 1`). The first `trunk` of them are text that
    everything continues, the others are the crown, text that some branches continue. Slots from `top` on are free.
    `whole` is how long the text was that the row began with.
    """

    base: int = 0
    trunk: int = 0
    slots: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    top: int = 0
    whole: int = 0

    @property
    def length(self) -> int:
        """Tokens of text."""
        return self.base + self.trunk

    @property
    def extent(self) -> int:
        """Tokens of the longest path, text included."""
        return self.base + max(_depths(self.parents), default=-1) + 1

    @property
    def crown(self) -> int:
        """How many nodes beyond the text are held."""
        return len(self.slots) - self.trunk

    def with_new(self, tree: Tree) -> tuple[list[int], list[int]]:
        """Slots and parents of the loose nodes, then of the nodes of `tree` after its crown."""
        fresh = range(self.crown, len(tree))
        parents = [self.trunk + tree.parents[node] for node in fresh]  # a -1 falls on the last of the trunk
        return self.slots + [self.top + i for i in range(len(fresh))], self.parents + parents

    def keep(self, tree: Tree, path: list[int], trunk: int) -> None:
        """Holds the nodes `path` of the last pass only, the first `trunk` of them as text."""
        if not self.slots and trunk == len(path) and path == list(range(trunk)):
            self.base = self.top = self.base + trunk
            return
        slots, parents = self.with_new(tree)
        kept = [*range(self.trunk), *(self.trunk + node for node in path)]
        number = {node: i for i, node in enumerate(kept)} | {-1: -1}
        self.parents = [number[parents[node]] for node in kept]
        self.slots = [slots[node] for node in kept]
        self.trunk += trunk
        self.top = max([self.base, *(slot + 1 for slot in self.slots)])

    def settle(self, slack: int) -> list[tuple[int, int]]:
        """Moves `(source, target)` of slots that bring loose nodes home; none while that can wait.

        It can wait while there are branches, whose passes have a mask anyway, and at most `slack` slots are void.
        """
        if not self.slots or (self.crown and self.top - self.base - len(self.slots) <= slack):
            return []
        moves = [(slot, self.base + i) for i, slot in enumerate(self.slots) if slot != self.base + i]
        home = self.trunk
        self.base, self.trunk = self.base + home, 0
        self.slots = [self.base + i for i in range(len(self.slots) - home)]
        self.parents = [max(parent - home, -1) for parent in self.parents[home:]]
        self.top = self.base + len(self.slots)
        return moves

    def begin(self, tree: Tree, first: int, whole: int | None) -> None:
        """Notes what the row begins with, if it is empty: the text up to node `first`, or `whole` tokens."""
        if not self.top and tree.tokens:
            self.whole = whole or tree.depths()[min(first, len(tree) - 1)] + 1

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Forgets what lies beyond `length` tokens of text, if the row has more of it; moves as in `settle`."""
        if length >= self.length:
            return []
        self.slots, self.parents = self.slots[: self.trunk], self.parents[: self.trunk]
        moves = self.settle(0)
        self.base = self.top = length
        return moves


@dataclass(frozen=True, slots=True)
class Layout:
    """The new nodes of one pass, `[rows, nodes]` padded: row r's node i is written to slot `places[r].top + i`.

    `slots` is None when every row starts at `start`; `sight` is None when, besides, no row has loose nodes and every
    tree is a chain of the same length, so that the library's own causal mask and positions are right.
    """

    places: list[Place]
    sizes: list[int]
    nodes: int
    start: int
    slots: Tensor | None
    sight: Sight | None

    @classmethod
    def of(cls, trees: Sequence[Tree], places: list[Place]) -> Layout:
        """The layout of `trees`, the first nodes of which are the crowns of `places` (on the CPU)."""
        sizes = [len(tree) - place.crown for tree, place in zip(trees, places, strict=True)]
        tops = [place.top for place in places]
        nodes, start = max(sizes), max(tops)
        level = min(tops) == start
        loose = any(place.slots for place in places)
        if level and not loose and min(sizes) == nodes and all(tree.is_chain for tree in trees):
            return cls(places, sizes, nodes, start, None, None)
        slots = None if level else torch.tensor(tops)[:, None] + torch.arange(nodes)
        return cls(places, sizes, nodes, start, slots, _sight(trees, places, nodes, start + nodes))

    @property
    def end(self) -> int:
        """One past the last slot that the pass may write."""
        return self.start + self.nodes

    def all_slots(self) -> Tensor:
        """`[rows, nodes]`, also where every row starts at the same slot."""
        return torch.tensor([place.top for place in self.places])[:, None] + torch.arange(self.nodes)

    def causal(self) -> Sight:
        """What a layout without `sight` means, for a forward that derives nothing itself."""
        key_positions = torch.arange(self.end).expand(len(self.places), -1)
        positions = key_positions[:, self.start :]
        return Sight(positions, key_positions, key_positions[:, None] <= positions[:, :, None])

    def spans(self) -> Tensor:
        """How long the text was when plain decoding read it, for every node `[rows, nodes]`."""
        wholes = torch.tensor([place.whole for place in self.places])[:, None]
        return torch.maximum((self.sight or self.causal()).positions + 1, wholes)

    def columns(self, row: int) -> list[int]:
        """The slots of a row's whole text, its crown and its new nodes, in this order."""
        place = self.places[row]
        return [*range(place.base), *place.slots, *range(place.top, place.top + self.sizes[row])]


def _sight(trees: Sequence[Tree], places: list[Place], nodes: int, end: int) -> Sight:
    rows = len(places)
    positions = np.zeros((rows, nodes), dtype=np.int64)
    key_positions = np.tile(np.arange(end), (rows, 1))
    seen = np.zeros((rows, nodes, end), dtype=bool)
    for row, (tree, place) in enumerate(zip(trees, places, strict=True)):
        slots, parents = place.with_new(tree)
        loose, size = len(place.slots), len(tree) - place.crown
        depths = np.array(_depths(parents), dtype=np.int64) + place.base
        positions[row, :size] = depths[loose:]
        key_positions[row, slots] = depths
        seen[row, :size, : place.base] = True
        seen[row, :size][:, slots] = _ancestry(parents)[loose:]
        # Padding keeps position 0 and sees only itself: a softmax over nothing would be NaN.
        padding = np.arange(size, nodes)
        seen[row, padding, place.top + padding] = True
    return Sight(torch.from_numpy(positions), torch.from_numpy(key_positions), torch.from_numpy(seen))


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _ancestry(parents: list[int]) -> np.ndarray:
    """`[nodes, nodes]`: whether the column is the row's node itself or one of its ancestors."""
    n = len(parents)
    if parents == list(range(-1, n - 1)):
        return np.tri(n, dtype=bool)
    kin = np.eye(n, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            kin[node] |= kin[parent]
    return kin
