"""Every option of a call: one frozen value, checked once, made from keyword arguments, a generation config and YAML.

Fields carry transformers' names. What the caller sets is checked, and honoured, or a warning where it changes no text,
or an error; what a checkpoint's generation config brings along is honoured where possible and never raises.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError, UnsupportedError
from specdec.options.checks import warn_of_idle
from specdec.options.fields import (
    BEAMS_ONLY,
    DRAWING,
    EXPECTED,
    IDLE,
    INSTEAD,
    OWN,
    REFUSED,
    SAMPLING,
    SEARCHES,
    SYNONYMS,
    Count,
    Flag,
    IdList,
    Number,
    Positive,
    Sampling,
    Share,
    Text,
    TokenId,
    TokenIds,
    Watermark,
    Whole,
)


class Options(BaseModel):
    """What one call of `generate` does; the call turns it into processors, a strategy, a schedule and criteria."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # lengths and stopping
    max_length: Positive | None = None
    max_new_tokens: Positive | None = None
    min_length: Count | None = None
    min_new_tokens: Count | None = None
    max_time: Annotated[Number, Field(gt=0)] | None = None
    stop_strings: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    include_stop_str_in_output: Flag | None = None
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
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    no_repeat_ngram_size: Count | None = None
    encoder_no_repeat_ngram_size: Count | None = None
    bad_words_ids: list[Annotated[IdList, Field(min_length=1)]] | None = None
    sequence_bias: Any = None
    renormalize_logits: Flag | None = None
    remove_invalid_values: Flag | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenIds = None
    exponential_decay_length_penalty: tuple[Whole, Number] | None = None
    suppress_tokens: IdList | None = None
    begin_suppress_tokens: IdList | None = None
    guidance_scale: Number | None = None
    watermarking_config: Watermark | None = None
    num_beams: Positive | None = None
    length_penalty: Number | None = None
    early_stopping: Flag | Literal["never", "exhaustive"] | None = None
    num_beam_groups: Positive | None = None
    diversity_penalty: Annotated[Number, Field(ge=0)] | None = None
    constraints: Any = None
    force_words_ids: Any = None
    penalty_alpha: Share | None = None
    num_return_sequences: Positive | None = None
    num_samples: Positive | None = None
    ranking: Literal["mean", "sum"] | None = None
    seed: Whole | IdList | None = None
    sampling: Sampling | None = None
    # drafting
    schedule: Any = None
    num_assistant_tokens: Positive | None = None
    num_assistant_branches: Positive | None = None
    assistant_confidence_threshold: Share | None = None
    prefill_chunk_size: Positive | None = None
    synced_gpus: Flag | None = None
    # outputs
    return_dict_in_generate: Flag | None = None
    output_scores: Flag | None = None
    output_logits: Flag | None = None
    output_attentions: Flag | None = None
    output_hidden_states: Flag | None = None
    output_trace: Flag | None = None
    top_logprobs: Count | None = None

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
        return 1 if self.beams > 1 else self.num_samples or self.num_return_sequences or 1

    @property
    def returned(self) -> int:
        """How many texts of each prompt are returned."""
        return (self.num_return_sequences or 1) if self.at_the_end else self.copies

    @property
    def at_the_end(self) -> bool:
        """Whether only the end of the call tells which text was chosen."""
        return self.beams > 1 or self.num_samples is not None

    @property
    def cuts_stop_strings(self) -> bool:
        """Whether the stop string that ended a text is left out of it; as in transformers it stays by default."""
        return self.include_stop_str_in_output is False

    @property
    def needs_q(self) -> bool:
        """Whether verification looks at the distributions that the draft drew from, and not only at its tokens."""
        return SAMPLING.get(self.sampling or "", False)

    @property
    def family(self) -> tuple[Any, ...]:
        """What calls have in common whose drafts may be expected to cost and to bring alike."""
        sampling = (self.sampling or "coupled") if self.samples else None
        return sampling, self.beams, self.groups, self.constrained, self.num_assistant_branches

    @property
    def eos_ids(self) -> list[int]:
        """All ids that end a row."""
        return listed(self.eos_token_id)

    @property
    def start_ids(self) -> list[int]:
        """The first decoder ids of an encoder-decoder model: one for all rows, or one each."""
        return listed(self.decoder_start_token_id if self.decoder_start_token_id is not None else self.bos_token_id)


def listed(value: int | list[int] | None) -> list[int]:
    """No id, one or several, as a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


DEFAULTS = {"top_k": 50, "temperature": 1.0, "num_return_sequences": 1, "num_beams": 1}
_SCHEDULE = ("plan", "after", "max_branches")  # what a schedule of the caller's own must have
_OF_GROUPS = ("num_beam_groups", "diversity_penalty")
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

    As in transformers, each field is the strongest layer's, and `max_new_tokens` then counts, not `max_length`. Raises
    OptionError for a given name that is unknown, a value out of range, and contradictions; UnsupportedError for a field
    that would change the text and that specdec does not honour (`REFUSED`), unless it was inherited. What a person set
    and changes no text is a warning.
    """
    given, defaults, config = _checked(given), _checked(defaults or {}), _understood(config or {})
    defaults = _waiting(defaults, {**config, **given})
    options = _grouped(_valid(_merged([DEFAULTS, _followed(inherited or {}), defaults, config, given])))
    _check_lengths(options, {**defaults, **config, **given})
    _check_search(options)
    _check_effect(options, given, config, defaults)
    return _settled(options)


def _waiting(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults without lengths and ways of searching that the call replaces: these wait for another."""
    idle = {name for pair in _EITHER if any(one in call for one in pair) for name in pair}
    if call.get("do_sample"):
        idle |= {*SEARCHES}
    if call.get("num_beams") == 1:
        idle |= {*SEARCHES} - {"penalty_alpha"}
    if call.get("num_beams", 1) != 1:
        idle.add("penalty_alpha")
    return {name: value for name, value in defaults.items() if name not in idle}


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises OptionError for what no call could use, UnsupportedError for what specdec does not honour."""
    _valid(_checked(defaults))


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The strongest value of each field; of two fields for one length, the first, whichever layer it comes from."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    hidden = {second for first, second in _EITHER if first in merged}
    return {name: value for name, value in merged.items() if name not in hidden}


def _grouped(options: Options) -> Options:
    """The options without settings of groups, of which it warns, where there is one beam or one group."""
    if options.beams > 1 and options.groups > 1:
        return options
    idle = [name for name in _OF_GROUPS if getattr(options, name) not in SEARCHES[name]]
    for name in idle:
        needed = " and ".join(f"`{one}`" for one in ("num_beams", *_OF_GROUPS) if one != name)
        warn_of_idle(f"`{name}`={getattr(options, name)} changes nothing without {needed}: set them, or leave it out")
    return options.model_copy(update=dict.fromkeys(idle))


def _check_lengths(options: Options, asked: Mapping[str, Any]) -> None:
    """Warns of a length that a person set and another one, of a checkpoint perhaps, stands before."""
    for first, second in _EITHER:
        if second in asked and (stronger := getattr(options, first)) is not None:
            warn_of_idle(
                f"`{second}`={asked[second]} has no effect beside `{first}`={stronger}: pass `{first}=` instead"
            )


def _check_effect(
    options: Options, given: Mapping[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warns of what a person set and this kind of decoding does not read; raises where a text less would come back."""

    def asked(*choices: str) -> Mapping[str, Any]:
        """`given` over `defaults`, which may wait for another call where this one makes the choice itself."""
        chosen = any(name in given or name in config for name in choices)
        return given if chosen else {**defaults, **given}

    if not options.do_sample:
        drawing = {name: neutral for name, neutral in DRAWING.items() if name != "top_k" or not options.contrastive}
        _check_idle(asked("do_sample", "temperature"), drawing, "is about drawing tokens, which needs `do_sample=True`")
    if options.num_samples is not None and options.beams > 1:
        raise OptionError("`num_samples` ranks samples and `num_beams` searches: pass one of them")
    if options.beams > 1:
        return _check_beams(options, asked("num_beams"))
    if options.num_samples is None and asked("num_samples").get("ranking") is not None:
        raise OptionError("`ranking` orders samples, but there are none to order: pass `num_samples`")
    if options.num_samples is not None and (options.num_return_sequences or 1) > options.num_samples:
        raise OptionError(
            f"`num_return_sequences`={options.num_return_sequences} is more than `num_samples`={options.num_samples}: "
            "lower it, or draw more"
        )
    _check_idle(asked("num_beams"), BEAMS_ONLY, "belongs to beam search, which needs `num_beams`")
    if not options.samples and asked("do_sample", "temperature", "num_beams").get("num_return_sequences", 1) > 1:
        raise OptionError(
            "`num_return_sequences` above 1 needs `do_sample=True` or `num_beams`: greedy decoding has only one answer"
        )


def _check_search(options: Options) -> None:
    """Raises where ways of searching contradict one another, or lack what they need."""
    kinds = {
        f"`num_beam_groups`={options.groups}": options.groups > 1,
        f"`{'force_words_ids' if options.constraints is None else 'constraints'}`": options.constrained,
        f"`penalty_alpha`={options.penalty_alpha}": options.contrastive,
    }
    asked = [name for name, wanted in kinds.items() if wanted]
    if options.top_logprobs is not None and (options.beams > 1 or options.contrastive):
        raise OptionError("`top_logprobs` tells of every token as it is chosen, which a search does not: leave it out")
    if options.beams > 1 and type(options.watermarking_config).__name__.startswith("SynthID"):
        raise UnsupportedError(
            "`watermarking_config` of the kind SynthIDTextWatermarkingConfig follows one text and no search: "
            "leave out `num_beams`, or take a WatermarkingConfig"
        )
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} are different ways of searching: choose one")
    if asked and options.samples:
        raise OptionError(f"{asked[0]} does not go with sampling: leave it out, or set `do_sample=False`")
    if options.beams % options.groups:
        raise OptionError.of("num_beam_groups", f"a divisor of `num_beams`={options.beams}", options.groups)
    if options.groups > 1 and not options.diversity_penalty:
        raise OptionError("`num_beam_groups` above 1 needs a `diversity_penalty` above 0: set both")
    if options.constrained and options.beams == 1:
        raise OptionError(f"{asked[0]} belongs to beam search: set `num_beams` to 2 or more")
    if options.contrastive and options.beams > 1:
        raise OptionError(f"{asked[0]} selects contrastive search, which has no beams: leave out it or `num_beams`")
    if options.contrastive and (options.top_k or 0) < 2:
        raise OptionError(f"{asked[0]} selects contrastive search, which needs `top_k` of 2 or more candidates")


def _check_idle(asked: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]], why: str) -> None:
    for name, neutral in fields.items():
        if name in asked and asked[name] not in neutral:
            message = f"`{name}`={asked[name]!r} {why}: set it, or leave out `{name}`"
            if name in OWN:
                raise OptionError(message)
            warn_of_idle(message)


def _check_beams(options: Options, asked: Mapping[str, Any]) -> None:
    returned = options.num_return_sequences or 1
    if returned > options.beams and ("num_return_sequences" in asked or "num_beams" in asked):
        raise OptionError(
            f"`num_return_sequences`={returned} is more than `num_beams`={options.beams}: a search ends with as many "
            "texts as it has beams"
        )
    if asked.get("sampling") not in (None, "coupled"):
        raise OptionError(f"`sampling`={asked['sampling']!r} draws one token at a time: with beams leave it out")
    if (branches := asked.get("num_assistant_branches")) is not None and branches < options.beams:
        raise OptionError.of(
            "num_assistant_branches", f"at least `num_beams`={options.beams}, as every beam must be drafted", branches
        )


def _settled(options: Options) -> Options:
    """The options with what does not apply left out."""
    if options.beams > 1:
        returned = min(options.num_return_sequences or 1, options.beams)
        branches = options.num_assistant_branches
        enough = branches if (branches or 0) >= options.beams else None
        settled = {"sampling": None, "num_return_sequences": returned, "num_assistant_branches": enough}
        return options.model_copy(update=settled)
    if options.samples:
        return options
    return options.model_copy(update={"sampling": None, "num_return_sequences": 1, "num_samples": None})


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file, as keyword arguments; raises OptionError where the file is not a mapping of names."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError.of("config", "a readable YAML file", str(path), str(error)) from None
    except UnicodeDecodeError as error:
        raise OptionError.of("config", "a YAML file in UTF-8", str(path), str(error)) from None
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
    return {k: v for k, v in given.items() if k in Options.model_fields}


def _understood(config: Mapping[str, Any]) -> dict[str, Any]:
    """A generation config's fields; raises for those that would change the result and cannot be honoured."""
    fields = _renamed({k: v for k, v in config.items() if v is not None})
    for name in (*REFUSED, *IDLE):
        if name in fields:
            _check_known(name, fields[name])
    return {k: v for k, v in fields.items() if k in Options.model_fields}


def _followed(inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's fields that specdec knows; a warning names those of consequence that it cannot follow."""
    given = {k: v for k, v in inherited.items() if v is not None}
    content = repr(sorted(given.items()))  # what is compared when a checkpoint comes again
    if content not in _CHECKPOINTS:
        if len(_CHECKPOINTS) >= _MOST_CHECKPOINTS:
            _CHECKPOINTS.clear()
        _CHECKPOINTS[content] = _settings(given)
    fields, complaints = _CHECKPOINTS[content]
    for complaint in complaints:
        warnings.warn(f"the checkpoint's generation config asks for {complaint}", stacklevel=3)
    return fields


_CHECKPOINTS: dict[str, tuple[dict[str, Any], list[str]]] = {}
_MOST_CHECKPOINTS = 32


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's fields that are valid options, and what it asks for in vain."""
    complaints = [
        f"{name}={given[name]!r}, which specdec does not follow: {rule.why}"
        for name, rule in REFUSED.items()
        if given.get(name) not in rule.neutral
    ]
    complaints += [
        f"{name}={given[name]!r}, which specdec follows only where the call sets it"
        for name, neutral in SEARCHES.items()
        if given.get(name) not in neutral and name != "diversity_penalty"
    ]
    known = {k: v for k, v in given.items() if k in Options.model_fields and k not in SEARCHES}
    return {k: v for k, v in known.items() if _is_valid(k, v)}, complaints


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """`num_assistant_tokens_schedule` is transformers' name for `schedule`."""
    alias = given.pop("num_assistant_tokens_schedule", None)
    if alias is None:
        return given
    if alias not in (*SCHEDULES, "heuristic_transient"):
        raise OptionError.of("num_assistant_tokens_schedule", f"one of {', '.join(SCHEDULES)}", alias)
    if given.get("schedule", alias) != alias:
        raise OptionError(
            f"`schedule`={given['schedule']!r} and `num_assistant_tokens_schedule`={alias!r} contradict: pass one"
        )
    return {**given, "schedule": "heuristic" if alias == "heuristic_transient" else alias}


def _check_known(name: str, value: object) -> None:
    """Raises for a name that is no option and for a value that would change the text; warns of one that would not."""
    if name in REFUSED and value not in REFUSED[name].neutral:
        raise UnsupportedError(f"`{name}`={value!r} is not supported: {REFUSED[name].why}")
    if name in IDLE and value not in IDLE[name].neutral:
        warn_of_idle(f"`{name}`={reprlib.repr(value)} changes nothing: {IDLE[name].why}")
    if name in Options.model_fields or name in REFUSED or name in IDLE:
        return
    hint = ""
    if instead := INSTEAD.get(name) or (f"pass `{SYNONYMS[name]}=`" if name in SYNONYMS else None):
        hint = f": {instead}"
    elif close := difflib.get_close_matches(name, [*Options.model_fields, *REFUSED, *IDLE], n=1, cutoff=0.8):
        hint = f"; did you mean `{close[0]}`?"
    raise OptionError(f"`{name}` is not an option of generate{hint}")


def _check_contradictions(given: Mapping[str, Any]) -> None:
    schedule = given.get("schedule")
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
        if not SCHEDULES[schedule].takes_threshold and "assistant_confidence_threshold" in given:
            raise OptionError(
                f"`assistant_confidence_threshold` and `schedule={schedule!r}` contradict: pass one of them"
            )
    elif schedule is not None:
        if isinstance(schedule, type) or not all(hasattr(schedule, name) for name in _SCHEDULE):
            kinds = f"one of {', '.join(SCHEDULES)} or a Schedule, with {', '.join(_SCHEDULE)}"
            raise OptionError.of("schedule", kinds, schedule)
        for name in ("num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold"):
            if name in given:
                raise OptionError(f"`{name}` and a `schedule` object contradict: set it in the schedule")


def _is_valid(name: str, value: Any) -> bool:
    try:
        Options(**{name: value})
    except ValidationError:
        return False
    return True


def _valid(fields: Mapping[str, Any]) -> Options:
    """The options with these values; the first complaint of pydantic becomes one of ours."""
    try:
        return Options(**fields)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    expected = EXPECTED.get(name, first["msg"].removeprefix("Input should be "))
    raise OptionError.of(name, expected, fields[name])
