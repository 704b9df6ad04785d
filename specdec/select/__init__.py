"""Decoding strategies of one row, the draft rules that agree with them, and when a row ends."""

from specdec.select.beam import Beams, BeamSearch
from specdec.select.block import Block
from specdec.select.constrained import ConstrainedSearch
from specdec.select.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint, Progress, wanted
from specdec.select.contrastive import Contrastive
from specdec.select.coupled import Coupled, Match
from specdec.select.greedy import Greedy
from specdec.select.group import GroupSearch
from specdec.select.noise import fold
from specdec.select.rejection import Rejection
from specdec.select.rules import CoupledRule, GreedyRule, PerRow, SampledRule
from specdec.select.stopping import Stopping

__all__ = [
    "BeamSearch",
    "Beams",
    "Block",
    "ConstrainedSearch",
    "Constraint",
    "Contrastive",
    "Coupled",
    "CoupledRule",
    "DisjunctiveConstraint",
    "Greedy",
    "GreedyRule",
    "GroupSearch",
    "Match",
    "PerRow",
    "PhrasalConstraint",
    "Progress",
    "Rejection",
    "SampledRule",
    "Stopping",
    "fold",
    "wanted",
]
