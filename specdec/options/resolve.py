"""The options of a call, merged from keyword arguments, a generation config, a generator's defaults and a checkpoint.

What the caller sets is honoured, or a warning where it changes no text, or an error; what a checkpoint's generation
config sets is honoured where possible and never raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError
from specdec.options.fields import EXPECTED, IDLE, REFUSED, SEARCHES
from specdec.options.forms import FORMS
from specdec.options.generate import Options
from specdec.options.refusals import (
    EITHER,
    check_contradictions,
    check_effect,
    check_forms,
    check_known,
    check_lengths,
    check_search,
    warn_of_idle,
)

DEFAULTS = {"top_k": 50, "temperature": 1.0, "num_return_sequences": 1, "num_beams": 1}
_OF_GROUPS = ("num_beam_groups", "diversity_penalty")


def resolve(
    given: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> Options:
    """The options of a call: `given` over a generation `config`, over a generator's `defaults`, over a checkpoint's.

    `inherited` are the checkpoint's. Each field is taken from the first layer that sets it; then `max_new_tokens`
    overrides `max_length`, as in transformers. Raises OptionError for unknown names, values out of range and
    contradictions; UnsupportedError for fields in `REFUSED`, unless they are inherited. Options without effect warn.
    """
    given, defaults, config = _checked(given), _checked(defaults or {}), _understood(config or {})
    defaults = _waiting(defaults, {**config, **given})
    options = _grouped(_valid(_merged([DEFAULTS, _followed(inherited or {}), defaults, config, given])))
    check_lengths(options, {**defaults, **config, **given})
    check_search(options)
    check_forms(options)
    check_effect(options, given, config, defaults)
    return _settled(options)


def _waiting(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """A generator's defaults without the lengths, forms and ways of searching that the `call` replaces."""
    idle = {name for pair in EITHER if any(one in call for one in pair) for name in pair}
    if any(name in call for name in FORMS):
        idle |= {*FORMS}
    if call.get("do_sample"):
        idle |= {*SEARCHES}
    if call.get("num_beams") == 1:
        idle |= {*SEARCHES} - {"penalty_alpha"}
    if call.get("num_beams", 1) != 1:
        idle.add("penalty_alpha")
    return {name: value for name, value in defaults.items() if name not in idle}


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises OptionError for a generator's defaults that no call can use, UnsupportedError for fields in `REFUSED`."""
    _valid(_checked(defaults))


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last layer's value of each field; of two fields for one length, the first, whatever its layer."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    hidden = {second for first, second in EITHER if first in merged}
    return {name: value for name, value in merged.items() if name not in hidden}


def _grouped(options: Options) -> Options:
    """The options; with one beam or one group without settings of groups, of which it warns."""
    if options.beams > 1 and options.groups > 1:
        return options
    idle = [name for name in _OF_GROUPS if getattr(options, name) not in SEARCHES[name]]
    for name in idle:
        needed = " and ".join(f"`{one}`" for one in ("num_beams", *_OF_GROUPS) if one != name)
        warn_of_idle(f"`{name}`={getattr(options, name)} changes nothing without {needed}: set them, or leave it out")
    return options.model_copy(update=dict.fromkeys(idle))


def _settled(options: Options) -> Options:
    """The options without those that the strategy does not read."""
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


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the caller set, checked, under one name each."""
    given = _renamed({k: v for k, v in given.items() if v is not None})
    for name, value in given.items():
        check_known(name, value)
    check_contradictions(given)
    return {k: v for k, v in given.items() if k in Options.model_fields}


def _understood(config: Mapping[str, Any]) -> dict[str, Any]:
    """A generation config's fields; raises for those in `REFUSED`."""
    fields = _renamed({k: v for k, v in config.items() if v is not None})
    for name in (*REFUSED, *IDLE):
        if name in fields:
            check_known(name, fields[name])
    return {k: v for k, v in fields.items() if k in Options.model_fields}


def _followed(inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's valid options; warns of fields in `REFUSED` and of ways of searching."""
    for name, rule in REFUSED.items():
        if inherited.get(name) not in rule.neutral:
            _warn_of_inherited(name, inherited[name], f"which specdec does not follow: {rule.why}")
    for name, neutral in SEARCHES.items():
        if inherited.get(name) not in neutral and name != "diversity_penalty":
            _warn_of_inherited(name, inherited[name], "which specdec follows only where the call sets it")
    known = {k: v for k, v in inherited.items() if v is not None and k in Options.model_fields and k not in SEARCHES}
    try:
        Options(**known)
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        return {k: v for k, v in known.items() if k not in wrong}
    return known


def _warn_of_inherited(name: str, value: object, why: str) -> None:
    warnings.warn(f"the checkpoint's generation config asks for {name}={value!r}, {why}", stacklevel=4)


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """The fields with transformers' `num_assistant_tokens_schedule` under its name here, `schedule`."""
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


def _valid(fields: Mapping[str, Any]) -> Options:
    """The options with these values; raises OptionError for pydantic's first complaint."""
    try:
        return Options(**fields)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    expected = EXPECTED.get(name, first["msg"].removeprefix("Input should be "))
    raise OptionError.of(name, expected, fields[name])
