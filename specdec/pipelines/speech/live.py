"""A recording that is still made: its last window is decoded again as it grows, with the last text as the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import perf_counter as clock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.core.stats import total
from specdec.errors import UnsupportedError
from specdec.pipelines.speech.audio import Samples, leveled, log_power, read_audio
from specdec.pipelines.speech.recordings import Recording
from specdec.pipelines.speech.windows import Listener, Track

T = TypeVar("T")


@dataclass(frozen=True)
class Heard:
    """What a pass heard: `final` text, which follows the final text before it, and `partial` text behind all of it."""

    final: str
    partial: str


class Live(Generic[T]):
    """Takes sound by `hear` until `end`; `next` decodes the last window once, which is worthwhile once it `is_due`.

    A full window, and the last one, is decoded like a window of a file, and its text is final. But silence is 80 dB
    below the loudest sound so far; in a file, below the loudest sound of all. Other windows are decoded as if the sound
    had ended. The sound of final windows is forgotten. Other threads may call `hear` and `end` during `next`.

    `rate`: samples per second. `step`: seconds of new sound between two passes over a window. `read(recording)` returns
    the text so far, and `finish(recording, seconds)` the result after so many seconds of work.
    """

    def __init__(
        self,
        listener: Listener,
        extractor: Any,
        *,
        step: float,
        read: Callable[[Recording], str],
        finish: Callable[[Recording, float], T],
    ) -> None:
        if extractor.dither:
            raise UnsupportedError("the `feature_extractor` adds noise to whole recordings: set its `dither` to 0")
        self._listener, self._extractor, self._read, self._finish = listener, extractor, read, finish
        self.rate, self._hop, self._least = extractor.sampling_rate, extractor.hop_length, extractor.n_samples
        self._edge = -(-extractor.n_fft // 2 // self._hop)  # frames on a side of a frame that have some of its sound
        self._queue, self._step = SimpleQueue[Samples](), round(step * self.rate)
        self._num_heard = self._num_taken = self._num_decoded = 0  # samples
        self._sound, self._first = np.empty(0, np.float32), 0  # sound from this frame on, for frames not in `_power`
        self._power = torch.empty(extractor.feature_size, 0)  # complete frames, from the window's first on
        self._loudest = float("-inf")
        self._track, self._recording = Track(0, self._power, 0, False), Recording("the sound")
        self._text, self._seconds, self._has_ended = "", 0.0, False

    @property
    def duration(self) -> float:
        """Seconds of sound that came."""
        return self._num_heard / self.rate

    @property
    def behind(self) -> float:
        """Seconds of sound that wait for a pass."""
        return (self._num_heard - self._num_taken) / self.rate

    @property
    def is_due(self) -> bool:
        """Whether a pass has enough to decode, or the end to reach."""
        window = (self._track.seek + self._listener.whisper.frames + self._edge) * self._hop
        return self._has_ended or self._num_heard - self._num_decoded >= self._step or self._num_heard >= window

    @property
    def _complete(self) -> int:
        """The number of frames that no later sound can change."""
        return self._track.seek + self._power.shape[1]

    @property
    def _frames(self) -> int:
        """The number of frames if the sound ended now."""
        return max(self._num_taken, self._least) // self._hop

    def hear(self, samples: Any) -> None:
        """Takes the next samples: an array `[samples]` or `[channels, samples]` at the model's rate."""
        block = read_audio(samples, self.rate).samples
        self._queue.put(block)
        self._num_heard += len(block)

    def end(self) -> None:
        """No sound comes any more."""
        self._has_ended = True

    def __iter__(self) -> Live[T]:
        return self

    def __next__(self) -> Heard:
        """Decodes the last window; StopIteration behind the end."""
        began, has_ended = clock(), self._has_ended
        self._take(last=has_ended)
        if has_ended and (not self._num_taken or self._track.seek >= self._frames):
            raise StopIteration
        is_final = has_ended or self._complete >= self._track.seek + self._listener.whisper.frames
        track = self._window(self._power if is_final else torch.cat((self._power, self._rest()), 1))
        next(self._listener.listen([track], 1))
        if is_final:
            heard = Heard(self._store(track, last=has_ended), "")
        else:
            self._track.ahead = track.latest
            heard = Heard("", self._listener.whisper.decode(track.latest))
        self._seconds += clock() - began
        return heard

    def result(self) -> T:
        """What `finish` makes of the sound, once it has ended and all of it is decoded."""
        return self._finish(self._recording, self._seconds)

    def _take(self, *, last: bool) -> None:
        """Computes the complete frames of the sound that waits; all are complete in the `last`."""
        blocks = [self._queue.get() for _ in range(self._queue.qsize())]
        self._sound = np.concatenate((self._sound, *blocks))
        self._num_taken += sum(map(len, blocks))
        if not last and self._num_taken < self._extractor.n_fft:
            return
        begin = self._complete - self._first
        end = (len(self._sound) - self._extractor.n_fft // 2) // self._hop + 1
        power = self._rest() if last else log_power(self._sound, self._extractor)[:, begin:end]
        self._power = torch.cat((self._power, power), 1)
        self._loudest = max([self._loudest, *power.amax(0).tolist()])
        begin = max(self._complete - self._edge, 0)
        self._sound = self._sound[(begin - self._first) * self._hop :]
        self._first = begin

    def _rest(self) -> Tensor:
        """The frames behind the complete ones, if the sound ended now."""
        missing = (self._frames - self._first) * self._hop - len(self._sound)
        sound = np.pad(self._sound, (0, max(missing, 0)))
        return log_power(sound, self._extractor)[:, self._complete - self._first :]

    def _window(self, power: Tensor) -> Track:
        """A copy of the track with the sound of these frames."""
        self._num_decoded = self._num_taken
        return replace(
            self._track,
            features=leveled(power.clone(), max(self._loudest, float(power.max()))),
            first=self._track.seek,
            sound_frames=min(-(-self._num_taken // self._hop), self._frames),
            seconds=self._num_taken / self.rate,
            timestamps=bool(self._listener.settings.return_timestamps) or self._num_taken > self._least,
            segments=[*self._track.segments],
            finish_reasons=[*self._track.finish_reasons],
        )

    def _store(self, track: Track, *, last: bool) -> str:
        """Stores a decoded window, and returns its new text; after the `last`, all text that was not returned yet."""
        self._power = self._power[:, track.seek - self._track.seek :]
        self._track, self._recording.tracks = track, [track]
        self._recording.duration = self._num_taken / self.rate
        self._listener.stats = [total(self._listener.stats)]
        text, earlier = self._read(self._recording), self._text
        if not (text.startswith(earlier) or last):
            return ""
        self._text = text
        return text[len(earlier) :]
