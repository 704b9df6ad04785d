"""The command line: `specdec generate` and its kin. Stdout is data, stderr is everything else.

| file | what it holds |
| --- | --- |
| `commands.py` | the entry point, `generate`, and what becomes of an error |
| `batch.py` | `batch`: a file of rows in, the same rows with their answers out |
| `summarize.py` | `summarize`: files in, summaries out |
| `bench.py` | `bench` and `tune`: what they measure, the bar, the outcome in words |
| `compile.py` | `compile`: passes compiled before they are needed |
| `doctor.py` | `doctor`: machine, installation and a pair, looked at |
| `distill.py` | `distill`: a draft for any target |
| `pair.py` | `demo` and `zoo`: the models that come with the package |
| `request.py` | flags and a YAML file, checked and turned into what to load and how to decode |
| `flags.py` | flags that several commands have |
| `load.py` | models brought in, with a sign of life |
| `show.py` | text on the screen, the table of statistics, the JSON report |
| `serve.py` | `serve`: models behind an HTTP server |
| `transcribe.py` | `transcribe`: recordings to text, JSON lines or subtitles |
| `terminal.py` | exit codes, lines on stderr, spinners, Ctrl-C |
"""

from specdec.cli.commands import main

__all__ = ["main"]
