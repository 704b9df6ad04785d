"""Linear layers at the speed of the memory: packed weights, operators, and the library that is built for them."""

from specdec.kernels.build import available, instructions, why_not
from specdec.kernels.packed import FLOATS, KINDS, AnyLinear, HeldLinear, PackedLinear, ReorderedLinear, best_seconds
from specdec.kernels.packing import pack
from specdec.kernels.quantize import Quantized, to_int4, to_int8

__all__ = [
    "FLOATS",
    "KINDS",
    "AnyLinear",
    "HeldLinear",
    "PackedLinear",
    "Quantized",
    "ReorderedLinear",
    "available",
    "best_seconds",
    "instructions",
    "pack",
    "to_int4",
    "to_int8",
    "why_not",
]
