"""The command line. Stdout is data, stderr is everything else.

| file | what it holds |
| --- | --- |
| `commands.py` | the entry point, `generate`, errors and exit codes |
| `chat.py` | `chat`: a conversation in the terminal |
| `batch.py` | `batch`: a file of rows, and the same rows with their answers |
| `summarize.py` | `summarize`: summaries of files |
| `bench.py` | `bench`: a suite from flags and a file, outcomes in words |
| `compile.py` | `compile`: compiles passes in advance |
| `doctor.py` | `doctor`: examines machine, installation and a pair |
| `distill.py` | `distill`: trains a draft |
| `pair.py` | `demo` and `zoo`: the models that come with the package |
| `request.py` | flags and a YAML file, checked: models to load, options of the call; loading under a spinner |
| `flags.py` | flags that several commands share |
| `show.py` | prints texts, statistics and the JSON report |
| `serve.py` | `serve`: models behind an HTTP server |
| `transcribe.py` | `transcribe`: recordings to text, JSON lines or subtitles |
| `terminal.py` | exit codes, lines on stderr, spinners, Ctrl-C |
"""

from specdec.cli.commands import main

__all__ = ["main"]
