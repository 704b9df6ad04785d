"""The options of a call, merged from keyword arguments, a generation config, a generator's defaults and a checkpoint.

What the caller sets is honoured, or a warning where it changes no text, or an error: options that are unknown or
contradict one another. What a checkpoint's generation config sets is honoured where possible and never raises. What
needs the draft, the prompts or the target is refused by `specdec.generator.checks`.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError, UnsupportedError
from specdec.options.fields import BEAMS_ONLY, DRAWING, EXPECTED, IDLE, INSTEAD, OWN, REFUSED, SEARCHES, SYNONYMS
from specdec.options.generate import FORMS, Options

_EITHER = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))  # for one length: the first counts
_OF_GROUPS = ("num_beam_groups", "diversity_penalty")
_SCHEDULE = ("budgets", "after", "max_tokens", "max_branches")  # attributes of a schedule object
_refusing = ContextVar("refusing", default=False)


def resolve(
    given: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> Options:
    """The options of a call: `given` over a generation `config`, over a generator's `defaults`, over a checkpoint's.

    `defaults` are checked (`check_defaults`), `inherited` are the checkpoint's. Each field is taken from the first
    layer that sets it; then `max_new_tokens` overrides `max_length`, as in transformers. Raises OptionError for unknown
    names, values out of range and contradictions; UnsupportedError for fields in `REFUSED`, unless they are inherited.
    Options without effect warn.
    """
    given, config = _checked(given), _checked(config or {}, is_config=True)
    defaults = _waiting(defaults, {**config, **given}) if defaults else {}
    asked = {**defaults, **config, **given}
    merged = {**_followed(inherited or {}), **asked}
    for first, second in _EITHER:
        if first in merged:
            merged.pop(second, None)
    options = _valid(merged)
    if 1 in (options.num_beams, options.num_beam_groups) and (options.num_beam_groups > 1 or options.diversity_penalty):
        options = _without_groups(options)
    for first, second in _EITHER:
        if second in asked and (stronger := getattr(options, first)) is not None:
            warn_of_idle(
                f"`{second}`={asked[second]} has no effect beside `{first}`={stronger}: pass `{first}=` instead"
            )
    if options.num_beams > 1 or any(getattr(options, name) not in neutral for name, neutral in SEARCHES.items()):
        _check_search(options)
    _ = options.form  # raises where two options set it
    _check_effect(options, given, config, defaults)
    settled: dict[str, Any] = {}  # what the strategy does not read
    if options.num_beams > 1:
        branches = options.num_assistant_branches or 0
        settled = {"sampling": None, "num_return_sequences": min(options.num_return_sequences, options.num_beams)}
        settled["num_assistant_branches"] = branches if branches >= options.num_beams else None
    elif not options.samples:
        settled = {"sampling": None, "num_return_sequences": 1, "num_samples": None}
    return options.model_copy(update=settled)


def check_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults under one name each; raises OptionError for those that no call can use.

    UnsupportedError for fields in `REFUSED`.
    """
    checked = _checked(defaults)
    _valid(checked)
    return checked


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file, as keyword arguments; raises OptionError unless it is a mapping of names."""
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


@contextmanager
def refusing() -> Iterator[None]:
    """Within this context an option without effect raises instead of warning: clients of a server see no warnings."""
    before = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(before)


def warn_of_idle(message: str) -> None:
    """Warns of an option without effect; raises OptionError within `refusing`."""
    if _refusing.get():
        raise OptionError(message)
    warnings.warn(message, stacklevel=2)  # a fixed place, so that Python shows each message once


def _checked(fields: Mapping[str, Any], *, is_config: bool = False) -> dict[str, Any]:
    """The options that are set, checked, with transformers' `num_assistant_tokens_schedule` as `schedule`.

    Of a generation config, names that are no options are left out, and the schedule is not compared with others.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if (alias := fields.pop("num_assistant_tokens_schedule", None)) is not None:
        if alias not in (*SCHEDULES, "heuristic_transient"):
            raise OptionError.of("num_assistant_tokens_schedule", f"one of {', '.join(SCHEDULES)}", alias)
        if fields.get("schedule", alias) != alias:
            raise OptionError(
                f"`schedule`={fields['schedule']!r} and `num_assistant_tokens_schedule`={alias!r} contradict: pass one"
            )
        fields["schedule"] = "heuristic" if alias == "heuristic_transient" else alias
    for name in [name for name in fields if name not in Options.model_fields]:
        value = fields.pop(name)
        if name in REFUSED and value not in REFUSED[name].neutral:
            raise UnsupportedError(f"`{name}`={value!r} is not supported: {REFUSED[name].why}")
        if name in IDLE and value not in IDLE[name].neutral:
            warn_of_idle(f"`{name}`={reprlib.repr(value)} changes nothing: {IDLE[name].why}")
        if not (is_config or name in REFUSED or name in IDLE):
            raise OptionError(f"`{name}` is not an option of generate{_hint(name)}")
    if "schedule" in fields and not is_config:
        _check_schedule(fields)
    return fields


def _hint(name: str) -> str:
    """The way out for an unknown name."""
    if instead := INSTEAD.get(name) or (f"pass `{SYNONYMS[name]}=`" if name in SYNONYMS else None):
        return f": {instead}"
    close = difflib.get_close_matches(name, [*Options.model_fields, *REFUSED, *IDLE], n=1, cutoff=0.8)
    return f"; did you mean `{close[0]}`?" if close else ""


def _check_schedule(given: Mapping[str, Any]) -> None:
    """Raises OptionError for an unknown schedule, and for options that contradict it."""
    schedule = given["schedule"]
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
        if not SCHEDULES[schedule].takes_threshold and "assistant_confidence_threshold" in given:
            raise OptionError(
                f"`assistant_confidence_threshold` and `schedule={schedule!r}` contradict: pass one of them"
            )
        return
    if isinstance(schedule, type) or not all(hasattr(schedule, name) for name in _SCHEDULE):
        kinds = f"one of {', '.join(SCHEDULES)} or a Schedule, with {', '.join(_SCHEDULE)}"
        raise OptionError.of("schedule", kinds, schedule)
    for name in ("num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold"):
        if name in given:
            raise OptionError(f"`{name}` and a `schedule` object contradict: set it in the schedule")


def _waiting(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults without the lengths, forms and ways of searching that the `call` replaces."""
    idle = {name for pair in _EITHER if any(one in call for one in pair) for name in pair}
    if any(name in call for name in FORMS):
        idle |= {*FORMS}
    if call.get("do_sample"):
        idle |= {*SEARCHES}
    if call.get("num_beams") == 1:
        idle |= {*SEARCHES} - {"penalty_alpha"}
    if call.get("num_beams", 1) != 1:
        idle.add("penalty_alpha")
    return {name: value for name, value in defaults.items() if name not in idle}


def _followed(inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's valid options; warns of fields in `REFUSED` and of ways of searching."""
    not_followed = {
        name: (rule.neutral, f"which specdec does not follow: {rule.why}") for name, rule in REFUSED.items()
    }
    for name, neutral in SEARCHES.items():
        if name != "diversity_penalty":
            not_followed[name] = neutral, "which specdec follows only where the call sets it"
    for name, (neutral, why) in not_followed.items():
        if (value := inherited.get(name)) not in neutral:
            warnings.warn(f"the checkpoint's generation config asks for {name}={value!r}, {why}", stacklevel=3)
    known = {k: v for k, v in inherited.items() if v is not None and k in Options.model_fields and k not in SEARCHES}
    try:
        Options(**known)
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        return {k: v for k, v in known.items() if k not in wrong}
    return known


def _valid(fields: Mapping[str, Any]) -> Options:
    """The options with these values; raises OptionError for pydantic's first complaint."""
    try:
        return Options(**fields)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    expected = EXPECTED.get(name, first["msg"].removeprefix("Input should be "))
    raise OptionError.of(name, expected, fields[name])


def _without_groups(options: Options) -> Options:
    """The options of one beam or one group without settings of groups, of which it warns."""
    idle = {name: value for name in _OF_GROUPS if (value := getattr(options, name)) not in SEARCHES[name]}
    for name, value in idle.items():
        needed = " and ".join(f"`{one}`" for one in ("num_beams", *_OF_GROUPS) if one != name)
        warn_of_idle(f"`{name}`={value} changes nothing without {needed}: set them, or leave it out")
    return options.model_copy(update={"num_beam_groups": 1, "diversity_penalty": None})


def _check_search(options: Options) -> None:
    """Raises OptionError where ways of searching contradict one another, or lack a field."""
    beams, groups = options.num_beams, options.num_beam_groups
    kinds = {
        f"`num_beam_groups`={groups}": groups > 1,
        f"`{'force_words_ids' if options.constraints is None else 'constraints'}`": options.constrained,
        f"`penalty_alpha`={options.penalty_alpha}": bool(options.penalty_alpha),
    }
    asked = [name for name, wanted in kinds.items() if wanted]
    if options.top_logprobs is not None:
        raise OptionError(
            "`top_logprobs` needs tokens that are chosen one by one, and a search chooses whole texts: leave it out"
        )
    if beams > 1 and type(options.watermarking_config).__name__.startswith("SynthID"):
        raise UnsupportedError(
            "`watermarking_config` of the kind SynthIDTextWatermarkingConfig follows one text and no search: "
            "leave out `num_beams`, or take a WatermarkingConfig"
        )
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} are different ways of searching: choose one")
    if asked and options.samples:
        raise OptionError(f"{asked[0]} does not go with sampling: leave it out, or set `do_sample=False`")
    if beams % groups:
        raise OptionError.of("num_beam_groups", f"a divisor of `num_beams`={beams}", groups)
    if groups > 1 and not options.diversity_penalty:
        raise OptionError("`num_beam_groups` above 1 needs a `diversity_penalty` above 0: set both")
    if options.constrained and beams == 1:
        raise OptionError(f"{asked[0]} belongs to beam search: set `num_beams` to 2 or more")
    if options.penalty_alpha and beams > 1:
        raise OptionError(f"{asked[0]} selects contrastive search, which has no beams: leave out it or `num_beams`")
    if options.penalty_alpha and options.top_k < 2:
        raise OptionError(f"{asked[0]} selects contrastive search, which needs `top_k` of 2 or more candidates")


def _check_effect(
    options: Options, given: Mapping[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warns of options that the strategy ignores; raises OptionError where it cannot return as many texts as asked."""

    def asked(*choices: str) -> Mapping[str, Any]:
        """`given` over `defaults`; `given` alone where the call itself sets one of `choices`."""
        chosen = any(name in given or name in config for name in choices)
        return given if chosen else {**defaults, **given}

    if not options.do_sample:
        drawing = {name: neutral for name, neutral in DRAWING.items() if name != "top_k" or not options.penalty_alpha}
        _check_idle(asked("do_sample", "temperature"), drawing, "is about drawing tokens, which needs `do_sample=True`")
    if options.num_samples is not None and options.num_beams > 1:
        raise OptionError("`num_samples` ranks samples and `num_beams` searches: pass one of them")
    if options.num_beams > 1:
        return _check_beams(options, asked("num_beams"))
    if options.num_samples is None and asked("num_samples").get("ranking") is not None:
        raise OptionError("`ranking` orders samples, but there are none to order: pass `num_samples`")
    if options.num_samples is not None and options.num_return_sequences > options.num_samples:
        raise OptionError(
            f"`num_return_sequences`={options.num_return_sequences} is more than `num_samples`={options.num_samples}: "
            "lower it, or draw more"
        )
    _check_idle(asked("num_beams"), BEAMS_ONLY, "belongs to beam search, which needs `num_beams`")
    if not options.samples and asked("do_sample", "temperature", "num_beams").get("num_return_sequences", 1) > 1:
        raise OptionError(
            "`num_return_sequences` above 1 needs `do_sample=True` or `num_beams`: greedy decoding has only one answer"
        )


def _check_beams(options: Options, asked: Mapping[str, Any]) -> None:
    returned, beams = options.num_return_sequences, options.num_beams
    if returned > beams and ("num_return_sequences" in asked or "num_beams" in asked):
        raise OptionError(
            f"`num_return_sequences`={returned} is more than `num_beams`={beams}: a search ends with as many "
            "texts as it has beams"
        )
    if asked.get("sampling") not in (None, "coupled"):
        raise OptionError(f"`sampling`={asked['sampling']!r} draws one token at a time: with beams leave it out")
    if (branches := asked.get("num_assistant_branches")) is not None and branches < beams:
        raise OptionError.of(
            "num_assistant_branches",
            f"at least `num_beams`={beams}, as every beam must be drafted",
            branches,
        )


def _check_idle(asked: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]], why: str) -> None:
    for name, neutral in fields.items():
        if name in asked and asked[name] not in neutral:
            message = f"`{name}`={asked[name]!r} {why}: set it, or leave out `{name}`"
            if name in OWN:
                raise OptionError(message)
            warn_of_idle(message)
