"""C++ operators for linear layers, attention and sampling, and the build of their library."""

from specdec.kernels.blocks import BLOCKS, IN_FLOATS, block_kind, pack_blocks
from specdec.kernels.build import available, check, digest, folder, instructions, lack, try_again
from specdec.kernels.cache_files import Lack
from specdec.kernels.ops import (
    ALIKE,
    attend,
    attend_frames,
    attention,
    best_token,
    crossed,
    gated,
    gelu,
    gumbel_draws,
    keep_top,
    norm,
    part,
    passes,
    signed,
    store_nodes,
)
from specdec.kernels.packed_linear import (
    FLOATS,
    LAYER_TENSORS,
    PackedLinear,
    Weight,
    best_seconds,
    measure_ways,
    pack,
    restored_layer,
    round_weight,
)
from specdec.kernels.pages import Mapped, give_back
from specdec.kernels.pages import empty as empty_pages
from specdec.kernels.pages import state as page_state

__all__ = [
    "ALIKE",
    "BLOCKS",
    "FLOATS",
    "IN_FLOATS",
    "LAYER_TENSORS",
    "Lack",
    "Mapped",
    "PackedLinear",
    "Weight",
    "attend",
    "attend_frames",
    "attention",
    "available",
    "best_seconds",
    "best_token",
    "block_kind",
    "check",
    "crossed",
    "digest",
    "empty_pages",
    "folder",
    "gated",
    "gelu",
    "give_back",
    "gumbel_draws",
    "instructions",
    "keep_top",
    "lack",
    "measure_ways",
    "norm",
    "pack",
    "pack_blocks",
    "page_state",
    "part",
    "passes",
    "restored_layer",
    "round_weight",
    "signed",
    "store_nodes",
    "try_again",
]
