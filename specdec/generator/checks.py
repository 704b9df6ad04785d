"""Refuses options of a call that contradict its draft, its prompts or its target, before any pass.

`specdec.options` refuses options that contradict one another.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from specdec.core.drafts import Draft
from specdec.decoding.strategies import read_constraints
from specdec.errors import OptionError, UnsupportedError
from specdec.generator.inputs.prompts import Prompts
from specdec.models import LanguageModel
from specdec.models.capability import trained_positions
from specdec.models.hf.private_api import gathers_weights
from specdec.options.generate import Options, to_list
from specdec.options.resolve import warn_of_idle

DEFAULT_LENGTH = 20  # tokens; transformers' default for ids without any limit
_ABOUT_INPUTS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
_ID_OPTIONS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
_BRANCHING = ("schedule", "num_assistant_branches")
_DRAFTING = (*_BRANCHING, "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def check_draft(
    draft: Draft | None, options: Options, arguments: Mapping[str, Any], prediction: Any, *, in_call: bool
) -> None:
    """Raises OptionError for options that the draft cannot serve; `in_call`: the call named the draft.

    `arguments` are the options that the call itself sets. Without a draft, options of drafting are a warning.
    """
    if draft is None and (idle := [name for name in _DRAFTING if name in arguments]):
        warn_of_idle(f"`{idle[0]}` sets how much to draft, and the call has no draft: name one")
    if draft is not None and not draft.guesses_trees and (not in_call or any(name in arguments for name in _BRANCHING)):
        _check_branches(draft, options)
    if prediction is not None and (draft is None or not draft.reads_predictions):
        raise OptionError(
            f"`prediction` is for drafts that copy, and this one is {draft!r}: "
            "use draft='suffix', or a pair of 'suffix' and a model, or leave it out"
        )
    if draft is not None and options.penalty_alpha:
        raise OptionError(
            "`penalty_alpha` selects contrastive search, which looks at the target's own candidates and takes no "
            "draft: use a SpecGenerator without one, or leave out `penalty_alpha`"
        )


def _check_branches(draft: Draft, options: Options) -> None:
    """Raises OptionError where the options want trees of a draft that guesses chains."""
    is_object = options.schedule is not None and not isinstance(options.schedule, str)
    branches = options.schedule.max_branches if is_object else options.num_assistant_branches or 1
    if branches > 1:
        name = f"`schedule`={options.schedule!r}" if is_object else f"`num_assistant_branches`={branches}"
        raise OptionError(
            f"{name} asks for trees of guesses, but {draft!r} guesses one continuation at a time: "
            "leave the branches out, draft with a model that has the target's vocabulary, or set "
            "`guesses_trees = True` in a Draft of your own that guesses several"
        )


def check_call(
    options: Options, prompts: Prompts, streamer: Any, tokenizer: Any, target: LanguageModel, *, drafted: bool
) -> int:
    """The length limit of the call (`length_limit`); raises for options that its prompts or its target cannot serve."""
    rows = len(prompts.rows)
    check_gathered(target.model, options.synced_gpus)
    if streamer is not None and options.at_the_end:
        raise OptionError("`streamer` shows text as it comes, but beams and ranked samples are final at the end")
    if streamer is not None and rows > 1:
        raise OptionError(f"`streamer` shows one row, and this call has {rows}: use gen.stream()")
    if options.output_attentions:
        trees = drafted and (options.num_assistant_branches or 1) > 1
        branched = options.num_beams > 1 or bool(options.penalty_alpha) or trees
        target.check_attentions(drafted=drafted, branched=branched)
    limit = length_limit(options, prompts, target)
    if options.min_length or options.min_new_tokens:
        _check_least(options, limit, prompts, target)
    if options.stop_strings is not None and tokenizer is None:
        raise OptionError("`stop_strings` needs a tokenizer: pass `tokenizer=`")
    if isinstance(options.seed, Sequence) and len(options.seed) != rows:
        raise OptionError.of("seed", f"one number, or one for each of {rows} rows", list(options.seed))
    _check_vocabulary(options, target)
    if prompts.num_embeds_only or (target.is_encoder_decoder and prompts.rows[0].encoder_ids is None):
        for name in _ABOUT_INPUTS:
            value = getattr(options, name)
            if value not in (None, 0, 1, getattr(target.model.generation_config, name, None)):
                warn_of_idle(f"`{name}`={value} changes nothing: the input has no ids")
    return limit


def check_gathered(model: Any, synced: bool | None) -> None:
    """Raises UnsupportedError where a pass would wait for passes of other processes; `synced`: `synced_gpus`."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if synced or (synced is None and several and gathers_weights(model)):
        raise UnsupportedError(
            "`synced_gpus`, which FSDP and ZeRO-3 need, is not supported: gather the weights on every process, and "
            "pass False"
        )


def length_limit(options: Options, prompts: Prompts, target: LanguageModel) -> int:
    """The most ids of a row, padding included, as transformers counts them.

    Raises OptionError for text without a limit, for a prompt that fills the limit, and where the text needs more
    positions than the model has. Warns of a prompt with more than it was trained on.
    """
    width = prompts.padded.shape[1]
    if options.max_new_tokens is not None:
        limit = width + options.max_new_tokens
    elif options.max_length is not None:
        limit = options.max_length - prompts.num_embeds_only
    elif prompts.is_text:
        raise OptionError("a text or `messages` needs a length limit: pass `max_new_tokens=`")
    else:
        limit = width + DEFAULT_LENGTH
    if limit <= width:
        length = width + prompts.num_embeds_only
        most = options.max_length
        raise OptionError(f"`max_length`={most} leaves no room after a prompt of {length} tokens: raise it")
    # The last token is never read, except as a candidate of contrastive search.
    lengths = [len(row.tokens if row.embeds is None else row.embeds) for row in prompts.rows]
    longest = max(*lengths, *(len(row.negative or ()) for row in prompts.rows))
    positions = longest + limit - width - (not options.penalty_alpha)
    if target.max_positions is not None and positions > target.max_positions:
        raise OptionError(
            f"the prompt and its continuation may need {positions} positions, but the target has "
            f"{target.max_positions}: shorten the prompt or lower `max_new_tokens`"
        )
    trained = trained_positions(target.config)
    if trained is not None and longest > trained:
        message = f"the prompt has {longest} tokens, and the target was trained on {trained}"
        way_out = "its text may make no sense, so shorten the prompt"
        warnings.warn(f"{message} (`max_position_embeddings`): {way_out}", stacklevel=2)
    return limit


def _check_vocabulary(options: Options, target: LanguageModel) -> None:
    """Raises OptionError for ids outside the target's vocabulary, unless its checkpoint sets them."""
    bias = options.sequence_bias or ()
    ids_by_option: dict[str, Any] = {
        "bad_words_ids": options.bad_words_ids or (),
        "sequence_bias": bias if isinstance(bias, Mapping) else [ids for ids, _ in bias],
        **{name: [to_list(getattr(options, name))] for name in _ID_OPTIONS},
    }
    if options.num_beams > 1:
        ids_by_option["constraints"] = [c.ids for c in read_constraints(options.constraints, None)]
        ids_by_option["force_words_ids"] = [c.ids for c in read_constraints(None, options.force_words_ids)]
    for name, groups in ids_by_option.items():
        wrong = next(
            (i for ids in groups for i in ids if not hasattr(i, "__index__") or not 0 <= i < target.vocab_size), None
        )
        if wrong is not None and getattr(options, name) != getattr(target.model.generation_config, name, None):
            expected = f"ids from 0 to {target.vocab_size - 1}, which the target knows"
            raise OptionError.of(name, expected, wrong, "pass [] for none" if name == "eos_token_id" else "")


def _check_least(options: Options, limit: int, prompts: Prompts, target: LanguageModel) -> None:
    """Warns of least lengths beyond the limit, unless the target's checkpoint sets them."""
    width = prompts.padded.shape[1]
    leasts = {
        "min_length": (options.min_length or 0) - prompts.num_embeds_only,
        "min_new_tokens": (options.min_new_tokens or 0) + width,
    }
    for name, least in leasts.items():
        value = getattr(options, name)
        if least > limit and value != getattr(target.model.generation_config, name, None):
            warn_of_idle(
                f"`{name}`={value} is out of reach, as the text ends after {limit - width} new tokens: "
                "lower it, or raise `max_new_tokens`"
            )
