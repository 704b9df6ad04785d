"""What both pipelines refuse of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import OptionError

_NO_PLACE = ("streamer", "return_dict_in_generate", "top_logprobs")


def refuse_outputs(pipeline: str, options: Mapping[str, Any]) -> None:
    """Raises OptionError for options of `generate` whose outputs the pipeline does not return."""
    for name, value in options.items():
        if value and (name in _NO_PLACE or name.startswith("output_")):
            raise OptionError(f"`{name}` has no place in a {pipeline}'s result: call SpecGenerator for it")
