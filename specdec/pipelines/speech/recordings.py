"""One recording: cut into tracks, which are decoded one by one, and the joined texts of the tracks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from specdec.errors import OptionError
from specdec.models.hf.private_api import transcript
from specdec.pipelines.speech.audio import log_mel, read_audio
from specdec.pipelines.speech.whisper import FRAME_SECONDS, Whisper
from specdec.pipelines.speech.windows import Track
from specdec.pipelines.summaries.chunks import sentences

Chunks = list[dict[str, Any]]


@dataclass(frozen=True)
class Chunking:
    """Chunks of `length` samples, which overlap by `left` and `right`."""

    length: int
    left: int
    right: int

    def cut(self, samples: int) -> Iterator[tuple[int, int, int, int]]:
        """Begin and end of each chunk, and its overlap with the chunks before and after; in samples."""
        for begin in range(0, samples, self.length - self.left - self.right):
            end = min(begin + self.length, samples)
            last = begin + self.length >= samples
            left, right = self.left if begin else 0, 0 if last else self.right
            if end - begin > left:
                yield begin, end, left, right
            if last:
                return


def read_chunking(length: Any, stride: Any, extractor: Any) -> Chunking | None:
    """The chunking of a call, given in seconds; None without a length.

    Raises OptionError for lengths that do not fit one another or the model's window.
    """
    if not length:
        if stride is not None:
            raise OptionError("`stride_length_s` is the overlap of chunks, which need `chunk_length_s`: pass both")
        return None
    window = extractor.n_samples / extractor.sampling_rate
    if not isinstance(length, int | float) or not 0 < length <= window:
        raise OptionError.of("chunk_length_s", f"above 0 and at most {window:g} seconds, the model's window", length)
    strides = [length / 6] * 2 if stride is None else [stride] * 2 if isinstance(stride, int | float) else list(stride)
    samples, *overlaps = (round(seconds * extractor.sampling_rate) for seconds in (length, *strides))
    if len(overlaps) != 2 or min(overlaps) < 0 or sum(overlaps) >= samples:
        raise OptionError.of("stride_length_s", f"one or two numbers whose sum is less than {length:g} seconds", stride)
    return Chunking(samples, *overlaps)


@dataclass
class Recording:
    """One recording of a call: its name, `duration` in seconds, other fields of the input, and its tracks in order.

    `strides`, in seconds per track: its length, and its overlap with the tracks before and after. `parts`: how many
    tracks the recording has in all. `failed`: the recording could not be read.
    """

    name: str = "the input"
    duration: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    tracks: list[Track] = field(default_factory=list)
    strides: list[tuple[float, float, float]] | None = None
    parts: int = 0
    failed: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of it is decoded."""
        return len(self.tracks) >= self.parts and all(track.done for track in self.tracks)

    def read(
        self, source: Any, extractor: Any, chunking: Chunking | None, number: int, timestamps: bool
    ) -> Iterator[Track]:
        """The tracks of its sound, numbered from `number`; none for empty sound.

        A track of several windows always decodes timestamps, which tell where the next window begins.
        """
        audio = read_audio(source, extractor.sampling_rate)
        self.name, self.duration, self.extra = audio.name, audio.seconds, audio.extra
        samples, hop = audio.samples, extractor.hop_length
        if not len(samples):
            return
        if chunking is not None:
            self.strides, before, cuts = [], None, [*chunking.cut(len(samples))]
            self.parts = len(cuts)
            for begin, end, left, right in cuts:
                self.strides.append(((end - begin) / audio.rate, left / audio.rate, right / audio.rate))
                features, frames = log_mel(samples[begin:end], extractor), -(-(end - begin) // hop)
                overlap = chunking.left + chunking.right if begin else 0  # samples that the chunk before has too
                pace = FRAME_SECONDS * (end - begin - overlap) / (end - begin)
                track = Track(number, features, frames, timestamps, pace, before=before, seconds=self.strides[-1][0])
                track.shared_from = 1 - overlap / chunking.length
                number, before = number + 1, track
                yield track
        else:
            features, length = log_mel(samples, extractor), len(samples)
            self.parts = 1
            del audio, samples  # an hour of them is a quarter of a gigabyte
            frames, timestamps = min(-(-length // hop), features.shape[1]), timestamps or length > extractor.n_samples
            yield Track(number, features, frames, timestamps, seconds=self.duration)

    def text(
        self, whisper: Whisper, *, timestamps: bool | str | None, language: bool, seconds: float
    ) -> dict[str, Any]:
        """Text, chunks and other fields as transformers' pipeline returns them.

        `seconds` of sound per timestamp token.
        """
        text, chunks = "", Chunks()
        if self.tracks and self.strides is None and timestamps != "word":
            text, chunks = self._segments(whisper, bool(timestamps), language)
        elif self.tracks:
            pieces = [self._piece(i, whisper, timestamps, language) for i in range(len(self.tracks))]
            options: dict[str, Any] = {"timestamps": timestamps, "language": language, "seconds": seconds}
            text, merged = transcript(whisper.tokenizer, pieces, languages=whisper.languages, **options)
            chunks = merged.get("chunks", [])
        for chunk in chunks:
            if timestamps:
                chunk["timestamp"] = tuple(t if t is None else min(t, self.duration) for t in chunk["timestamp"])
            if language:
                chunk["language"] = chunk["language"] or whisper.language(())
        fields = {"chunks": chunks} if timestamps or language else {}
        return {"text": text, **fields, **{name: [value] for name, value in self.extra.items()}}

    def cues(self, whisper: Whisper, words: Chunks) -> Chunks:
        """The words of each segment, or of each sentence where chunks overlap, as one chunk with its `words`.

        A word's time may hold the pause beside it, so the first and the last word of a cue get at most twice the median
        length, which counts as 0.4 to 0.7 seconds (openai-whisper's `add_word_timestamps` bounds it from above).
        """
        texts = sentences("".join(word["text"] for word in words))
        if self.strides is None:
            texts = [whisper.decode(segment.tokens) for track in self.tracks for segment in track.segments]
        ends, cues, length = list(accumulate(map(len, texts))), dict[int, Chunks](), 0
        for word in words:
            letter = length + len(word["text"]) - len(word["text"].lstrip())  # the space may end a sentence
            cues.setdefault(bisect_right(ends, letter), []).append({**word})
            length += len(word["text"])
        lengths = [end - start for start, end in (word["timestamp"] for word in words) if end > start]
        longest = 2 * min(max(median(lengths or [0.0]), 0.4), 0.7)
        for cue in cues.values():
            start, end = cue[0]["timestamp"]
            cue[0]["timestamp"] = (max(start, round(end - longest, 2)), end)
            start, end = cue[-1]["timestamp"]
            cue[-1]["timestamp"] = (start, min(end, round(start + longest, 2)))
        return [
            {
                "timestamp": (cue[0]["timestamp"][0], cue[-1]["timestamp"][1]),
                "text": "".join(word["text"] for word in cue),
                "words": cue,
            }
            for cue in cues.values()
        ]

    def _segments(self, whisper: Whisper, timestamps: bool, language: bool) -> tuple[str, Chunks]:
        """The only track's segments as chunks; without timestamps its text is one chunk."""
        track = self.tracks[0]

        def language_field(opening: list[int]) -> dict[str, Any]:
            return {"language": whisper.language(opening)} if language else {}

        if not timestamps:
            text = whisper.decode(track.tokens)
            return text, [{**language_field(track.segments[0].opening), "text": text}] if text else []
        chunks = []
        for segment in track.segments:
            if text := whisper.decode(segment.tokens):
                times = (round(segment.start, 2), round(segment.end, 2))
                chunks.append({**language_field(segment.opening), "timestamp": times, "text": text})
        return "".join(chunk["text"] for chunk in chunks), chunks

    def _piece(self, i: int, whisper: Whisper, timestamps: bool | str | None, language: bool) -> dict[str, Any]:
        """A track in the form that transformers merges."""
        tokens, times, spoken = list[int](), list[float](), list[int]()
        for segment in self.tracks[i].segments:
            if language and (ids := whisper.language_token(segment.opening)) != spoken:
                spoken = ids
                tokens, times = tokens + ids, times + (times[-1:] or [0.0]) * len(ids)
            tokens, times = tokens + segment.tokens, times + (segment.token_times or [])
        piece: dict[str, Any] = {"tokens": np.array([tokens])}
        if self.strides is not None:
            piece["stride"] = self.strides[i]
        if timestamps == "word":
            piece["token_timestamps"] = np.array([times])
        return piece
