"""The values that travel between the rooms: trees of candidate tokens, the target's scores, steps and rounds.

Words: a *node* is one candidate token, a *row* one sequence; `p` is the target's distribution, `q` the draft's.

| file | what it holds |
| --- | --- |
| `trees.py` | trees of candidate tokens, what the target says of their nodes, and the steps that come of it |
| `rounds.py` | rows, their part of a target pass, and what a round came to |
| `strategies.py` | what every way of decoding says about itself, and how it is asked for the next step |
| `drafts.py` | what a draft is asked, what it answers, and what it is told |
| `statistics.py` | what a call came to, in numbers |
"""

from specdec.types.drafts import (
    BatchDrafter,
    Branch,
    BranchRule,
    Chained,
    ChainRule,
    Choice,
    Commit,
    Drafter,
    DraftRule,
    DraftSession,
    DraftTask,
    Filter,
    Hidden,
    Kept,
    Plan,
    Until,
)
from specdec.types.rounds import Context, Round, Row, RowPass, RowRound
from specdec.types.statistics import Stats
from specdec.types.strategies import NodeOutput, Search, SearchStep, Selector, Strategy, Trace
from specdec.types.trees import EMPTY, Scores, Step, TopTokens, Tree

__all__ = [
    "EMPTY",
    "BatchDrafter",
    "Branch",
    "BranchRule",
    "ChainRule",
    "Chained",
    "Choice",
    "Commit",
    "Context",
    "DraftRule",
    "DraftSession",
    "DraftTask",
    "Drafter",
    "Filter",
    "Hidden",
    "Kept",
    "NodeOutput",
    "Plan",
    "Round",
    "Row",
    "RowPass",
    "RowRound",
    "Scores",
    "Search",
    "SearchStep",
    "Selector",
    "Stats",
    "Step",
    "Strategy",
    "TopTokens",
    "Trace",
    "Tree",
    "Until",
]
