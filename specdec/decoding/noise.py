"""Random numbers that are functions of their address: a counter-based hash instead of a generator.

Addresses are hashed with integers only, so that every device draws the same bits:

    key  = fold(fold(seed, stream), position)                      64 bits, splitmix64 (Steele et al. 2014)
    x    = mix32(id * 0x9E3779B1 + low 32 bits of key)             per token id
    h    = mix32(x ^ high 32 bits of key)
    u    = (h * 2^20 + (x mod 2^20) + 1/2) / 2^52                  in (0, 1), never 0 or 1
    G    = -log(-log u)                                            standard Gumbel, float64

`mix32` is the two-round multiply-xorshift mixer 16/0x21f0aaad/15/0xd35a2d97/15, in which every input bit flips every
output bit with probability near 1/2. `argmax(log p + G)` is a draw from p (Gumbel-max).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from specdec import kernels
from specdec.errors import OptionError, SpecdecError

COUPLED, ACCEPT, _RETIRED, DRAW, DRAFT, BEAMS = range(6)
"""Streams: draws for different purposes never share an address; nothing draws from the retired one any more, whose
number stays taken so that seeds keep their texts."""

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
# Constants above 2^31 are written as their negative twins mod 2^32: products then fit into int64, nothing overflows.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x21F0AAAD, 0xD35A2D97 - (1 << 32)
NONE_LEFT = "no token is left to choose: the options and processors of the call forbid all of them; loosen one"
NOT_A_NUMBER = "the scores to sample from contain NaN"
EMPTY, _BROKEN = -1, -2  # in place of a token: nothing left to choose, NaN among the scores; as in choice.cpp


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def fold(seed: int, index: int) -> int:
    """A 64-bit seed from a seed and an index (a row of a batch, a sample of a row)."""
    return _mix64((_mix64((seed + 0x9E3779B97F4A7C15) & _MASK64) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64)


def key(seed: int, stream: int, *indices: int) -> int:
    """The 64-bit address of one stream's draws at these indices, for example a position."""
    return reduce(fold, indices, fold(seed, stream))


def uniform(address: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (_mix64(address) >> 11) * 2.0**-53


def _mix32(x: Tensor) -> Tensor:
    """Mixes the 32-bit numbers held in int64 `x`, in place."""
    buffer = x >> 16  # one buffer for all: making them takes as long as filling them
    x ^= buffer
    x *= _FIRST
    x &= _MASK32
    x ^= torch.bitwise_right_shift(x, 15, out=buffer)
    x *= _SECOND
    x &= _MASK32
    x ^= torch.bitwise_right_shift(x, 15, out=buffer)
    return x


def uniforms(address: int, ids: Tensor) -> Tensor:
    """One number in (0, 1) per token id, float64 with the shape of the int64 `ids`."""
    x = ids * _GOLDEN + (address & _MASK32)
    x &= _MASK32
    x = _mix32(x)
    h = _mix32(x ^ (address >> 32))  # h and x, see the module: 32 bits each in int64
    h <<= 20
    h |= x & 0xFFFFF
    u = h.double()
    u += 0.5
    u *= 2.0**-52
    return u


def gumbel(address: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise per token id, float64, of the shape of `uniforms`."""
    return uniforms(address, ids).log_().neg_().log_().neg_()


def draw(logits: Tensor, address: int) -> int:
    """A token from `softmax(logits)`, `logits` `[vocab]`: the Gumbel-max draw at `address`; raises as `check_token`."""
    if kernels.available():
        return check_token(int(kernels.gumbel_draws(logits.detach().float()[None], [address])))
    best, place = (gumbel(address, torch.arange(len(logits))) + logits).max(dim=-1)
    return check_token(_BROKEN if best.isnan() else EMPTY if best == -torch.inf else int(place))


def check_token(token: int) -> int:
    """The chosen `token`; raises OptionError if no token was left to choose, SpecdecError for NaN scores."""
    if token == EMPTY:
        raise OptionError(NONE_LEFT)
    if token == _BROKEN:
        raise SpecdecError(NOT_A_NUMBER)
    return token
