"""Past one process: files of rows through many models, one or a cluster of them.

| file | what it holds |
| --- | --- |
| `batch.py` | a run from file to file: rows many at a time, answers in order, progress |
| `source.py`, `arrow.py` | rows of JSON lines, Parquet and text |
| `ledger.py` | the output in the making, which a killed run leaves ready to be gone on with |
| `work.py`, `tasks.py`, `openai.py` | models loaded, a row's answer, batch files in OpenAI's form |
"""

from specdec.scale.batch import Progress, run
from specdec.scale.source import Source
from specdec.scale.work import Work

__all__ = ["Progress", "Source", "Work", "run"]
