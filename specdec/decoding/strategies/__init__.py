"""Decoding strategies: how the target's logits become tokens.

A new strategy is a class with `serves(options)` and `of(setup)`, and a line in `STRATEGIES`; a way of sampling has its
name in `specdec.options.fields.SAMPLING` as well.
"""

from __future__ import annotations

from typing import Any

from specdec.core.strategies import Strategy
from specdec.decoding.strategies.base import Greedy, StrategySetup
from specdec.decoding.strategies.beam import BeamSearch
from specdec.decoding.strategies.constraints import (
    Constraint,
    DisjunctiveConstraint,
    PhrasalConstraint,
    read_constraints,
)
from specdec.decoding.strategies.contrastive import Contrastive
from specdec.decoding.strategies.legacy_beams import ConstrainedSearch, GroupSearch
from specdec.decoding.strategies.sampling import Block, Coupled, Match, Rejection
from specdec.errors import OptionError

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


def make_strategy(setup: StrategySetup) -> Strategy:
    """The strategy of one sequence; raises OptionError for contradicting options, or if no strategy serves them."""
    kind: Any
    for kind in STRATEGIES:
        if kind.serves(setup.options):
            strategy: Strategy = kind.of(setup)
            return strategy
    raise OptionError("no strategy serves these options: leave some out")


__all__ = [
    "STRATEGIES",
    "Constraint",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
    "StrategySetup",
    "make_strategy",
    "read_constraints",
]
