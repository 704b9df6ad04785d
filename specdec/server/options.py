"""From a request's fields to the options of a call; log-probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.drafts import Draft
from specdec.errors import OptionError, UnsupportedError
from specdec.generator.generator import SpecGenerator
from specdec.generator.job import Job
from specdec.server.errors import above_limit
from specdec.server.messages import Message
from specdec.server.protocol import LENGTHS, Generate
from specdec.server.settings import Limits

# Fields that are options of the same name; one that is not sent is the checkpoint's.
_SAME_NAMES = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p"),
    *("sampling", "num_samples", "ranking", "penalty_alpha", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("length_penalty", "early_stopping"),
)
_DRAFTING = ("schedule", "num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold")
_INHERITED = ("temperature", "top_p", "top_k")
EVERYTHING = {"temperature": 1.0, "top_k": 0}
"""Sampling where neither the request nor the model sets more: from the whole distribution."""
_CHUNK = 64  # the most tokens of a prompt that one pass scores


def check_limits(request: Generate, limits: Limits) -> None:
    """Raises a 400 for numbers above the server's limits."""
    bounds: dict[str, int | None] = {"n": limits.choices, "num_beams": limits.beams, "num_samples": limits.beams}
    bounds |= dict.fromkeys((*LENGTHS, "min_tokens"), limits.new_tokens)
    for name in bounds.keys() & request.model_fields_set:
        if (most := bounds[name]) is not None and (getattr(request, name) or 0) > most:
            raise above_limit(f"`{name}` may be {most}", name)


def check_length(characters: int, param: str, limits: Limits) -> None:
    """Raises a 400 for a prompt with more characters than the server allows."""
    if characters > limits.prompt_characters:
        raise above_limit(f"`{param}` may have {limits.prompt_characters:,} characters", param)


def check_messages(messages: Sequence[Message], limits: Limits) -> None:
    """Raises a 400 for more text or pictures, or larger data URLs, than the server allows."""
    pictures, most = [url for message in messages for url in message.pictures], limits.picture_bytes
    if len(pictures) > limits.pictures:
        raise above_limit(f"`messages` may hold {limits.pictures} pictures", "messages")
    if any(3 * len(url) > 4 * most + 192 for url in pictures):  # a byte in base64 is 4/3
        raise above_limit(f"a picture may have {most:,} bytes", "messages")
    check_length(sum(message.characters for message in messages), "messages", limits)


def call_options(
    request: Generate, drawing: Mapping[str, float], draft: Draft | None, *, num_beams: int = 1
) -> dict[str, Any]:
    """The options of a call, without lengths and structured output; several greedy answers are the same, and so one.

    `drawing`: the part of `EVERYTHING` that the model leaves open; `num_beams`: the model's default.
    """
    options = request.model_dump(include={*_SAME_NAMES}, exclude_unset=True, exclude_none=True)
    beams = request.num_beams if "num_beams" in request.model_fields_set else num_beams
    searches = beams > 1 or request.penalty_alpha
    draws = not searches or bool(request.temperature)
    options |= {"do_sample": draws, **(drawing if draws else {})}
    fields = _INHERITED if draws or request.temperature is None else ("top_k",) if request.penalty_alpha else ()
    options |= {name: value for name in fields if (value := getattr(request, name)) is not None}
    if options.get("top_k") == -1:
        options["top_k"] = 0
    is_greedy = request.temperature == 0 and not searches and request.num_samples is None
    options["num_return_sequences"] = 1 if is_greedy else request.n
    if request.min_tokens:
        options["min_new_tokens"] = request.min_tokens
    if request.logit_bias:
        options["sequence_bias"] = {(_token_id(token),): float(bias) for token, bias in request.logit_bias.items()}
    options["seed"] = request.seed if request.seed is None or request.seed >= 0 else request.seed + 2**64
    return options | _draft_options(request, draft)


def _draft_options(request: Generate, draft: Draft | None) -> dict[str, Any]:
    """Options of drafting, which the library refuses without a draft."""
    options = {name: value for name in _DRAFTING if (value := getattr(request, name)) is not None}
    if draft is not None and (not request.speculate or request.penalty_alpha):
        if request.prediction is not None:
            raise OptionError(
                "`prediction` is for drafts that copy, and this request takes none: leave one of them out"
            )
        return {**options, "assistant_model": "none"}
    if draft is not None and (request.num_assistant_branches or 1) > 1 and not draft.guesses_trees:
        raise UnsupportedError("`num_assistant_branches` is for drafts of trees, and this model has none: leave it out")
    return options


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise OptionError.of("logit_bias", "token ids as keys", text)
    return int(text)


def scoring(generator: SpecGenerator, ids: Sequence[int], top: int, salt: str | None) -> Job:
    """A job whose steps lead from the first of `ids` to the last, each with the target's `top` most likely tokens.

    The prompt is decoded again, with all other tokens masked out, and is the draft too: a pass scores many tokens.
    """

    def forced_token(text: Tensor, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -torch.inf)
        masked[:, ids[text.shape[1]]] = 0.0
        return masked

    return generator.submit(
        [[ids[0]]],
        max_new_tokens=len(ids) - 1,
        do_sample=False,
        eos_token_id=[],
        logits_processor=[forced_token],
        assistant_model="suffix",
        prediction=list(ids),
        schedule="constant",
        num_assistant_tokens=_CHUNK,
        top_logprobs=top,
        cache_salt=salt,
    )
