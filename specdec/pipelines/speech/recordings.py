"""From one recording to the stretches that are read by themselves, and from what was heard in them to its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import OptionError
from specdec.pipelines.speech.audio import read_audio
from specdec.pipelines.speech.features import long_features, window_features
from specdec.pipelines.speech.timestamps import Segment
from specdec.pipelines.speech.whisper import FRAME_SECONDS, Whisper
from specdec.pipelines.speech.windows import Track

Chunks = list[dict[str, Any]]


@dataclass(frozen=True)
class Chunking:
    """Chunks of so many samples, which overlap by `left` and `right`."""

    length: int
    left: int
    right: int

    def cut(self, samples: int) -> Iterator[tuple[int, int, int, int]]:
        """Begin and end of every chunk, and how much of it the chunks beside it hear too, left and right."""
        for begin in range(0, samples, self.length - self.left - self.right):
            end = min(begin + self.length, samples)
            last = begin + self.length >= samples
            left, right = self.left if begin else 0, 0 if last else self.right
            if end - begin > left:
                yield begin, end, left, right
            if last:
                return


def read_chunking(length: Any, stride: Any, extractor: Any) -> Chunking | None:
    """The chunking that a call asks for in seconds; None where there is none.

    Raises OptionError for lengths that do not fit together, or the model's window.
    """
    if not length:
        if stride is not None:
            raise OptionError("`stride_length_s` says how chunks overlap, which need `chunk_length_s`: pass both")
        return None
    window = extractor.n_samples / extractor.sampling_rate
    if not isinstance(length, int | float) or not 0 < length <= window:
        raise OptionError.of("chunk_length_s", f"above 0 and at most {window:g} seconds, the model's window", length)
    strides = [length / 6] * 2 if stride is None else [stride] * 2 if isinstance(stride, int | float) else list(stride)
    if len(strides) != 2 or min(strides) < 0 or sum(strides) >= length:
        raise OptionError.of("stride_length_s", f"one or two numbers whose sum is less than {length:g} seconds", stride)
    return Chunking(*(round(seconds * extractor.sampling_rate) for seconds in (length, *strides)))


@dataclass
class Recording:
    """One recording of a call: its name and seconds, what came beside its sound, and its tracks in order.

    `strides` are, per track, seconds: its length, and how much of it the tracks before and after hear too. One that
    `failed` could not be read.
    """

    name: str = "the input"
    duration: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    tracks: list[Track] = field(default_factory=list)
    strides: list[tuple[float, float, float]] | None = None
    failed: bool = False

    def read(
        self, source: Any, extractor: Any, chunking: Chunking | None, number: int, timestamps: bool
    ) -> Iterator[Track]:
        """The tracks of its sound, the first one with this number; none where there is no sound at all.

        A track of several windows needs timestamps, whether they are wanted or not.
        """
        audio = read_audio(source, extractor.sampling_rate)
        self.name, self.duration, self.extra = audio.name, audio.seconds, audio.extra
        samples, hop = audio.samples, extractor.hop_length
        if not len(samples):
            return
        if chunking is not None:
            self.strides = []
            for begin, end, left, right in chunking.cut(len(samples)):
                self.strides.append(((end - begin) / audio.rate, left / audio.rate, right / audio.rate))
                features, heard = window_features(samples[begin:end], extractor), -(-(end - begin) // hop)
                again = chunking.left + chunking.right if begin else 0  # heard in the chunk before
                pace = FRAME_SECONDS * (end - begin - again) / (end - begin)
                track = Track(number + len(self.tracks), features, heard, timestamps, pace)
                if begin:
                    track.before, track.shared_from = self.tracks[-1], 1 - again / chunking.length
                yield self._add(track)
        elif len(samples) <= extractor.n_samples:
            yield self._add(Track(number, window_features(samples, extractor), -(-len(samples) // hop), timestamps))
        else:
            features = long_features(samples, extractor)
            del audio, samples  # an hour of them is a quarter of a gigabyte
            yield self._add(Track(number, features, features.shape[1], True))

    def _add(self, track: Track) -> Track:
        self.tracks.append(track)
        return track

    def text(
        self, whisper: Whisper, *, timestamps: bool | str | None, language: bool, seconds: float
    ) -> dict[str, Any]:
        """Text and chunks, in the words of transformers' pipeline; `seconds` of sound are one timestamp token."""
        if not self.tracks:
            return {"text": "", **({"chunks": []} if timestamps or language else {}), **self._extra()}
        if self.strides is None and timestamps != "word":
            text, chunks = self._segments(whisper, bool(timestamps), language)
        else:
            pieces = [self._piece(i, whisper, timestamps, language) for i in range(len(self.tracks))]
            text, found = whisper.merged(pieces, timestamps=timestamps, language=language, seconds=seconds)
            chunks = found.get("chunks", [])
        return {"text": text, **({"chunks": chunks} if timestamps or language else {}), **self._extra()}

    def _extra(self) -> dict[str, list[Any]]:
        """What came beside the sound, in the lists that the pipeline makes of it."""
        return {name: [value] for name, value in self.extra.items()}

    def _segments(self, whisper: Whisper, timestamps: bool, language: bool) -> tuple[str, Chunks]:
        """The one track's segments as chunks; without timestamps, its text is one."""
        track = self.tracks[0]
        said: dict[str, Any] = {"language": whisper.language(track.opening)} if language else {}
        if not timestamps:
            text = whisper.decode(track.tokens)
            return text, [{**said, "text": text}] if text else []
        chunks = [
            {**said, "timestamp": (round(s.start, 2), round(self._end(s, whisper), 2)), "text": text}
            for s in track.segments
            if (text := whisper.decode(s.tokens))
        ]
        return "".join(chunk["text"] for chunk in chunks), chunks

    def _end(self, segment: Segment, whisper: Whisper) -> float:
        """Where a segment ends; one without a timestamp at its end goes on to the window's, or the recording's."""
        stamped = segment.tokens[-1] >= whisper.timestamp_begin
        return segment.end if stamped else max(min(segment.end, self.duration), segment.start)

    def _piece(self, i: int, whisper: Whisper, timestamps: bool | str | None, language: bool) -> dict[str, Any]:
        """A track as transformers merges them."""
        track = self.tracks[i]
        heard = whisper.language_token(track.opening) if language else []
        piece: dict[str, Any] = {"tokens": heard + track.tokens}
        if self.strides is not None:
            piece["stride"] = self.strides[i]
        if timestamps == "word":
            times = [time for segment in track.segments for time in segment.token_times or ()]
            piece["token_timestamps"] = [0.0] * len(heard) + times
        return piece
