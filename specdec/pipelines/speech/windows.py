"""Recordings window by window: each begins at the last timestamp of the window before (Radford et al. 2022, 3.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec.core.stats import Stats
from specdec.decoding.noise import fold
from specdec.errors import OptionError
from specdec.generator.drafts_by_name import NAMES as DRAFT_NAMES
from specdec.generator.generation import Generation
from specdec.generator.generator import SpecGenerator
from specdec.models import Encoding
from specdec.options.fields import BEAMS_ONLY, DRAWING
from specdec.pipelines.speech.settings import SpeechSettings
from specdec.pipelines.speech.whisper import FRAME_SECONDS, TOKEN_SECONDS, Whisper

_WARM = 0.5  # text of this temperature or above is no context for the next window


@dataclass(frozen=True)
class Segment:
    """A stretch of speech: begin and end in seconds of the recording, and its tokens with their timestamps.

    `token_times`: the second at which each token ends; None without word timestamps. `opening`: the track's.
    """

    start: float
    end: float
    tokens: list[int]
    token_times: list[float] | None = None
    opening: list[int] = field(default_factory=list)


def window_segments(
    tokens: Sequence[int], *, begin: int, offset: float, frames: int, stride: int, times: Sequence[float] | None = None
) -> tuple[list[Segment], int]:
    """The segments of a window's tokens, and how many of its frames they cover (Radford et al. 2022, section 3.8).

    `begin`: the token of 0.00 seconds; `offset`: the window's begin in seconds; `frames`: its length, `stride` per
    timestamp token. Text after the last pair of timestamps is left to the next window, unless the tokens end with a
    single timestamp.
    """

    def segment(first: int, last: int, start: int, end: int) -> Segment:
        begins, ends = (offset + step * TOKEN_SECONDS for step in (start, end))
        return Segment(begins, ends, list(tokens[first:last]), None if times is None else list(times[first:last]))

    steps = [token - begin for token in tokens]  # steps of time; below 0 for text
    cuts = [i + 1 for i in range(len(steps) - 1) if steps[i] >= 0 and steps[i + 1] >= 0]
    if not cuts:
        start = max(steps[0], 0) if steps else 0
        end = max(steps, default=0)
        return [segment(0, len(tokens), start, end if end > start else frames // stride)], frames
    single = steps[-2] < 0 <= steps[-1]
    if single:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the last segment keeps both timestamps: it does not end the window
    segments = []
    for first, last in zip([0, *cuts], cuts, strict=False):
        closing = last - 1 if single or last != cuts[-1] else last - 2
        segments.append(segment(first, last, steps[first], steps[closing]))
    return segments, frames if single else steps[cuts[-1] - 2] * stride


def options_at(temperature: float, options: Mapping[str, Any], settings: SpeechSettings) -> dict[str, Any]:
    """The options of `generate` for a try at this temperature."""
    if temperature > 0:
        others = {name: value for name, value in options.items() if name not in BEAMS_ONLY}
        return {**others, "do_sample": True, "temperature": temperature, "num_beams": 1}
    warmer = any(settings.temperatures)  # options of sampling are for these tries
    return {"do_sample": False, **{name: value for name, value in options.items() if not (warmer and name in DRAWING)}}


@dataclass
class Track:
    """Sound that is decoded by itself, and the text so far.

    `features` `[mels, frames]`: the features from frame `first` on; frames after `sound_frames` are padding.
    `timestamps`: whether the text has timestamps. `pace`: seconds of new sound per frame, fewer where tracks overlap.
    `seek`: the frame at which the next window begins. `opening`: the prompt's tokens of language and task. `trusted`:
    the last text may be context for the next window. `finish_reasons`: why each window with speech ended. `ahead`:
    tokens after the last window's last timestamp, whose sound the next window has again. `before`: a track whose sound
    from the fraction `shared_from` on begins this track, too. `latest`: the last window's tokens. `seconds`: the length
    of the sound, at which segments end at the latest.
    """

    number: int
    features: Tensor
    sound_frames: int
    timestamps: bool
    pace: float = FRAME_SECONDS
    seek: int = 0
    opening: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    trusted: bool = True
    ahead: list[int] = field(default_factory=list)
    before: Track | None = None
    shared_from: float = 0.0
    first: int = 0
    latest: list[int] = field(default_factory=list)
    seconds: float = inf

    def __post_init__(self) -> None:
        self.frames = self.first + int(self.features.shape[1])

    @property
    def done(self) -> bool:
        """Whether it is decoded to its end."""
        return self.seek >= self.frames

    @property
    def tokens(self) -> list[int]:
        """All tokens, with timestamps."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def expected(self) -> list[int]:
        """A prediction of the next window: tokens already decoded from the same sound, with their old timestamps."""
        if self.seek or self.before is None or not self.before.done:
            return self.ahead
        tokens = self.before.tokens
        return tokens[int(self.shared_from * len(tokens)) :]

    def window(self, frames: int) -> Tensor:
        """The next window `[mels, frames]`, padded at the end of the sound."""
        piece = self.features[:, self.seek - self.first :][:, :frames]
        return functional.pad(piece, (0, frames - piece.shape[1]))


@dataclass
class _DecodedWindow:
    """One decoded window: its tokens up to the end token, why it ended, the temperature; `skip`: it is silent."""

    tokens: list[int]
    finish: str
    temperature: float
    skip: bool = False


class Listener:
    """Decodes tracks, several windows at a time; the text of a track does not depend on the other tracks.

    `options`: arguments of `SpecGenerator.generate`; `progress` is called with the seconds of sound of each round.
    """

    def __init__(
        self,
        generator: SpecGenerator,
        whisper: Whisper,
        settings: SpeechSettings,
        options: Mapping[str, Any],
        progress: Callable[[float], None],
    ) -> None:
        self._generator, self.whisper, self.settings = generator, whisper, settings
        self._options, self._progress = dict(options), progress
        self._seed: int = self._options.pop("seed")
        self._positions = int(whisper.model.config.max_target_positions)
        draft_names = [name for name in DRAFT_NAMES if name in self._options]
        draft = self._options.get("assistant_model") if draft_names else generator.draft
        self._predicts = bool(getattr(draft, "reads_predictions", False))
        self.stats: list[Stats] = []

    def listen(self, tracks: Iterable[Track], batch_size: int) -> Iterator[None]:
        """Decodes all tracks; yields after each window of `batch_size` of them."""
        remaining = iter(tracks)
        active = list(islice(remaining, batch_size))
        while active:
            self._round(active)
            for track in active:
                if track.done:
                    track.features = track.features.new_empty(0)
            yield
            active = [track for track in active if not track.done]
            active += islice(remaining, batch_size - len(active))

    def _round(self, tracks: Sequence[Track]) -> None:
        """Decodes one window of each track."""
        before = [min(track.seek, track.sound_frames) for track in tracks]
        features = torch.stack([track.window(self.whisper.frames) for track in tracks])
        encoding = self.whisper.model.encode({"input_features": features})
        for row, track in enumerate(tracks):
            self._set_opening(track, encoding.select([row]))
        prompts = [self._prompt(track) for track in tracks]
        kinds = [(len(prompt), track.timestamps) for prompt, track in zip(prompts, tracks, strict=True)]
        whole = _Batch(list(tracks), features, encoding, prompts)
        for _, group in groupby(sorted(range(len(tracks)), key=kinds.__getitem__), key=kinds.__getitem__):
            batch = whole.select(list(group))
            for i, decoded in enumerate(self._decode(batch)):
                self._advance(batch, i, decoded)
        self._progress(sum((min(t.seek, t.sound_frames) - old) * t.pace for t, old in zip(tracks, before, strict=True)))

    def _set_opening(self, track: Track, encoding: Encoding) -> None:
        """Sets language and task of a track by its first window, or of each window if the settings say so."""
        s = self.settings
        if s.language_per_window or not track.opening:
            arguments: dict[str, Any] = {"language": s.language, "task": s.task, "timestamps": track.timestamps}
            track.opening = self.whisper.prompt(encoding, **arguments)

    def _prompt(self, track: Track) -> list[int]:
        """The decoder's prompt: `prompt_ids` and earlier text, as far as the settings want them, and the opening."""
        s, whisper = self.settings, self.whisper
        prompt_ids = list(s.prompt_ids or ())
        first = s.prompt_condition_type == "first-segment"
        before, suppressed = whisper.setting("prev_sot_token_id"), whisper.setting("suppress_tokens") or []
        if before is None and len(suppressed) >= 2:  # where older checkpoints have it
            before = suppressed[-2]
        if not (s.condition_on_prev_tokens and track.trusted and (track.segments or (prompt_ids and first))):
            return [*prompt_ids, *track.opening]
        context: list[int] = []
        for tokens in (segment.tokens for segment in track.segments):
            twice = len(tokens) > 2 and tokens[-2] >= whisper.timestamp_begin  # one timestamp is enough
            context += tokens[:-1] if twice else tokens
        if first:
            context = prompt_ids[prompt_ids[:1] == [before] :] + context
        start = prompt_ids if prompt_ids and not first else [] if before is None else [before]
        return [*start, *context[1 - self._positions // 2 :], *track.opening]

    def _decode(self, batch: _Batch) -> list[_DecodedWindow]:
        """The decoded text of each row, at the first temperature whose text is accepted, else at the last."""
        s = self.settings
        texts: dict[int, _DecodedWindow] = {}
        pending = list(range(len(batch.tracks)))
        for temperature in s.temperatures:
            part = batch.select(pending)
            out = self._generate(part, temperature)
            again = []
            reasons = self.stats[-1].finish_reasons
            for i, (row, tokens) in enumerate(zip(pending, out.new_tokens(), strict=True)):
                log_prob = None if s.logprob_threshold is None else _mean_log_prob(out, i, tokens, temperature)
                texts[row] = _DecodedWindow(tokens, reasons[i], temperature, self._is_silent(part, i, tokens, log_prob))
                if not texts[row].skip and s.distrusts(tokens, log_prob, self.whisper.model.vocab_size):
                    again.append(row)
            pending = again
            if not pending:
                break
        return [texts[row] for row in range(len(batch.tracks))]

    def _is_silent(self, batch: _Batch, row: int, tokens: Sequence[int], log_prob: float | None) -> bool:
        """Whether silence is likelier than a row's text, which costs a pass where the text may be made of it."""
        whisper, prompt = self.whisper, batch.prompts[row]
        words = sum(token < whisper.end for token in tokens)
        if whisper.setting("no_timestamps_token_id") is None or not self.settings.may_skip(words, log_prob):
            return False
        evidence = whisper.evidence(batch.encoding.select([row]), prompt, len(batch.tracks[row].opening), tokens)
        return self.settings.skips(evidence, words, log_prob)

    def _generate(self, batch: _Batch, temperature: float) -> Generation:
        options = options_at(temperature, self._options, self.settings)
        if temperature > 0:
            options["seed"] = [fold(fold(self._seed, track.number), track.seek) for track in batch.tracks]
        if self.settings.logprob_threshold is not None:
            options["output_scores"] = True
        if self._predicts and any(expected := [track.expected or None for track in batch.tracks]):
            options["prediction"] = expected
        extra = list(options.pop("logits_processor", ()))
        if batch.tracks[0].timestamps:
            extra.insert(0, self.whisper.timestamp_rules(len(batch.prompts[0])))
        out = self._generator.generate(
            input_features=batch.features,
            encoder_outputs=batch.encoding,
            decoder_input_ids=batch.prompts,
            logits_processor=extra,
            max_new_tokens=self._room(len(batch.prompts[0]), options),
            **options,
        )
        assert out.stats is not None
        self.stats.append(out.stats)
        return out

    def _room(self, prompt: int, options: dict[str, Any]) -> int:
        """The number of tokens that may follow a prompt of this length; removes the lengths from `options`."""
        most = self._positions - prompt
        limits = self._generator.options(**{name: options.pop(name, None) for name in ("max_length", "max_new_tokens")})
        limit = limits.max_new_tokens or limits.max_length or most
        if most < 1:
            raise OptionError(f"the prompt of {prompt} tokens leaves the model no room for text: shorten `prompt_ids`")
        return min(limit, most)

    def _advance(self, batch: _Batch, row: int, decoded: _DecodedWindow) -> None:
        """Adds a decoded window to its track, and moves on to the end of its segments."""
        track, whisper = batch.tracks[row], self.whisper
        frames = min(track.frames - track.seek, whisper.frames)
        track.trusted, track.latest = decoded.temperature < _WARM, []
        if decoded.skip:
            track.seek += frames
            return
        track.finish_reasons.append(decoded.finish)
        offset = track.seek * TOKEN_SECONDS / whisper.stride
        tokens, times = decoded.tokens, None
        if self.settings.return_timestamps == "word":
            sound = max(min(track.sound_frames - track.seek, whisper.frames), 1)
            times = whisper.times(batch.encoding.select([row]), batch.prompts[row], tokens, sound)
            times = [time + offset for time in times]
        if tokens[-1:] == [whisper.end]:
            tokens = tokens[:-1]
        track.latest = tokens
        segments, covered = window_segments(
            tokens, begin=whisper.timestamp_begin, offset=offset, frames=frames, stride=whisper.stride, times=times
        )
        for segment in segments:
            start, end = (min(time, track.seconds) for time in (segment.start, segment.end))
            track.segments.append(replace(segment, start=start, end=end, opening=track.opening))
        track.seek += covered if covered > 0 else frames
        rest = tokens[sum(len(segment.tokens) for segment in segments) :]
        begin, steps = whisper.timestamp_begin, covered // whisper.stride  # the next window begins so many later
        earlier = [token if token < begin else max(token - steps, begin) for token in rest]
        track.ahead = [begin, *earlier] if rest else []


@dataclass(frozen=True)
class _Batch:
    """Windows decoded together, with prompts of equal length."""

    tracks: list[Track]
    features: Tensor
    encoding: Encoding
    prompts: list[list[int]]

    def select(self, rows: Sequence[int]) -> _Batch:
        if len(rows) == len(self.tracks):
            return self
        tracks, prompts = [self.tracks[row] for row in rows], [self.prompts[row] for row in rows]
        return _Batch(tracks, self.features[list(rows)], self.encoding.select(rows), prompts)


def _mean_log_prob(out: Generation, row: int, tokens: Sequence[int], temperature: float) -> float:
    """The mean log-probability of a row's new tokens at temperature 1, after processors, end token included."""
    assert out.scores is not None
    rows = [row] * len(tokens) if out.beam_indices is None else out.beam_indices[row].tolist()
    scale = temperature or 1.0
    total = 0.0
    for scores, beam, token in zip(out.scores, rows, tokens, strict=False):
        total += float((scores[beam] * scale).float().log_softmax(-1)[token])
    return total / max(len(tokens), 1)
