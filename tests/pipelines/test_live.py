"""Sound that is transcribed while it comes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor, WhisperProcessor

from specdec import OptionError, Transcriber, UnsupportedError
from specdec.pipelines.speech.live import Heard, Live
from tests.speech import RATE, processor, speech, whisper

PARTS = processor()
OPTIONS: dict[str, Any] = {"language": "en", "max_new_tokens": 12}


def followed(live: Live[Any], sound: np.ndarray, size: int = RATE // 4) -> Iterator[Heard]:
    """All that is heard of sound that comes in blocks."""
    for begin in range(0, len(sound), size):
        live.hear(sound[begin : begin + size])
        while live.is_due:
            yield next(live)
    live.end()
    yield from live


@pytest.mark.parametrize("stamps", [None, True, "word"])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 1.013, 2.37])
def test_the_final_text_is_a_files(seconds: float, stamps: Any) -> None:
    """Of less than a window and of several, at once and in blocks; the final pieces are that text."""
    transcriber = Transcriber(whisper(1, stamps=1.0), processor=PARTS)
    options = {**OPTIONS, "return_timestamps": stamps}
    sound = speech(seconds, 1)
    whole = transcriber(sound, **options)
    for size in (RATE // 4, RATE // 9, 10 * RATE):
        live = transcriber.live(step=0.2, **options)
        pieces = [heard.final for heard in followed(live, sound, size)]
        result = live.result()
        assert (dict(result), "".join(pieces)) == (dict(whole), whole["text"])
        assert (result.segments, result.cues, result.duration) == (whole.segments, whole.cues, whole.duration)


def test_partial_text_is_what_a_file_would_say() -> None:
    """If it ended there; the language, too, is found anew until a window is full."""
    transcriber, sound = Transcriber(whisper(2), processor=PARTS), speech(0.9, 2)
    live = transcriber.live(step=0.25, max_new_tokens=12)
    heard = list(followed(live, sound))
    for number, one in enumerate(heard[:-1], 1):
        assert one == Heard("", transcriber(sound[: number * RATE // 4], max_new_tokens=12)["text"])
    assert (len(heard), heard[-1].partial) == (4, "")


@pytest.mark.parametrize("draft", [None, whisper(9, stamps=1.0)])
def test_the_last_text_is_the_draft(draft: Any) -> None:
    """A window that is read again takes few passes, with any draft; the sound hardly changes between these two."""
    transcriber, sound = Transcriber(whisper(2), draft, processor=PARTS), speech(0.9, 1)
    how: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": 6}
    live = transcriber.live(step=0.01, **OPTIONS, **how)
    list(followed(live, np.append(sound, np.zeros(1600, np.float32)), len(sound)))
    stats = live.result().stats
    assert stats.mean_acceptance_length > 2.5
    assert live.result()["text"] == transcriber(np.append(sound, np.zeros(1600, np.float32)), **OPTIONS)["text"]


def test_final_sound_is_forgotten() -> None:
    """A long recording needs no more memory than a window, and what waits."""
    live = Transcriber(whisper(1, stamps=1.0), processor=PARTS).live(**OPTIONS)
    for _ in followed(live, speech(6.0, 1)):
        assert live._power.shape[1] < 160
        assert len(live._sound) < RATE
        assert len(live._listener.stats) < 5
    assert (live.duration, live.behind) == (6.0, 0.0)


def test_louder_sound_later() -> None:
    """What became final stays so, and the rest is heard beside the loudest sound so far."""
    transcriber = Transcriber(whisper(1, stamps=1.0), processor=PARTS)
    sound = np.concatenate([speech(1.5, 1) * np.float32(1e-3), speech(1.5, 2)])
    live = transcriber.live(step=0.2, **OPTIONS)
    pieces = [heard.final for heard in followed(live, sound)]
    assert "".join(pieces) == live.result()["text"]


def test_errors() -> None:
    """Before anything is heard, and for sound that is none."""
    transcriber = Transcriber(whisper(), processor=PARTS)
    for options, words in (
        ({"step": 0}, "`step` must be seconds above 0, got 0"),
        ({"chunk_length_s": 1}, "leave it out"),
        ({"language": "klingon"}, "`language` must be one that the model knows"),
    ):
        with pytest.raises(OptionError, match=words):
            transcriber.live(**options)
    with pytest.raises(OptionError, match="not finite"):
        transcriber.live().hear(np.full(10, np.nan, np.float32))
    noisy = WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1, dither=1.0), PARTS.tokenizer)
    with pytest.raises(UnsupportedError, match="set its `dither` to 0"):
        Transcriber(whisper(), processor=noisy).live()
