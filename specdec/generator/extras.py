"""The arguments of a call that are objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdec.errors import OptionError


@dataclass(frozen=True)
class Extras:
    """Arguments of a call that are objects: processors and criteria (one or several), a streamer, a prefix function.

    `prediction`: text or ids that the output may resemble, or one per prompt, for drafts that copy. `cache_salt`: calls
    with different salts share no cached prompts and no memory. `fetch_pictures`: pictures in `messages` may be URLs. A
    processor with a method `allowed(text, tokens)`, which returns how many of `tokens` may follow `text`, shortens
    proposals, and one with a method `forced(text)` makes them: it returns the tokens that alone may follow.
    """

    logits_processor: Any = ()
    stopping_criteria: Any = ()
    streamer: Any = None
    prefix_allowed_tokens_fn: Any = None
    tokenizer: Any = None
    prediction: Any = None
    cache_salt: Any = None
    fetch_pictures: bool = False

    def __post_init__(self) -> None:
        for name, arguments in (("logits_processor", "(ids, logits)"), ("stopping_criteria", "(ids, scores)")):
            value = getattr(self, name)
            # A LogitsProcessorList is iterable and callable: its items are used.
            items = list(value) if isinstance(value, Iterable) else [value]
            for item in items:
                if not callable(item):
                    raise OptionError.of(name, f"callables of {arguments}", item)
            object.__setattr__(self, name, items)
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise OptionError.of("prefix_allowed_tokens_fn", "a function of (row, ids)", self.prefix_allowed_tokens_fn)
        if not isinstance(self.cache_salt, str | None):
            raise OptionError.of("cache_salt", "text", type(self.cache_salt).__name__)
        if self.streamer is not None and not (hasattr(self.streamer, "put") and hasattr(self.streamer, "end")):
            raise OptionError.of("streamer", "an object with `put` and `end`", self.streamer)
