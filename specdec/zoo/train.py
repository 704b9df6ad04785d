"""`specdec zoo train [OUT] --recipe NAME`: makes the models that come with the package again, or larger ones."""

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
    import_module(f"specdec.zoo.recipes.{options.recipe.replace('-', '_')}").main(others)


if __name__ == "__main__":
    main()
