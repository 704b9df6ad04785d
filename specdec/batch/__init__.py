"""Batches: files of rows through models in this process.

| file | contents |
| --- | --- |
| `run.py` | a run from file to file: many rows at a time, answers in order, progress; a task's models |
| `rows.py` | rows of JSON lines, Parquet and text |
| `journal.py` | unfinished output, from which a killed run resumes |
| `tasks.py`, `openai_files.py` | tasks, and a row's answer; OpenAI's batch files |

pyarrow is imported on first use.
"""

from specdec.batch.rows import Source
from specdec.batch.run import Progress, run_batch
from specdec.batch.tasks import BatchSpec

__all__ = ["BatchSpec", "Progress", "Source", "run_batch"]
