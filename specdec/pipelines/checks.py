"""What both pipelines refuse of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import OptionError

_NO_PLACE = ("streamer", "return_dict_in_generate", "top_logprobs")


def check_function(name: str, value: Any, arguments: str) -> None:
    """Raises OptionError where an argument is neither None nor a function of `arguments`."""
    if value is not None and not callable(value):
        raise OptionError.of(name, f"a function of ({arguments})", value, "pass one, such as `print`, or leave it out")


def refuse_outputs(pipeline: str, options: Mapping[str, Any]) -> None:
    """Raises OptionError for options of `generate` whose outputs the pipeline does not return."""
    for name, value in options.items():
        if value and (name in _NO_PLACE or name.startswith("output_")):
            raise OptionError(f"`{name}` has no place in a {pipeline}'s result: call SpecGenerator for it")
