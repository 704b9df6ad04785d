"""C++ operators for linear layers, attention and sampling, and the build of their library."""

from specdec.kernels.blocks import BLOCKS, IN_FLOATS, pack_blocks
from specdec.kernels.build import available, check, compiler, digest, folder, instructions, lack, try_again
from specdec.kernels.kept import Lack
from specdec.kernels.ops import ALIKE, attend, gumbel_draws, keep_top, passes, signed, store_nodes
from specdec.kernels.packed_linear import FLOATS, PackedLinear, Weight, best_seconds, pack
from specdec.kernels.pages import advise
from specdec.kernels.pages import state as page_state
from specdec.kernels.rounding import round_weight

__all__ = [
    "ALIKE",
    "BLOCKS",
    "FLOATS",
    "IN_FLOATS",
    "Lack",
    "PackedLinear",
    "Weight",
    "advise",
    "attend",
    "available",
    "best_seconds",
    "check",
    "compiler",
    "digest",
    "folder",
    "gumbel_draws",
    "instructions",
    "keep_top",
    "lack",
    "pack",
    "pack_blocks",
    "page_state",
    "passes",
    "round_weight",
    "signed",
    "store_nodes",
    "try_again",
]
