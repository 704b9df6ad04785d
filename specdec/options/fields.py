"""Tables of single options: their types, the ones that are refused or belong to one strategy; and kinds of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from specdec.errors import OptionError


class Rule(NamedTuple):
    """A field without effect in specdec: its values without effect in transformers either, and the reason."""

    neutral: tuple[object, ...]
    why: str


_ANY_CACHE = (
    *("dynamic", "dynamic_full", "offloaded", "paged", "static", "offloaded_static"),
    *("sliding_window", "hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
)
_STORE = "specdec keeps keys and values in buffers of its own"
# Fields that would change the text: errors. docs/reference/models.md lists them, and a test compares.
REFUSED: dict[str, Rule] = {
    "assistant_ensemble_weight": Rule((None,), "specdec never mixes the draft into the target's distribution"),
    "cache_implementation": Rule((None, *_ANY_CACHE), f"{_STORE}, as they are; leave it out"),
    "custom_generate": Rule((None,), "specdec is the decoding method; call `model.generate` for another one"),
    "dola_layers": Rule((None,), "DoLa is not available"),
    "is_assistant": Rule((None, False), "transformers sets it for calls of a draft"),
    "past_key_values": Rule((None,), f"{_STORE}; pass the whole text, and `prefix_cache=True` to SpecGenerator"),
    "token_healing": Rule((None, False), "heal the prompt before the call"),
}
# Fields that change no text: warnings. Listed in the same place.
IDLE: dict[str, Rule] = {
    "assistant_lookbehind": Rule((None,), "the text bridge aligns by text and needs no window"),
    "cache_config": Rule((None,), _STORE),
    "cache_implementation": Rule((None,), _STORE),
    "compile_config": Rule((None,), "passes are not compiled, but recorded: see the guide on backends"),
    "continuous_batching_config": Rule((None,), "a list of prompts is a batch, and calls that overlap share passes"),
    "disable_compile": Rule((None, False), "passes are not compiled"),
    "labels": Rule((None,), "labels are for training"),
    "low_memory": Rule((None, False), "the candidates of contrastive search share one cache already"),
    "max_cache_len": Rule((None,), "buffers grow by themselves"),
    "speculation_type": Rule((None,), "`draft=` of SpecGenerator and `assistant_model=` name the draft"),
    "target_lookbehind": Rule((None,), "the text bridge aligns by text and needs no window"),
    "trust_remote_code": Rule((None, False), "models are loaded before the call, by SpecGenerator.from_pretrained"),
    "use_cache": Rule((None, True), "specdec always keeps keys and values"),
}
# Another library's name of an option -> its name here (SYNONYMS), or what to do instead (INSTEAD).
SYNONYMS = {
    # flags of the command line
    "num_draft_branches": "num_assistant_branches",
    "num_draft_tokens": "num_assistant_tokens",
    "sample": "do_sample",
    "stop": "stop_strings",
    # vLLM, OpenAI and others
    "bad_words": "bad_words_ids",
    "beam_width": "num_beams",
    "best_of": "num_samples",
    "logit_bias": "sequence_bias",
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "num_speculative_tokens": "num_assistant_tokens",
    "prompt_token_ids": "input_ids",
    "stop_sequence": "stop_strings",
    "stop_token_ids": "eos_token_id",
}
INSTEAD = {
    "chat": "pass `messages=`",
    "draft": "pass it to SpecGenerator, or `assistant_model=` to the call",
    "draft_model": "pass `draft=` to SpecGenerator, or `assistant_model=` to the call",
    "hotwords": "for Whisper there is specdec.Transcriber, with `prompt=`",
    "ignore_eos": "pass `eos_token_id=[]`",
    "initial_prompt": "for Whisper there is specdec.Transcriber, with `prompt=`",
    "language": "for Whisper there is specdec.Transcriber, or pass its ids as `decoder_input_ids=`",
    "logits_to_keep": "leave it out, as passes return the logits that are needed",
    "method": "pass `draft=` to SpecGenerator",
    "position_ids": "leave it out, as positions follow from `attention_mask`",
    "prompt_ids": "for Whisper there is specdec.Transcriber, or pass its ids as `decoder_input_ids=`",
    "return_timestamps": "for Whisper there is specdec.Transcriber",
    "sampling_params": "pass its fields as arguments",
    "speculative_config": "pass `draft=` to SpecGenerator",
    "speculative_model": "pass `draft=` to SpecGenerator",
    "stream": "call `SpecGenerator.stream`",
    "structured_outputs": "pass `guided_json=`, `guided_regex=`, `guided_grammar=` or `guided_choice=`",
    "system": "pass `messages=`",
    "task": "pass it to SpecGenerator, or Whisper's to specdec.Transcriber",
    "tgt_lang": "pass the id of the language as `decoder_input_ids=`",
    "use_beam_search": "pass `num_beams=`",
}
# Field of a way of searching -> its values without effect. A checkpoint cannot choose how to search.
SEARCHES: dict[str, tuple[object, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
}
# Way of sampling -> whether it needs q, the distributions that the draft drew from.
SAMPLING = {"coupled": False, "match": False, "rejection": True, "block": True}
# Field of sampling -> its values without effect, or with the default's effect.
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
# Field of beam search -> its values without effect.
BEAMS_ONLY: dict[str, tuple[object, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "output_trace": (False,),
}
# Fields of the two tables that transformers lacks. Set without effect they raise: no script for transformers sets them.
SPECDEC_ONLY = frozenset({"sampling", "num_samples", "ranking", "output_trace"})


class DraftWord(NamedTuple):
    """A word for a draft, as it is known before torch is loaded.

    `module` and `kind`: the module in `specdec.proposers` and its class. `argument`: the name of the argument after a
    colon, "N" for a number, None for no argument. `copies`: it copies from the text, so it may be the first of a pair
    and takes a `prediction`. `follows`: it may be the second of a pair, as a model may.
    """

    module: str
    kind: str
    argument: str | None = None
    copies: bool = False
    follows: bool = False

    def takes(self, argument: str | None) -> bool:
        """Whether `argument` may follow the word's colon; None: no colon."""
        if self.argument is None or argument is None:
            return self.argument is argument
        return argument.isdecimal() if self.argument == "N" else bool(argument)


# Every word for a draft; `specdec.proposers.DRAFTS` has the classes. The first word that copies is the default.
DRAFT_WORDS: dict[str, DraftWord] = {
    "suffix": DraftWord("suffix", "SuffixDraft", copies=True),
    "ngram": DraftWord("ngram", "NgramDraft", copies=True),
    "early_exit": DraftWord("self_drafts", "EarlyExitDraft", argument="N"),
    "quantized": DraftWord("self_drafts", "QuantizedDraft", follows=True),
    "mtp": DraftWord("heads.mtp", "MtpDraft"),
}
# The words of drafts that copy, which may be paired with a model.
COPYING = tuple(name for name, word in DRAFT_WORDS.items() if word.copies)
# Field -> the words for its values, which have parts; pydantic would name one part only.
EXPECTED = {
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
        "a token id, or a list of token ids",
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "a list of token ids"),
    "bad_words_ids": "a list of words, each a list of at least one token id",
    "exponential_decay_length_penalty": "a pair of a whole number and a factor",
    "sequence_bias": "a number per sequence of ids: {(id, ...): bias}, or pairs [[id, ...], bias]",
    "watermarking_config": "a transformers WatermarkingConfig or SynthIDTextWatermarkingConfig, or its fields",
    "guided_json": "a JSON schema, as a mapping, its text or a pydantic model",
    "guided_regex": "a regular expression, as text that is not empty",
    "guided_grammar": "a grammar in Lark's notation, as text that is not empty",
    "guided_choice": "a list of texts, none of them empty",
    "response_format": "{'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': {…}}}",
    "sampling": f"one of {', '.join(SAMPLING)}",
    "seed": "a whole number, or a list of one for each row",
    "stop_strings": "text, or a list of texts, none of them empty",
}


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python objects; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def pop_fields(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names, removed from `fields`."""
    return {name: fields.pop(name) for name in names if name in fields}


def is_list(value: object) -> bool:
    """Whether `value` is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of Python, numpy or torch, not a bool."""
    return type(value) is int or (
        isinstance(value, Integral) and not isinstance(value, bool)
    )  # the first test is faster


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises OptionError unless the argument `name` is an integer of at least `least`."""
    if not is_whole(value) or value < least:
        raise OptionError.of(name, f"a whole number of at least {least}", value)


def is_number(value: object) -> bool:
    """Whether `value` is an int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _single_id(value: object) -> object:
    """An id, or the id in a list or tensor of length 1."""
    value = plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _sampling(name: str) -> str:
    if name not in SAMPLING:
        raise ValueError(EXPECTED["sampling"])
    return name


def _schema(value: Any) -> Any:
    """A JSON schema, or the schema of a pydantic model."""
    return value.model_json_schema() if hasattr(value, "model_json_schema") else value


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's field, with a JSON schema where its type says so."""
    wrapper = value.get("json_schema")
    kinds = ("text", "json_object") if wrapper is None else ("json_schema",)
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else wrapper
    if value.get("type") not in kinds or not isinstance(schema, Mapping | None):
        raise ValueError(EXPECTED["response_format"])
    return value


def _bias(value: Any) -> Any:
    """transformers' two shapes: a mapping of tuples of ids, or pairs of a list of ids and a number."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], list | tuple) and is_number(pair[1])
        for pair in pairs
    ):
        return value
    raise ValueError(EXPECTED["sequence_bias"])


def _watermark(value: Any) -> Any:
    """transformers' watermarking config, or a config made from its fields, as in a file."""
    if isinstance(value, Mapping):
        from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

        kind = SynthIDTextWatermarkingConfig if "keys" in value else WatermarkingConfig
        try:
            value = kind(**value)
        except TypeError as error:
            raise ValueError(str(error)) from None
    if not hasattr(value, "construct_processor"):
        raise ValueError(EXPECTED["watermarking_config"])
    return value


Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True), BeforeValidator(plain)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(plain)]
Share = Annotated[Number, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_single_id)]
IdList = Annotated[list[Whole], BeforeValidator(plain)]
TokenIds = Whole | IdList | None
Text = Annotated[str, Field(min_length=1)]
Schema = Annotated[dict[str, Any] | Text, BeforeValidator(_schema)]
ResponseFormat = Annotated[dict[str, Any], AfterValidator(_response_format)]
Sampling = Annotated[str, AfterValidator(_sampling)]
Bias = Annotated[Any, AfterValidator(_bias)]
Watermark = Annotated[Any, AfterValidator(_watermark)]
