"""How much to draft next: schedules are values, and `after(round)` gives the next one."""

from specdec.schedule.cost import Cost
from specdec.schedule.rules import MOST_NODES, Confidence, Constant, Heuristic, Limit, Schedule

__all__ = ["MOST_NODES", "Confidence", "Constant", "Cost", "Heuristic", "Limit", "Schedule"]
