"""A speech model of a server."""

from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import torch

from specdec.errors import OptionError
from specdec.pipelines import Transcriber, Transcription
from specdec.pipelines.speech.audio import sound_file
from specdec.pipelines.speech.live import Live
from specdec.server.cancellation import Cancel
from specdec.server.errors import ApiError


class SpeechModel:
    """A transcriber of recordings of at most `seconds`."""

    task = "speech"
    chats = False

    def __init__(self, name: str, transcriber: Transcriber, seconds: float) -> None:
        self.name, self.transcriber, self.generator = name, transcriber, transcriber.generator
        self.seconds = seconds

    def transcribe(
        self, content: bytes, prompt: str | None, options: dict[str, Any], cancel: Cancel
    ) -> Generator[str | Transcription]:
        """The text window by window, then the `Transcription`; `options` are the transcriber's.

        Raises a 400 for an unreadable or long recording, and for special tokens in the prompt.
        """
        self._check_length(content)
        options = self._options(prompt, options, cancel)
        transcription = yield from self.transcriber.stream(content, progress=cancel.check, **options)
        yield transcription

    def live(self, prompt: str | None, options: dict[str, Any], cancel: Cancel) -> Live[Transcription]:
        """A recording that is still made; arguments and errors as in `transcribe`."""
        return self.transcriber.live(**self._options(prompt, options, cancel))

    def _options(self, prompt: str | None, options: dict[str, Any], cancel: Cancel) -> dict[str, Any]:
        """The options of a call, which `cancel` ends."""
        passed = {name: value for name, value in {**options, "prompt": prompt or None}.items() if value is not None}
        return {"stopping_criteria": [cancel.check], **passed}

    def warm_up(self) -> None:
        """Decodes a token of silence."""
        config = self.generator.target.config
        silence = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        self.generator.generate(input_features=silence, max_new_tokens=1)

    def _check_length(self, content: bytes) -> None:
        """Raises a 400 from the file's header, before anything is decoded."""
        try:
            with sound_file(io.BytesIO(content), "`file`") as file:
                seconds = file.frames / file.samplerate if file.samplerate else 0.0
        except OptionError as error:
            raise ApiError(400, str(error), param="file", code="invalid_audio") from None
        if not 0 < seconds <= self.seconds:
            message = f"`file` lasts {seconds:.0f} s, and this server hears up to {self.seconds:.0f} s: cut it"
            if not seconds:
                message = "`file` has no sound in it"
            raise ApiError(400, message, param="file", code="invalid_audio")
