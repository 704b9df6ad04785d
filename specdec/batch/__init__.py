"""Past one process: files of rows through many models, one or a cluster of them.

| file | what it holds |
| --- | --- |
| `run.py` | a run from file to file: rows many at a time, answers in order, progress |
| `rows.py`, `parquet.py` | rows of JSON lines, Parquet and text |
| `journal.py` | the output in the making, which a killed run leaves ready to be gone on with |
| `answer.py`, `tasks.py`, `openai_files.py` | models loaded, a row's answer, batch files in OpenAI's form |
| `ray/cluster.py`, `ray/data.py` | the same over a cluster, by Ray Data |
| `ray/serve.py` | the server in several replicas, by Ray Serve |

Nothing of Ray and pyarrow is imported before it is asked for.
"""

from specdec.batch.answer import BatchSpec
from specdec.batch.ray.cluster import connect
from specdec.batch.ray.data import Pool, map_batches, over_ray
from specdec.batch.rows import Source
from specdec.batch.run import Progress, embedded, run

__all__ = ["BatchSpec", "Pool", "Progress", "Source", "connect", "embedded", "map_batches", "over_ray", "run"]
