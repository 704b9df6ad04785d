"""Refuses options of a call that are unknown, contradict one another, or have no effect.

What needs the draft, the prompts or the target is refused by `specdec.generator.checks`.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from specdec.core.draft_schedules import SCHEDULES
from specdec.errors import OptionError, UnsupportedError
from specdec.options.fields import BEAMS_ONLY, DRAWING, IDLE, INSTEAD, OWN, REFUSED, SYNONYMS
from specdec.options.forms import forms
from specdec.options.generate import Options

EITHER = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
"""Pairs of fields for one length: the first counts."""
_SCHEDULE = ("plan", "after", "max_branches")  # attributes of a schedule object
_refusing = ContextVar("refusing", default=False)


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


def check_known(name: str, value: object) -> None:
    """Raises for an unknown name and for a value that specdec does not support; warns of a value without effect."""
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


def check_contradictions(given: Mapping[str, Any]) -> None:
    """Raises OptionError for an unknown schedule, and for options that contradict the schedule."""
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


def check_lengths(options: Options, asked: Mapping[str, Any]) -> None:
    """Warns of a length in `asked` that another length overrides, for example the checkpoint's."""
    for first, second in EITHER:
        if second in asked and (stronger := getattr(options, first)) is not None:
            warn_of_idle(
                f"`{second}`={asked[second]} has no effect beside `{first}`={stronger}: pass `{first}=` instead"
            )


def check_forms(options: Options) -> None:
    """Raises OptionError where two options set the form of the answer."""
    named = [form.field for form in forms(options)]
    if len(named) > 1:
        raise OptionError(f"`{named[0]}` and `{named[1]}` each set the form of the answer: pass one of them")


def check_search(options: Options) -> None:
    """Raises OptionError where ways of searching contradict one another, or lack a field."""
    kinds = {
        f"`num_beam_groups`={options.groups}": options.groups > 1,
        f"`{'force_words_ids' if options.constraints is None else 'constraints'}`": options.constrained,
        f"`penalty_alpha`={options.penalty_alpha}": options.contrastive,
    }
    asked = [name for name, wanted in kinds.items() if wanted]
    if options.top_logprobs is not None and (options.beams > 1 or options.contrastive):
        raise OptionError(
            "`top_logprobs` needs tokens that are chosen one by one, and a search chooses whole texts: leave it out"
        )
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


def check_effect(
    options: Options, given: Mapping[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warns of options that the strategy ignores; raises OptionError where it cannot return as many texts as asked."""

    def asked(*choices: str) -> Mapping[str, Any]:
        """`given` over `defaults`; `given` alone where the call itself sets one of `choices`."""
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


def _check_idle(asked: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]], why: str) -> None:
    for name, neutral in fields.items():
        if name in asked and asked[name] not in neutral:
            message = f"`{name}`={asked[name]!r} {why}: set it, or leave out `{name}`"
            if name in OWN:
                raise OptionError(message)
            warn_of_idle(message)
