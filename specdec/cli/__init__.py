"""The command line: `specdec generate`, `specdec demo`, `specdec zoo`. Stdout is data, stderr is everything else.

| file | what it holds |
| --- | --- |
| `commands.py` | the entry point, `generate`, and what becomes of an error |
| `pair.py` | `demo` and `zoo`: the models that come with the package |
| `request.py` | flags and a YAML file, checked and turned into what to load and how to decode |
| `show.py` | text on the screen, the table of statistics, the JSON report |
| `terminal.py` | exit codes, lines on stderr, spinners, Ctrl-C |
"""

from specdec.cli.commands import main

__all__ = ["main"]
