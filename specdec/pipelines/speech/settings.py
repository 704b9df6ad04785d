"""Options of a call that only Whisper has, beside the options of `SpecGenerator.generate`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import log2
from typing import Any

from specdec.errors import OptionError
from specdec.options.fields import is_number, is_whole
from specdec.pipelines.speech.whisper import Evidence, SpeechConfig

FALLBACK: dict[str, Any] = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
"""The reference's fallback for misheard windows; the ratio is transformers', which compresses ids, not text."""
_SILENCE = 0.85  # zeros have 0.93, words spoken in a quarter of a second up to 0.84
_FEW = 8  # tokens of a text that may be made of silence; asking about longer ones, too, would cost a pass each
_DOUBT = 4.0  # a text of mean log-probability -1 needs a probability of silence of at most 0.8
_FROM_CHECKPOINT = (
    *("return_timestamps", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"),
    "condition_on_prev_tokens",
)


@dataclass(frozen=True)
class SpeechSettings:
    """Options with the names and meanings of transformers' `WhisperForConditionalGeneration.generate`.

    Several values of `temperature` are tried in order until the text is accepted: its ids compress at most
    `compression_ratio_threshold` times, and its mean log-probability is at least `logprob_threshold`. Below
    `logprob_threshold`, a window whose probability of silence exceeds `no_speech_threshold` is skipped. Above
    temperature 0, tokens are drawn by seed. `language_per_window`: the language is found anew in each window. A text of
    a few tokens is left out where silence is likelier than `no_speech_threshold` (0.85), and than the text.
    """

    return_timestamps: bool | str | None = None
    language: str | None = None
    language_per_window: bool | None = None
    task: str | None = None
    is_multilingual: bool | None = None
    prompt_ids: Sequence[int] | None = None
    prompt_condition_type: str = "first-segment"
    condition_on_prev_tokens: bool | None = None
    temperature: float | Sequence[float] | None = None
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        if self.temperature is None or isinstance(self.temperature, int | float):
            return (float(self.temperature or 0),)
        return tuple(self.temperature)

    def distrusts(self, tokens: Sequence[int], log_prob: float | None, vocab_size: int) -> bool:
        """Whether a text must be decoded again: it is too repetitive, or its mean log-probability too low."""
        width = int(log2(vocab_size) / 8) + 1
        ids, limit = b"".join(token.to_bytes(width, "little") for token in tokens), self.compression_ratio_threshold
        return self._unlikely(log_prob) or (limit is not None and len(ids) / len(zlib.compress(ids)) > limit)

    def may_skip(self, words: int, log_prob: float | None) -> bool:
        """Whether a text of so many tokens may be made of silence: it is short or unlikely."""
        return 0 < words <= _FEW or (self.no_speech_threshold is not None and self._unlikely(log_prob))

    def skips(self, evidence: Evidence, words: int, log_prob: float | None) -> bool:
        """Whether a text that `may_skip` is left out, since silence is likelier.

        The odds of silence weigh a short text's surprise. The paper's rule (section 4.5: silence above 0.6, the mean
        log-probability below -1) has no weights: it keeps " you", which has -0.4 where silence has 0.95.
        """
        silence, limit = evidence.silence, self.no_speech_threshold
        is_weighed = words <= _FEW and -evidence.log_prob * silence > _DOUBT * (1 - silence)
        return silence > (_SILENCE if limit is None else limit) and (is_weighed or self._unlikely(log_prob))

    def _unlikely(self, log_prob: float | None) -> bool:
        return log_prob is not None and self.logprob_threshold is not None and log_prob < self.logprob_threshold


NAMES = tuple(field.name for field in fields(SpeechSettings))


def speech_settings(options: Mapping[str, Any], whisper: SpeechConfig) -> SpeechSettings:
    """The settings of a call over the checkpoint's; raises OptionError for wrong values and contradictions."""
    values = {name: value for name in _FROM_CHECKPOINT if (value := whisper.setting(name)) is not None}
    values |= {name: value for name, value in options.items() if value is not None}
    if (prompt := values.get("prompt_ids")) is not None:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        vocab = whisper.vocab_size
        if not isinstance(ids, list | tuple) or not all(is_whole(token) and 0 <= token < vocab for token in ids):
            raise OptionError.of("prompt_ids", f"ids from 0 to {vocab - 1}, as `get_prompt_ids` returns them", prompt)
        values["prompt_ids"] = list(ids)
    for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
        if not (values.get(name) is None or is_number(values[name])):
            raise OptionError.of(name, "a number", values[name])
    for name in ("is_multilingual", "condition_on_prev_tokens", "language_per_window"):
        if not isinstance(values.get(name), bool | None):
            raise OptionError.of(name, "True or False", values[name])
    settings = SpeechSettings(**values)
    if settings.return_timestamps not in (None, False, True, "word"):
        raise OptionError.of(
            "return_timestamps", "True for segments, 'word' for words, or False", settings.return_timestamps
        )
    if not isinstance(settings.language, str | None):
        raise OptionError.of("language", "one language for all inputs", settings.language)
    if not settings.temperatures or not all(isinstance(t, int | float) and t >= 0 for t in settings.temperatures):
        raise OptionError.of("temperature", "a number of at least 0, or several", settings.temperature)
    if settings.language is not None and settings.language_per_window:
        raise OptionError("`language` names one for all windows, `language_per_window` finds each: leave one out")
    if settings.prompt_condition_type not in ("first-segment", "all-segments"):
        kinds = "'first-segment' or 'all-segments'"
        raise OptionError.of("prompt_condition_type", kinds, settings.prompt_condition_type)
    if settings.prompt_condition_type == "all-segments" and not settings.condition_on_prev_tokens:
        raise OptionError("`prompt_condition_type='all-segments'` needs `condition_on_prev_tokens=True`: set both")
    whisper.check(settings.language, settings.task, settings.return_timestamps, settings.is_multilingual)
    return settings
