"""Drafts for any target, `specdec distill`, and the recipes of the package's models, `specdec zoo train --recipe NAME`.

Nothing else imports this room; what the recipes need beside the runtime is `pip install -e '.[train]'`.

| file | what it holds |
| --- | --- |
| `python_code.py`, `shapes.py` | the code pair, in several sizes |
| `speech.py`, `phrases.py`, `synthesis.py`, `windows.py`, `speech_scores.py` | the speech pair |
| `python_summary.py`, `functions.py` | the summary pair: functions and what they do |
| `distillation.py`, `texts.py`, `pupils.py` | `distill`: its course, what it reads, what learns |
| `course.py` | what all share: optimizers, steps, stages |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

RECIPES = ("python-code", "speech", "python-summary")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe that `--recipe` names, with the other arguments; `--help` lists that recipe's own."""
    parser = argparse.ArgumentParser("specdec zoo train", add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    options, others = parser.parse_known_args(arguments)
    import_module(f"specdec.train.{options.recipe.replace('-', '_')}").main(others)
