"""The options of a call, merged from keyword arguments, a generation config, a generator's defaults and a checkpoint.

An option of the caller is honoured, warns where it changes no text, or raises where it is unknown or contradicts
another. An option of a checkpoint's generation config is honoured where possible and never raises. Checks that need the
draft, the prompts or the target are in `specdec.generator.checks`.
"""

from __future__ import annotations

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
from specdec.errors import OptionError, UnsupportedError, closest_name
from specdec.options.fields import (
    BEAMS_ONLY,
    DRAWING,
    EXPECTED,
    IDLE,
    INSTEAD,
    REFUSED,
    SEARCHES,
    SPECDEC_ONLY,
    SYNONYMS,
)
from specdec.options.generate import FORMS, Options

_LENGTHS = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))  # two names: the first counts
_GROUP_FIELDS = ("num_beam_groups", "diversity_penalty")
_SCHEDULE = ("budgets", "after", "max_tokens", "max_branches")  # attributes of a schedule object
_refusing = ContextVar("refusing", default=False)


def resolve(
    arguments: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> Options:
    """The options of a call: `arguments` over a generation `config`, over a generator's `defaults`, over `inherited`.

    `defaults` are checked (`check_defaults`), `inherited` are the checkpoint's. Each field is taken from the first
    layer that sets it; then `max_new_tokens` overrides `max_length`, as in transformers. Raises OptionError for unknown
    names, values out of range and contradictions; UnsupportedError for fields in `REFUSED`, unless they are inherited.
    Options without effect warn.
    """
    arguments, config = _checked(arguments), _checked(config or {}, is_config=True)
    defaults = _unreplaced(defaults, {**config, **arguments}) if defaults else {}
    settings = {**defaults, **config, **arguments}
    merged = {**_inheritable(inherited or {}), **settings}
    for first, second in _LENGTHS:
        if first in merged:
            merged.pop(second, None)
    options = _valid(merged)
    if 1 in (options.num_beams, options.num_beam_groups) and (options.num_beam_groups > 1 or options.diversity_penalty):
        options = _without_groups(options)
    for first, second in _LENGTHS:
        if second in settings and (stronger := getattr(options, first)) is not None:
            warn_of_idle(
                f"`{second}`={settings[second]} has no effect beside `{first}`={stronger}: pass `{first}=` instead"
            )
    if options.num_beams > 1 or any(getattr(options, name) not in neutral for name, neutral in SEARCHES.items()):
        _check_search(options)
    _ = options.form  # raises where two options set it
    _check_effect(options, arguments, config, defaults)
    update: dict[str, Any] = {}  # fields that the strategy does not read
    if options.num_beams > 1:
        branches = options.num_assistant_branches or 0
        update = {"sampling": None, "num_return_sequences": min(options.num_return_sequences, options.num_beams)}
        update["num_assistant_branches"] = branches if branches >= options.num_beams else None
    elif not options.samples:
        update = {"sampling": None, "num_return_sequences": 1, "num_samples": None}
    return options.model_copy(update=update)


def check_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults under one name each; raises OptionError for defaults that no call can use.

    UnsupportedError for fields in `REFUSED`.
    """
    checked = _checked(defaults)
    _valid(checked)
    return checked


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The options in a YAML file, as keyword arguments; raises OptionError unless it is a mapping of names."""
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError.of("config", "a readable YAML file", str(path), str(error)) from None
    except UnicodeDecodeError as error:
        raise OptionError.of("config", "a YAML file in UTF-8", str(path), str(error)) from None
    except yaml.YAMLError as error:
        raise OptionError.of("config", "valid YAML", str(path), str(error)) from None
    if not isinstance(options, dict) or not all(isinstance(k, str) for k in options):
        raise OptionError.of("config", "a YAML mapping of option names to values", type(options).__name__)
    return options


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

    A generation config loses the names that are no options, and its schedule is not compared with other options.
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
    near = closest_name(name, [*Options.model_fields, *REFUSED, *IDLE])
    return f"; did you mean `{near}`?" if near else ""


def _check_schedule(fields: Mapping[str, Any]) -> None:
    """Raises OptionError for an unknown schedule, and for options that contradict it."""
    schedule = fields["schedule"]
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise OptionError.of("schedule", f"one of {', '.join(SCHEDULES)} or a Schedule", schedule)
        if not SCHEDULES[schedule].takes_threshold and "assistant_confidence_threshold" in fields:
            raise OptionError(
                f"`assistant_confidence_threshold` and `schedule={schedule!r}` contradict: pass one of them"
            )
        return
    if isinstance(schedule, type) or not all(hasattr(schedule, name) for name in _SCHEDULE):
        kinds = f"one of {', '.join(SCHEDULES)} or a Schedule, with {', '.join(_SCHEDULE)}"
        raise OptionError.of("schedule", kinds, schedule)
    for name in ("num_assistant_tokens", "num_assistant_branches", "assistant_confidence_threshold"):
        if name in fields:
            raise OptionError(f"`{name}` and a `schedule` object contradict: set it in the schedule")


def _unreplaced(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults without the lengths, forms and ways of searching that the `call` replaces."""
    idle = {name for pair in _LENGTHS if call.keys() & {*pair} for name in pair}
    if any(name in call for name in FORMS):
        idle |= {*FORMS}
    if call.get("do_sample"):
        idle |= {*SEARCHES}
    if call.get("num_beams") == 1:
        idle |= {*SEARCHES} - {"penalty_alpha"}
    if call.get("num_beams", 1) != 1:
        idle.add("penalty_alpha")
    return {name: value for name, value in defaults.items() if name not in idle}


def _inheritable(inherited: Mapping[str, Any]) -> dict[str, Any]:
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
    fields = {k: v for k, v in inherited.items() if v is not None and k in Options.model_fields and k not in SEARCHES}
    try:
        Options(**fields)
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        return {k: v for k, v in fields.items() if k not in wrong}
    return fields


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
    """The options of one beam or one group without settings of groups; warns of these settings."""
    idle = {name: value for name in _GROUP_FIELDS if (value := getattr(options, name)) not in SEARCHES[name]}
    for name, value in idle.items():
        partners = " and ".join(f"`{field}`" for field in ("num_beams", *_GROUP_FIELDS) if field != name)
        warn_of_idle(f"`{name}`={value} changes nothing without {partners}: set them, or leave it out")
    return options.model_copy(update={"num_beam_groups": 1, "diversity_penalty": None})


def _check_search(options: Options) -> None:
    """Raises OptionError where ways of searching contradict one another, or lack a field."""
    beams, groups = options.num_beams, options.num_beam_groups
    kinds = {
        f"`num_beam_groups`={groups}": groups > 1,
        f"`{'force_words_ids' if options.constraints is None else 'constraints'}`": options.constrained,
        f"`penalty_alpha`={options.penalty_alpha}": bool(options.penalty_alpha),
    }
    searches = [name for name, is_set in kinds.items() if is_set]
    if options.top_logprobs is not None:
        raise OptionError(
            "`top_logprobs` needs tokens that are chosen one by one, and a search chooses whole texts: leave it out"
        )
    if beams > 1 and type(options.watermarking_config).__name__.startswith("SynthID"):
        raise UnsupportedError(
            "`watermarking_config` of the kind SynthIDTextWatermarkingConfig follows one text and no search: "
            "leave out `num_beams`, or take a WatermarkingConfig"
        )
    if len(searches) > 1:
        raise OptionError(f"{' and '.join(searches)} are different ways of searching: choose one")
    if searches and options.samples:
        raise OptionError(f"{searches[0]} does not go with sampling: leave it out, or set `do_sample=False`")
    if beams % groups:
        raise OptionError.of("num_beam_groups", f"a divisor of `num_beams`={beams}", groups)
    if groups > 1 and not options.diversity_penalty:
        raise OptionError("`num_beam_groups` above 1 needs a `diversity_penalty` above 0: set both")
    if options.constrained and beams == 1:
        raise OptionError(f"{searches[0]} belongs to beam search: set `num_beams` to 2 or more")
    if options.penalty_alpha and beams > 1:
        raise OptionError(f"{searches[0]} selects contrastive search, which has no beams: leave out it or `num_beams`")
    if options.penalty_alpha and options.top_k < 2:
        raise OptionError(f"{searches[0]} selects contrastive search, which needs `top_k` of 2 or more candidates")


def _check_effect(
    options: Options, arguments: Mapping[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warns of options that the strategy ignores; raises OptionError where it cannot return the number of texts."""

    def settings(*choices: str) -> Mapping[str, Any]:
        """`arguments` over `defaults`; `arguments` alone where the call itself sets one of `choices`."""
        is_chosen = any(name in arguments or name in config for name in choices)
        return arguments if is_chosen else {**defaults, **arguments}

    if not options.do_sample:
        drawing = {name: neutral for name, neutral in DRAWING.items() if name != "top_k" or not options.penalty_alpha}
        reason = "is about drawing tokens, which needs `do_sample=True`"
        _check_idle(settings("do_sample", "temperature"), drawing, reason)
    if options.num_samples is not None and options.num_beams > 1:
        raise OptionError("`num_samples` ranks samples and `num_beams` searches: pass one of them")
    if options.num_beams > 1:
        return _check_beams(options, settings("num_beams"))
    if options.num_samples is None and settings("num_samples").get("ranking") is not None:
        raise OptionError("`ranking` orders samples, but there are none to order: pass `num_samples`")
    if options.num_samples is not None and options.num_return_sequences > options.num_samples:
        raise OptionError(
            f"`num_return_sequences`={options.num_return_sequences} is more than `num_samples`={options.num_samples}: "
            "lower it, or draw more"
        )
    _check_idle(settings("num_beams"), BEAMS_ONLY, "belongs to beam search, which needs `num_beams`")
    if not options.samples and settings("do_sample", "temperature", "num_beams").get("num_return_sequences", 1) > 1:
        raise OptionError(
            "`num_return_sequences` above 1 needs `do_sample=True` or `num_beams`: greedy decoding has only one answer"
        )


def _check_beams(options: Options, settings: Mapping[str, Any]) -> None:
    texts, beams = options.num_return_sequences, options.num_beams
    if texts > beams and ("num_return_sequences" in settings or "num_beams" in settings):
        raise OptionError(
            f"`num_return_sequences`={texts} is more than `num_beams`={beams}: a search ends with as many "
            "texts as it has beams"
        )
    if settings.get("sampling") not in (None, "coupled"):
        raise OptionError(f"`sampling`={settings['sampling']!r} draws one token at a time: with beams leave it out")
    if (branches := settings.get("num_assistant_branches")) is not None and branches < beams:
        raise OptionError.of(
            "num_assistant_branches", f"at least `num_beams`={beams}, as every beam must be drafted", branches
        )


def _check_idle(settings: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]], why: str) -> None:
    for name, neutral in fields.items():
        if name in settings and settings[name] not in neutral:
            message = f"`{name}`={settings[name]!r} {why}: set it, or leave out `{name}`"
            if name in SPECDEC_ONLY:
                raise OptionError(message)
            warn_of_idle(message)
