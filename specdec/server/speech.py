"""A model that writes down speech, as a server has it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specdec.pipelines import Transcriber, Transcription
from specdec.server.cancellation import Cancel
from specdec.server.errors import ApiError


@dataclass(frozen=True)
class Listen:
    """How a recording is to be heard; `stamps` are "segment", "word", or None for plain text."""

    task: str
    language: str | None = None
    prompt: str | None = None
    temperature: float = 0.0
    stamps: str | None = None
    seed: int = 0


class SpeechModel:
    """A transcriber; recordings of at most `seconds` are heard."""

    task = "speech"
    chats = predicts = False

    def __init__(self, name: str, transcriber: Transcriber, seconds: float) -> None:
        self.name, self.transcriber, self.generator = name, transcriber, transcriber.generator
        self.drafts = self.generator.drafter is not None
        self._seconds = seconds

    def hear(self, content: bytes, asked: Listen, cancel: Cancel) -> Iterator[str | Transcription]:
        """What is said, window by window, then all of it; raises a 400 for what is no sound, or too long."""
        self._check_length(content)
        options: dict[str, Any] = {"language": asked.language, "task": asked.task, "seed": asked.seed}
        if asked.stamps is not None:
            options["return_timestamps"] = "word" if asked.stamps == "word" else True
        if asked.prompt:
            options["prompt_ids"] = self._prompt(asked.prompt)
        if asked.temperature:
            options["temperature"] = asked.temperature
        found = yield from self.transcriber.stream(
            content,
            stopping_criteria=[_Given(cancel)],
            progress=lambda done, known: cancel.check(),
            **{name: value for name, value in options.items() if value is not None},
        )
        yield found

    def silence(self) -> dict[str, Any]:
        """What the model is given to show that it works."""
        config = self.generator.target.config
        return {"input_features": torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)}

    def _prompt(self, text: str) -> list[int]:
        """The ids of a text that came before, as Whisper reads them."""
        tokenizer = self.generator.tokenizer
        try:
            return [int(token) for token in tokenizer.get_prompt_ids(text)]
        except ValueError as error:  # special tokens in it
            raise ApiError(400, f"`prompt`: {error}", param="prompt") from None

    def _check_length(self, content: bytes) -> None:
        """Raises before anything is decoded, from what the file says of itself."""
        import soundfile

        try:
            with soundfile.SoundFile(io.BytesIO(content)) as file:
                seconds = file.frames / file.samplerate if file.samplerate else 0.0
        except (soundfile.SoundFileError, TypeError, RuntimeError) as error:
            reason = str(error).rpartition(": ")[2].strip() or type(error).__name__
            message = f"`file` cannot be read as sound ({reason}): wav, flac, mp3 and ogg can"
            raise ApiError(400, message, param="file", code="invalid_audio") from None
        if not 0 < seconds <= self._seconds:
            message = f"`file` lasts {seconds:.0f} s, and this server hears up to {self._seconds:.0f} s: cut it"
            if not seconds:
                message = "`file` has no sound in it"
            raise ApiError(400, message, param="file", code="invalid_audio")


class _Given:
    """A stopping criterion that ends a call which nobody wants any more."""

    def __init__(self, cancel: Cancel) -> None:
        self._cancel = cancel

    def __call__(self, ids: Any, scores: Any, **_: Any) -> bool:
        """Never true; raises CancelledError instead."""
        self._cancel.check()
        return False
