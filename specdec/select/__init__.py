"""Decoding strategies of one row, the draft rules that agree with them, and when a row ends."""

from specdec.select.beam import Beams, BeamSearch
from specdec.select.block import Block
from specdec.select.coupled import Coupled, Match
from specdec.select.greedy import Greedy
from specdec.select.noise import fold
from specdec.select.rejection import Rejection
from specdec.select.rules import CoupledRule, GreedyRule, PerRow, PerSearch, SampledRule
from specdec.select.stopping import Stopping

__all__ = [
    "BeamSearch",
    "Beams",
    "Block",
    "Coupled",
    "CoupledRule",
    "Greedy",
    "GreedyRule",
    "Match",
    "PerRow",
    "PerSearch",
    "Rejection",
    "SampledRule",
    "Stopping",
    "fold",
]
