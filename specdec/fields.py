"""What is known of single fields of a call: kinds of values, which are refused, which belong to one strategy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

# Field -> (the value at which it does nothing, what to do instead). The README lists them; a test compares.
REFUSED: dict[str, tuple[object, str]] = {
    "assistant_ensemble_weight": (None, "specdec never mixes the draft into the target's distribution"),
    "assistant_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "cache_config": (None, "specdec keeps keys and values in its own store; leave it out"),
    "cache_implementation": (None, "specdec keeps keys and values in its own store; leave it out"),
    "compile_config": (None, "pass `compile=True` to SpecGenerator instead"),
    "continuous_batching_config": (None, "pass a list of prompts for a batch"),
    "disable_compile": (None, "nothing is compiled unless SpecGenerator gets `compile=True`"),
    "dola_layers": (None, "DoLa is not available"),
    "is_assistant": (False, "it is transformers' own marker for a draft's inner call"),
    "low_memory": (None, "the candidates of contrastive search share one cache already; leave it out"),
    "max_cache_len": (None, "the store grows by itself"),
    "speculation_type": (None, "name the draft with `draft=` or `assistant_model=`"),
    "target_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "token_healing": (False, "heal the prompt before the call"),
    "use_mtp": (False, "multi-token prediction heads are not available; name a draft with `draft=`"),
    "watermarking_config": (None, "pass the watermark's processor through `logits_processor=`"),
}
# Those of them that change the text.
DECIDING = ("dola_layers", "token_healing", "use_mtp", "watermarking_config")
# Field that names a way of searching -> the values at which it does nothing. A checkpoint does not choose one.
SEARCHES: dict[str, tuple[object, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
}
# Field of sampling alone -> the values at which it does nothing there, or nothing that is not done anyway.
DRAWING: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_k": (0, 50),
    "top_p": (1,),
    "min_p": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "sampling": (),
    "num_samples": (1,),
    "ranking": (),
}
# The same for fields of beam search alone.
BEAMS_ONLY: dict[str, tuple[object, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "output_trace": (False,),
}
# What a value with parts must look like, where pydantic would only tell about one part.
EXPECTED = {
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
        "a token id, or a list of token ids",
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "a list of token ids"),
    "bad_words_ids": "a list of words, each a list of at least one token id",
    "exponential_decay_length_penalty": "a pair of a whole number and a factor",
    "seed": "a whole number, or a list of one for each row",
    "stop_strings": "text, or a list of texts, none of them empty",
}


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's own; one number in brackets stays a list."""
    if isinstance(value, bool) or not hasattr(value, "tolist"):
        return value
    return value.tolist()


def _one(value: object) -> object:
    """A single id, also from a list or tensor of one."""
    value = _plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True), BeforeValidator(_plain)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_plain)]
Share = Annotated[Number, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_one)]
IdList = Annotated[list[Whole], BeforeValidator(_plain)]
TokenIds = Whole | IdList | None
Text = Annotated[str, Field(min_length=1)]
