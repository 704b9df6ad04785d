"""Every option of a call: one frozen value, checked once, made from keyword arguments, a generation config and YAML.

Fields carry transformers' names. What the caller sets is checked and honoured or refused with an error; what a
checkpoint's generation config brings along is honoured where possible and never raises.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
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
# Field -> the value at which it does nothing; they mean something to a search alone.
_BEAMS_ONLY: dict[str, object] = {"early_stopping": False, "length_penalty": 1.0}
# Those refused fields that change the text.
_DECIDING = ("dola_layers", "token_healing", "use_mtp", "watermarking_config")
# Field -> the values at which it does nothing: ways of searching that a call must name, a checkpoint does not choose.
_CALLS_OWN: dict[str, tuple[object, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "force_words_ids": (None,),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
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
TokenIds = Annotated[int | list[int] | None, BeforeValidator(_plain)]


class Options(BaseModel):
    """What one call of `generate` does; the call turns it into processors, a strategy, a schedule and criteria."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # lengths and stopping
    max_length: Positive | None = None
    max_new_tokens: Positive | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    max_time: Annotated[Number, Field(gt=0)] | None = None
    stop_strings: str | list[str] | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: TokenId | None = None
    decoder_start_token_id: TokenIds = None
    # choice
    do_sample: Flag | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_h: Share | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    encoder_repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    no_repeat_ngram_size: Count | None = None
    encoder_no_repeat_ngram_size: Count | None = None
    bad_words_ids: list[list[int]] | None = None
    sequence_bias: Any = None
    renormalize_logits: Flag | None = None
    remove_invalid_values: Flag | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenIds = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    guidance_scale: Number | None = None
    num_beams: Positive | None = None
    length_penalty: Number | None = None
    early_stopping: Flag | Literal["never", "exhaustive"] | None = None
    num_beam_groups: Positive | None = None
    diversity_penalty: Annotated[Number, Field(ge=0)] | None = None
    constraints: Any = None
    force_words_ids: Any = None
    penalty_alpha: Share | None = None
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
    return_dict_in_generate: Flag | None = None
    output_scores: Flag | None = None
    output_logits: Flag | None = None
    output_attentions: Flag | None = None
    output_hidden_states: Flag | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; temperature 0 is greedy."""
        return bool(self.do_sample) and self.temperature != 0

    @property
    def beams(self) -> int:
        """How many texts are followed at once."""
        return self.num_beams or 1

    @property
    def groups(self) -> int:
        """Into how many groups the beams are divided."""
        return self.num_beam_groups or 1

    @property
    def constrained(self) -> bool:
        """Whether texts must contain given words."""
        return self.constraints is not None or self.force_words_ids is not None

    @property
    def contrastive(self) -> bool:
        """Whether the next token is chosen by contrastive search."""
        return bool(self.penalty_alpha)

    @property
    def copies(self) -> int:
        """How often a prompt is continued on its own; beams of one prompt are one search."""
        return 1 if self.beams > 1 else self.num_return_sequences or 1

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


DEFAULTS = {"top_k": 50, "temperature": 1.0, "num_return_sequences": 1, "num_beams": 1}
_EITHER = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))


def resolve(
    given: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> Options:
    """The options of a call: `given` one by one over a generation `config`, over a generator's `defaults`, over what is
    `inherited` from the checkpoint.

    Raises OptionError for a given name that is unknown, a value out of range and contradictions; UnsupportedError for a
    field that specdec does not honour (`REFUSED`), unless it was inherited.
    """
    given = _checked(given)
    defaults = _checked(defaults or {})
    layers = [DEFAULTS, _followed(inherited or {}), defaults, _understood(config or {}), given]
    try:
        options = Options(**_merged(layers))
    except ValidationError as error:
        raise _readable(error) from None
    return _settled(options, given)


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The strongest value of each field; of two fields for one thing, the stronger layer's, the first of equals."""
    merged: dict[str, Any] = {}
    for layer in layers:
        fields = dict(layer)
        for first, second in _EITHER:
            if first in fields:
                fields.pop(second, None)
            if first in fields or second in fields:
                merged.pop(first, None)
                merged.pop(second, None)
        merged |= fields
    return merged


def _settled(options: Options, given: Mapping[str, Any]) -> Options:
    """The options with what does not apply left out; raises where the caller asked for it in this very call."""
    _check_kind(options)
    if options.beams > 1:
        return _settled_beams(options, given)
    for name, neutral in _BEAMS_ONLY.items():
        if given.get(name, neutral) != neutral:
            raise OptionError(f"`{name}`={given[name]!r} belongs to beam search: set `num_beams`, or leave it out")
    if options.samples:
        return options
    if given.get("sampling") is not None:
        raise OptionError("`sampling` chooses how to draw tokens and needs `do_sample=True`: set it, or leave it out")
    if given.get("num_return_sequences", 1) > 1:
        raise OptionError(
            "`num_return_sequences` above 1 needs `do_sample=True` or `num_beams`: greedy decoding has only one answer"
        )
    return options.model_copy(update={"sampling": None, "num_return_sequences": 1})


def _check_kind(options: Options) -> None:
    """Raises where ways of searching contradict one another, or lack what they need."""
    kinds = {
        f"`num_beam_groups`={options.groups}": options.groups > 1,
        f"`{'force_words_ids' if options.constraints is None else 'constraints'}`": options.constrained,
        f"`penalty_alpha`={options.penalty_alpha}": options.contrastive,
    }
    asked = [name for name, wanted in kinds.items() if wanted]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} are different ways of searching: choose one")
    if asked and options.samples:
        raise OptionError(f"{asked[0]} does not go with sampling: leave it out, or set `do_sample=False`")
    if options.beams % options.groups:
        raise OptionError.of("num_beam_groups", f"a divisor of `num_beams`={options.beams}", options.groups)
    if (options.groups > 1) != bool(options.diversity_penalty):
        raise OptionError("`num_beam_groups` above 1 and `diversity_penalty` above 0 need each other: set both")
    if options.constrained and options.beams == 1:
        raise OptionError(f"{asked[0]} belongs to beam search: set `num_beams` to 2 or more")
    if options.contrastive and options.beams > 1:
        raise OptionError(f"{asked[0]} selects contrastive search, which has no beams: leave out it or `num_beams`")
    if options.contrastive and (options.top_k or 0) < 2:
        raise OptionError(f"{asked[0]} selects contrastive search, which needs `top_k` of 2 or more candidates")


def _settled_beams(options: Options, given: Mapping[str, Any]) -> Options:
    returned = options.num_return_sequences or 1
    if returned > options.beams and ("num_return_sequences" in given or "num_beams" in given):
        raise OptionError(
            f"`num_return_sequences`={returned} is more than `num_beams`={options.beams}: a search ends with as many "
            "texts as it has beams"
        )
    if given.get("sampling") not in (None, "coupled"):
        raise OptionError(f"`sampling`={given['sampling']!r} draws one token at a time: with beams leave it out")
    return options.model_copy(update={"sampling": None, "num_return_sequences": min(returned, options.beams)})


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


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a person wrote: known ones, under one name each, without contradictions among them."""
    given = _renamed({k: v for k, v in given.items() if v is not None})
    for name, value in given.items():
        _check_known(name, value)
    _check_contradictions(given)
    return {k: v for k, v in given.items() if k not in REFUSED}


def _understood(config: Mapping[str, Any]) -> dict[str, Any]:
    """A generation config's fields; raises for those that would change the result and cannot be honoured."""
    fields = _renamed({k: v for k, v in config.items() if v is not None})
    for name in _DECIDING:
        if name in fields:
            _check_known(name, fields[name])
    return {k: v for k, v in fields.items() if k in Options.model_fields}


def _followed(inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's fields that specdec knows; a warning names those of consequence that it cannot follow."""
    fields = {k: v for k, v in inherited.items() if v is not None}
    for name in _DECIDING:
        if fields.get(name, REFUSED[name][0]) != REFUSED[name][0]:
            warnings.warn(
                f"the checkpoint's generation config asks for {name}={fields[name]!r}, which specdec does not follow "
                f"yet: {REFUSED[name][1]}",
                stacklevel=2,
            )
    for name, neutral in _CALLS_OWN.items():
        if fields.pop(name, None) not in neutral and name != "diversity_penalty":
            warnings.warn(
                f"the checkpoint's generation config asks for {name}={inherited[name]!r}, which specdec follows only "
                "where the call sets it",
                stacklevel=2,
            )
    return {k: v for k, v in fields.items() if k in Options.model_fields and _is_valid(k, v)}


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """`num_assistant_tokens_schedule` is transformers' name for `schedule`."""
    alias = given.pop("num_assistant_tokens_schedule", None)
    if alias is None:
        return given
    if given.get("schedule", alias) != alias:
        raise OptionError(
            f"`schedule`={given['schedule']!r} and `num_assistant_tokens_schedule`={alias!r} contradict: pass one"
        )
    return {**given, "schedule": "heuristic" if alias == "heuristic_transient" else alias}


def _check_known(name: str, value: object) -> None:
    if name in REFUSED:
        neutral, way_out = REFUSED[name]
        if value != neutral:
            raise UnsupportedError(f"`{name}`={value!r} is not supported: {way_out}")
    elif name not in Options.model_fields:
        close = difflib.get_close_matches(name, [*Options.model_fields, *REFUSED], n=1, cutoff=0.8)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise OptionError(f"`{name}` is not an option of generate{hint}")


def _check_contradictions(given: Mapping[str, Any]) -> None:
    if "max_new_tokens" in given and "max_length" in given:
        raise OptionError("`max_new_tokens` and `max_length` both limit the text: pass one of them")
    schedule = given.get("schedule")
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
        if schedule == "cost" and "assistant_confidence_threshold" in given:
            raise OptionError("`assistant_confidence_threshold` and `schedule='cost'` contradict: pass one of them")
    elif schedule is not None:
        if not (hasattr(schedule, "plan") and hasattr(schedule, "after")):
            raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
        for name in ("num_assistant_tokens", "assistant_confidence_threshold"):
            if name in given:
                raise OptionError(f"`{name}` and a `schedule` object contradict: set it in the schedule")
    for low, high in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        least, most = given.get(low), given.get(high)
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise OptionError(f"`{low}`={least} is more than `{high}`={most}: lower one of them")


def _is_valid(name: str, value: Any) -> bool:
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
