"""Decoding strategies, the samplers of drafts that agree with them, and when a sequence ends.

A new strategy is a class with `serves(options)` and `of(setup)`, and a line in `STRATEGIES`; a way of sampling has its
name in `specdec.options.fields.SAMPLING` as well.
"""

from __future__ import annotations

from specdec.core.strategies import Strategy
from specdec.decoding.noise import fold
from specdec.decoding.strategies.base import Greedy, StrategySetup
from specdec.decoding.strategies.beam import BeamSearch
from specdec.decoding.strategies.beam_scoring import Beams
from specdec.decoding.strategies.block import Block
from specdec.decoding.strategies.constrained import ConstrainedSearch
from specdec.decoding.strategies.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint, wanted
from specdec.decoding.strategies.contrastive import Contrastive
from specdec.decoding.strategies.group import GroupSearch
from specdec.decoding.strategies.sampling import Coupled, Match, Rejection

STRATEGIES: tuple[type[Strategy], ...] = (
    Greedy,
    Contrastive,
    GroupSearch,
    ConstrainedSearch,
    BeamSearch,
    Coupled,
    Match,
    Rejection,
    Block,
)
"""Every strategy; the first that serves the options of a sequence decodes it."""


__all__ = [
    "STRATEGIES",
    "BeamSearch",
    "Beams",
    "Block",
    "Constraint",
    "Coupled",
    "DisjunctiveConstraint",
    "Greedy",
    "PhrasalConstraint",
    "Rejection",
    "StrategySetup",
    "fold",
    "wanted",
]
