"""C++ operators for linear layers, attention and sampling, and the build of their library."""

from specdec.kernels.build import available, check, compiler, digest, folder, instructions, lack, try_again
from specdec.kernels.kept import Lack, alone, cache_folder, failure, is_held, is_whole, put
from specdec.kernels.ops import ALIKE, attend, draws, keep_top, passes, signed, store_nodes
from specdec.kernels.packed_linear import FLOATS, PackedLinear, Weight, best_seconds, pack
from specdec.kernels.quantized import Quantized, to_int4, to_int8

__all__ = [
    "ALIKE",
    "FLOATS",
    "Lack",
    "PackedLinear",
    "Quantized",
    "Weight",
    "alone",
    "attend",
    "available",
    "best_seconds",
    "cache_folder",
    "check",
    "compiler",
    "digest",
    "draws",
    "failure",
    "folder",
    "instructions",
    "is_held",
    "is_whole",
    "keep_top",
    "lack",
    "pack",
    "passes",
    "put",
    "signed",
    "store_nodes",
    "to_int4",
    "to_int8",
    "try_again",
]
