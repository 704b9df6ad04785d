"""What a call may ask of its prompts and its target: lengths within reach, ids that the target knows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from specdec.decoding.strategies import wanted
from specdec.errors import OptionError
from specdec.generator.inputs.prompts import Prompts
from specdec.models import LanguageModel
from specdec.options.checks import warn_of_idle
from specdec.options.generate import Options, listed

DEFAULT_LENGTH = 20  # tokens; transformers' own, for ids without any limit
_ID_OPTIONS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")


def length_limit(options: Options, prompts: Prompts, target: LanguageModel) -> int:
    """The most ids of a row, padding included, as transformers counts them.

    Raises OptionError where text has no limit at all, where the prompt fills the limit, and where the text would need
    more positions than the model has; warns where a model whose positions have no end was not made for so many.
    """
    width = prompts.padded.shape[1]
    if options.max_new_tokens is not None:
        limit = width + options.max_new_tokens
    elif options.max_length is not None:
        limit = options.max_length - prompts.unseen
    elif prompts.is_text:
        raise OptionError("a text prompt needs a length limit: pass `max_new_tokens=`")
    else:
        limit = width + DEFAULT_LENGTH
    if limit <= width:
        length = width + prompts.unseen
        asked = options.max_length
        raise OptionError(f"`max_length`={asked} leaves no room after a prompt of {length} tokens: raise it")
    # The last token is never fed, except as a candidate.
    needed = max(row.positions for row in prompts.rows) + limit - width - (not options.contrastive)
    if target.max_positions is not None and needed > target.max_positions:
        raise OptionError(
            f"the prompt and its continuation may need {needed} positions, but the target has {target.max_positions}: "
            "shorten the prompt or lower `max_new_tokens`"
        )
    made_for = _made_for(target.config) if target.max_positions is None else None
    if made_for is not None and needed > made_for:
        warnings.warn(
            f"the prompt and its continuation may need {needed} positions, and the target was made for {made_for}: "
            "beyond them its text is likely to fall apart",
            stacklevel=2,
        )
    return limit


def _made_for(config: Any) -> int | None:
    """How many positions a rotary model was made for, its scaling included; None for other models."""
    rope, most = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not rope or not most or getattr(config, "alibi", False):
        return None
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, Mapping)]
    scaled = [kind for kind in kinds if kind.get("rope_type") in ("linear", "dynamic", "yarn")]
    lengths = [(kind.get("original_max_position_embeddings") or most) * (kind.get("factor") or 1) for kind in scaled]
    return int(max([most, *lengths]))


def check_vocabulary(options: Options, target: LanguageModel) -> None:
    """Raises OptionError for ids in options that the target does not know, unless its checkpoint brought them."""
    bias = options.sequence_bias or ()
    named = {
        "bad_words_ids": options.bad_words_ids or (),
        "sequence_bias": bias if isinstance(bias, Mapping) else [ids for ids, _ in bias],
        "constraints": [c.ids for c in wanted(options.constraints, None)],
        "force_words_ids": [c.ids for c in wanted(None, options.force_words_ids)],
        **{name: [listed(getattr(options, name))] for name in _ID_OPTIONS},
    }
    for name, groups in named.items():
        wrong = next((i for ids in groups for i in ids if not 0 <= i < target.vocab_size), None)
        if wrong is not None and getattr(options, name) != getattr(target.model.generation_config, name, None):
            known = f"ids from 0 to {target.vocab_size - 1}, which the target knows"
            raise OptionError.of(name, known, wrong, "pass [] for none" if name == "eos_token_id" else "")


def check_least(options: Options, limit: int, prompts: Prompts, target: LanguageModel) -> None:
    """Warns of least lengths beyond the limit, where the text ends, unless the target's checkpoint brought them."""
    width = prompts.padded.shape[1]
    leasts = {
        "min_length": (options.min_length or 0) - prompts.unseen,
        "min_new_tokens": (options.min_new_tokens or 0) + width,
    }
    for name, least in leasts.items():
        asked = getattr(options, name)
        if least > limit and asked != getattr(target.model.generation_config, name, None):
            warn_of_idle(
                f"`{name}`={asked} is out of reach, as the text ends after {limit - width} new tokens: "
                "lower it, or raise `max_new_tokens`"
            )
