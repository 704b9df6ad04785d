"""Trainings: the models in `specdec/zoo`, `python -m recipes NAME OUT`, and a draft for any target,
`python -m recipes distill TARGET OUT`; from the root of the repository.

Pairs need `pip install -e '.[recipes]'`, and the speech pair needs the program espeak-ng.

| file | what it holds |
| --- | --- |
| `python_code.py`, `shapes.py` | the code pair, in several sizes |
| `speech.py`, `phrases.py`, `synthesis.py`, `windows.py`, `speech_scores.py` | the speech pair |
| `python_summary.py`, `functions.py` | the summary pair: functions and what they do |
| `distill/` | an EAGLE-3 head for a target that has no draft |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

RECIPES = ("python-code", "speech", "python-summary", "distill")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe that is named first, with the other arguments; `NAME --help` lists its own."""
    parser = argparse.ArgumentParser("python -m recipes", description="Make a pair again, or train a draft.")
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("others", nargs=argparse.REMAINDER, metavar="...", help="arguments of that recipe")
    options = parser.parse_args(arguments)
    import_module(f"recipes.{options.recipe.replace('-', '_')}").main(options.others)
