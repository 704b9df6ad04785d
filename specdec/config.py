"""Every option of a call: one frozen value, checked once, made from keyword arguments, a generation config and YAML.

Fields carry transformers' names. What the caller sets is checked and honoured or refused with an error; what a
checkpoint's generation config brings along is honoured where possible and never raises.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specdec.errors import OptionError, UnsupportedError

SCHEDULES = ("heuristic", "constant", "confidence", "cost")
SAMPLINGS = ("coupled", "match", "rejection", "block")

# Field -> (the value at which it does nothing, what to do instead). The README lists them; a test compares.
REFUSED: dict[str, tuple[object, str]] = {
    "assistant_ensemble_weight": (None, "specdec never mixes the draft into the target's distribution"),
    "assistant_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "cache_config": (None, "specdec keeps keys and values in its own store; leave it out"),
    "cache_implementation": (None, "specdec keeps keys and values in its own store; leave it out"),
    "compile_config": (None, "pass `compile=True` to SpecGenerator instead"),
    "constraints": (None, "constrained beam search is not available yet; use `prefix_allowed_tokens_fn`"),
    "continuous_batching_config": (None, "pass a list of prompts for a batch"),
    "disable_compile": (None, "nothing is compiled unless SpecGenerator gets `compile=True`"),
    "diversity_penalty": (0.0, "group beam search is not available yet"),
    "dola_layers": (None, "DoLa is not available"),
    "early_stopping": (False, "it belongs to beam search, which is not available yet"),
    "force_words_ids": (None, "constrained beam search is not available yet; use `prefix_allowed_tokens_fn`"),
    "is_assistant": (False, "it is transformers' own marker for a draft's inner call"),
    "length_penalty": (1.0, "it belongs to beam search, which is not available yet"),
    "low_memory": (None, "it belongs to contrastive search, which is not available yet"),
    "max_cache_len": (None, "the store grows by itself"),
    "num_beam_groups": (1, "group beam search is not available yet"),
    "num_beams": (1, "beam search is not available yet; use num_beams=1, or model.generate for beams"),
    "penalty_alpha": (None, "contrastive search is not available yet"),
    "speculation_type": (None, "name the draft with `draft=` or `assistant_model=`"),
    "target_lookbehind": (None, "the text bridge aligns by text and needs no window; leave it out"),
    "token_healing": (False, "heal the prompt before the call"),
    "use_mtp": (False, "multi-token prediction heads are not available; name a draft with `draft=`"),
    "watermarking_config": (None, "pass the watermark's processor through `logits_processor=`"),
}
_PRIVATE = {"transformers_version", "_from_model_config", "_commit_hash"}


def _as_list(value: object) -> object:
    """Tensors and arrays as plain lists or numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[int, Field(ge=1, strict=True)]
TokenIds = Annotated[int | list[int] | None, BeforeValidator(_as_list)]
Share = Annotated[float, Field(ge=0, le=1)]


class Options(BaseModel):
    """What one call of `generate` does; `SpecGenerator` turns it into processors, a strategy, a schedule and criteria."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # lengths and stopping
    max_length: Positive | None = None
    max_new_tokens: Positive | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    max_time: Annotated[float, Field(gt=0)] | None = None
    stop_strings: str | list[str] | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: Annotated[int | None, BeforeValidator(_as_list)] = None
    decoder_start_token_id: TokenIds = None
    # choice
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_h: Share | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    encoder_repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    no_repeat_ngram_size: Count | None = None
    encoder_no_repeat_ngram_size: Count | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: Any = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    guidance_scale: float | None = None
    num_return_sequences: Positive | None = None
    seed: int | list[int] | None = None
    sampling: Literal["coupled", "match", "rejection", "block"] | None = None
    # drafting
    schedule: Any = None
    num_assistant_tokens: Positive | None = None
    assistant_confidence_threshold: Share | None = None
    prefill_chunk_size: Positive | None = None
    # outputs
    use_cache: Literal[True] | None = None
    return_dict_in_generate: bool | None = None
    output_scores: bool | None = None
    output_logits: bool | None = None
    output_attentions: bool | None = None
    output_hidden_states: bool | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; temperature 0 is greedy."""
        return bool(self.do_sample) and self.temperature != 0

    @property
    def eos_ids(self) -> list[int]:
        """All ids that end a row."""
        return _ids(self.eos_token_id)

    @property
    def start_ids(self) -> list[int]:
        """The first decoder ids of an encoder-decoder model: one for all rows, or one each."""
        return _ids(self.decoder_start_token_id if self.decoder_start_token_id is not None else self.bos_token_id)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


DEFAULTS = {"top_k": 50, "temperature": 1.0, "assistant_confidence_threshold": 0.4, "num_return_sequences": 1}


def resolve(
    given: Mapping[str, Any], inherited: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Options:
    """The options of a call: `given` by the caller over `inherited` from the checkpoint over `defaults`.

    Raises OptionError for a given name that is unknown or a value out of range, UnsupportedError for a given field
    that specdec does not honour (`REFUSED`), and for contradictions.
    """
    given = _renamed({k: v for k, v in given.items() if v is not None})
    for name, value in given.items():
        _check_known(name, value)
    given = {k: v for k, v in given.items() if k not in REFUSED}
    _check_contradictions(given)
    base = {**DEFAULTS, **(defaults or {}), **_honoured(inherited, given)}
    try:
        return Options(**{**base, **given})
    except ValidationError as error:
        raise _readable(error) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file, as keyword arguments; raises OptionError where the file is not a mapping of names."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError.of("config", "a readable YAML file", str(path), str(error)) from None
    except yaml.YAMLError as error:
        raise OptionError.of("config", "valid YAML", str(path), str(error)) from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise OptionError.of("config", "a YAML mapping of option names to values", type(loaded).__name__)
    return loaded


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """`num_assistant_tokens_schedule` is transformers' name for `schedule`."""
    alias = given.pop("num_assistant_tokens_schedule", None)
    if alias is None:
        return given
    if given.get("schedule", alias) != alias:
        raise OptionError(
            f"`schedule`={given['schedule']!r} and `num_assistant_tokens_schedule`={alias!r} contradict: pass one of them"
        )
    return {**given, "schedule": "heuristic" if alias == "heuristic_transient" else alias}


def _check_known(name: str, value: object) -> None:
    if name in REFUSED:
        neutral, way_out = REFUSED[name]
        if value != neutral:
            raise UnsupportedError(f"`{name}`={value!r} is not supported: {way_out}")
    elif name not in Options.model_fields:
        close = difflib.get_close_matches(name, [*Options.model_fields, *REFUSED], n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise OptionError(f"`{name}` is not an option of generate{hint}")


def _check_contradictions(given: Mapping[str, Any]) -> None:
    samples = given.get("do_sample")
    if given.get("sampling") is not None and not samples:
        raise OptionError("`sampling` chooses how to draw tokens and needs `do_sample=True`: set it, or leave it out")
    if given.get("max_new_tokens") is not None and given.get("max_length") is not None:
        raise OptionError("`max_new_tokens` and `max_length` both limit the text: pass one of them")
    schedule = given.get("schedule")
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
    if schedule == "constant" and given.get("num_assistant_tokens") == 0:
        raise OptionError.of("num_assistant_tokens", "at least 1", 0, "pass `draft=None` for plain decoding")
    if given.get("num_return_sequences", 1) > 1 and not samples:
        raise OptionError("`num_return_sequences` above 1 needs `do_sample=True`: greedy decoding has only one answer")
    low, high = given.get("min_new_tokens"), given.get("max_new_tokens")
    if low is not None and high is not None and low > high:
        raise OptionError(f"`min_new_tokens`={low} is more than `max_new_tokens`={high}: lower one of them")
    low, high = given.get("min_length"), given.get("max_length")
    if low is not None and high is not None and low > high:
        raise OptionError(f"`min_length`={low} is more than `max_length`={high}: lower one of them")


def _honoured(inherited: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's fields that specdec knows; a warning names those that it cannot follow."""
    kept = {}
    for name, value in inherited.items():
        if value is None or name in given or name in _PRIVATE:
            continue
        if name in Options.model_fields and _is_valid(name, value):
            kept[name] = value
        elif name in REFUSED and value != REFUSED[name][0] and name in ("num_beams", "penalty_alpha"):
            warnings.warn(
                f"the checkpoint's generation config asks for {name}={value!r}, which specdec does not follow yet: "
                f"{REFUSED[name][1]}",
                stacklevel=4,
            )
    if "max_new_tokens" in given or "max_new_tokens" in kept:
        kept.pop("max_length", None)
    if "max_length" in given:
        kept.pop("max_new_tokens", None)
    if "min_new_tokens" in given:
        kept.pop("min_length", None)
    return kept


def _is_valid(name: str, value: object) -> bool:
    try:
        Options(**{name: value})
    except ValidationError:
        return False
    return True


def _readable(error: ValidationError) -> OptionError:
    """The first complaint of pydantic, as one of ours."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    expected = first["msg"].replace("Input should be ", "").replace("a valid ", "a ")
    return OptionError.of(name, expected, first["input"])
