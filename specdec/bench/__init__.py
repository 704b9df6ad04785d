"""The benchmark: drafts, modes and schedules measured in turn with plain decoding, and compared with it.

| file | content |
| --- | --- |
| `suite.py`, `parts.py` | the matrix: targets, drafts, modes, strategies, temperatures, schedules, prompts, batches |
| `prompts.py`, `texts.jsonl` | the package's prompt sets, and files in the formats of Spec-Bench, HumanEval and GSM8K |
| `runner.py` | measures plain and assisted decoding in turn; resumes a killed run |
| `systems.py` | generators by target and draft, one measured call |
| `samples.py` | `samples.jsonl`, and differences from plain decoding's texts |
| `results.py` | intervals and percentiles; `results.json` and the summary |
| `tuner.py` | drafts and weights tried within a number of seconds, for `specdec doctor` |
| `machine.py` | machine, versions, contention, peak memory |
"""

from specdec.bench.results import backends, exit_state, results, save
from specdec.bench.runner import run
from specdec.bench.suite import Suite, read_suite

__all__ = ["Suite", "backends", "exit_state", "read_suite", "results", "run", "save"]
