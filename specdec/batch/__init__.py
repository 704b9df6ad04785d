"""Batches: files of rows through models in this process or on a Ray cluster.

| file | contents |
| --- | --- |
| `run.py` | a run from file to file: many rows at a time, answers in order, progress |
| `rows.py` | rows of JSON lines, Parquet and text |
| `journal.py` | unfinished output, from which a killed run resumes |
| `tasks.py`, `openai_files.py` | tasks, and a row's answer; OpenAI's batch files |
| `worker.py` | a task's models, and a row's line of output |
| `ray.py` | the same on a cluster, by Ray Data |

Ray and pyarrow are imported on first use.
"""

from specdec.batch.ray import WorkerPool, connect, over_ray
from specdec.batch.rows import Source
from specdec.batch.run import Progress, embedded, run_batch
from specdec.batch.tasks import BatchSpec

__all__ = ["BatchSpec", "Progress", "Source", "WorkerPool", "connect", "embedded", "over_ray", "run_batch"]
