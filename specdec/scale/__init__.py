"""Past one process: files of rows through many models, one or a cluster of them.

| file | what it holds |
| --- | --- |
| `batch.py` | a run from file to file: rows many at a time, answers in order, progress |
| `source.py`, `arrow.py` | rows of JSON lines, Parquet and text |
| `ledger.py` | the output in the making, which a killed run leaves ready to be gone on with |
| `work.py`, `tasks.py`, `openai.py` | models loaded, a row's answer, batch files in OpenAI's form |
| `cluster.py`, `ray_data.py` | the same over a cluster, by Ray Data |
| `ray_serve.py` | the server in several replicas, by Ray Serve |

Nothing of Ray and pyarrow is imported before it is asked for.
"""

from specdec.scale.batch import Progress, embedded, run
from specdec.scale.cluster import connect
from specdec.scale.ray_data import Pool, map_batches, over_ray
from specdec.scale.source import Source
from specdec.scale.work import Work

__all__ = ["Pool", "Progress", "Source", "Work", "connect", "embedded", "map_batches", "over_ray", "run"]
