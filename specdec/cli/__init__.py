"""The command line. Stdout is data, stderr is everything else.

A command is in the file of its name, but for `generate` and `pack` (`commands.py`, beside the entry point and its exit
codes) and for `demo` and `zoo` (`pair.py`). They share `flags.py`; `request.py`, from flags and a YAML file to checked
options and loaded models; `show.py`, what goes to stdout; and `terminal.py`, what goes to stderr, and Ctrl-C.
"""

from specdec.cli.commands import main

__all__ = ["main"]
