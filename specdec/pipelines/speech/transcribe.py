"""`Transcriber`: sound to text, with the call of transformers' pipeline for speech recognition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike
from time import perf_counter as clock
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, GenerationConfig

from specdec.core.stats import Stats, total
from specdec.errors import OptionError, SpecdecError, UnsupportedError
from specdec.generator.drafts_by_name import NAMES as DRAFT_NAMES
from specdec.generator.drafts_by_name import copying_beside
from specdec.generator.generator import SpecGenerator
from specdec.models.hf.load_errors import check_folder, explain_errors
from specdec.options import bundled_models
from specdec.options.fields import check_whole, is_number, pop_fields
from specdec.options.load import AUTO, Loading
from specdec.pipelines.checks import check_function, refuse_outputs
from specdec.pipelines.speech.live import Live
from specdec.pipelines.speech.recordings import Chunking, Recording, read_chunking
from specdec.pipelines.speech.settings import NAMES, SpeechSettings, speech_settings
from specdec.pipelines.speech.whisper import SpeechConfig, Whisper
from specdec.pipelines.speech.windows import Listener, Segment, Track, options_at

Progress = Callable[[float, float], None]
OnError = Callable[[Any, SpecdecError], None]
Stop = Callable[[], bool]
_CALL = ("chunk_length_s", "stride_length_s", "batch_size", "return_language", "prompt", "generate_kwargs")
CALL_OPTIONS = (*_CALL, *NAMES)
"""The options of a call that are no options of `generate`."""
_WORDLESS = 10.0  # seconds of sound; a longer recording without a word is a warning
_IGNORED = ("ignore_warning", "decoder_kwargs")  # transformers' pipeline has them for models of another kind


class Transcription(dict[str, Any]):
    """`text`, and on request `chunks` of `text` and `timestamp`, as transformers' pipeline returns them.

    Attributes: `cues`, the chunks as subtitles show them: segments, with `words` in them where words have times;
    `segments` of each track (the recording, or each of its chunks) with their tokens; `finish_reasons`: why the text of
    each window with speech ended; `language`, the first one, or None where the prompt has none; `duration` of the
    recording in seconds; `stopped`: `stop_when` ended the call before the recording's end; `stats` of the whole call;
    `seconds`: the call's time, divided among its recordings by duration.
    """

    cues: list[dict[str, Any]]
    segments: list[list[Segment]]
    finish_reasons: list[str]
    language: str | None
    duration: float
    stopped: bool
    seconds: float
    stats: Stats

    @property
    def tokens(self) -> list[int]:
        """All tokens with timestamps, track by track."""
        return [token for stretch in self.segments for segment in stretch for token in segment.tokens]

    @property
    def real_time_factor(self) -> float:
        """Seconds of work per second of sound."""
        return self.seconds / self.duration if self.duration else 0.0


@dataclass(frozen=True)
class _Request:
    """The arguments of a call; `options`: arguments of `SpecGenerator.generate`."""

    settings: SpeechSettings
    chunking: Chunking | None
    batch_size: int
    return_language: bool
    options: dict[str, Any]
    progress: Progress | None
    on_error: OnError | None
    stop_when: Stop


class Transcriber:
    """Transcribes speech with a target of the Whisper family and a draft, to the text that the target alone writes.

    `target`: a model, id or folder, or a `SpecGenerator`, which has its draft. `draft`: a smaller Whisper; a distilled
    decoder that shares the target's encoder (a whole model with equal encoder weights, or a `WhisperForCausalLM`); a
    draft that copies; None; or "auto": the target in 4 bits, where that drafts well. `processor`: by default the one
    beside a target that is named. `options`: defaults of the call, and options of `SpecGenerator`.

    Raises OptionError for parts that do not fit together, UnsupportedError for a target other than Whisper.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = AUTO,
        *,
        processor: Any = None,
        tokenizer: Any = None,
        feature_extractor: Any = None,
        **options: Any,
    ) -> None:
        if processor is None and isinstance(target, str | PathLike):
            loading, _ = Loading.split(options)
            processor = processor_beside(target, loading.revision, trust_remote_code=loading.trust_remote_code)
        tokenizer = tokenizer or getattr(processor, "tokenizer", None) or getattr(target, "tokenizer", None)
        self._extractor: Any = feature_extractor or getattr(processor, "feature_extractor", None)
        if tokenizer is None or self._extractor is None:
            raise OptionError("a Transcriber needs `processor=`, or `tokenizer=` and `feature_extractor=`: pass them")
        self._defaults = pop_fields(options, CALL_OPTIONS)
        if isinstance(target, str | PathLike):
            check_early(_flat(self._defaults), self._extractor, target, Loading.split(options)[0].revision)
        if isinstance(target, SpecGenerator):
            if draft not in (None, AUTO) or options:
                name = next(iter(options)) if draft in (None, AUTO) else "draft"
                raise OptionError(f"`{name}` belongs to the SpecGenerator: set it there, or pass the model")
            self.generator = target
        else:
            self.generator = SpecGenerator(target, draft, tokenizer=tokenizer, **options)
        self._whisper = Whisper(self.generator.target, tokenizer)
        self._check_parts()

    @classmethod
    def from_pretrained(cls, target: str | PathLike[str], draft: Any = AUTO, **options: Any) -> Transcriber:
        """`Transcriber(target, draft, **options)`, by the name that transformers' users know."""
        return cls(target, draft, **options)

    def __repr__(self) -> str:
        return f"Transcriber({self.generator.target!r}, draft={self.generator.draft!r})"

    def __call__(
        self,
        inputs: Any,
        *,
        progress: Progress | None = None,
        on_error: OnError | None = None,
        stop_when: Stop = lambda: False,
        **options: Any,
    ) -> Any:
        """The `Transcription` of one recording, a list for a list, an iterator for an iterator.

        `inputs`: a file name, bytes, a binary file, an array at the model's rate (`[samples]` or
        `[channels, samples]`), or `{"array", "sampling_rate"}`. Recordings longer than the model's window are decoded
        window by window, or with `chunk_length_s` in chunks that overlap by `stride_length_s` on both sides (by default
        a sixth); `batch_size` windows or chunks at a time. `return_timestamps`: True for segments, "word" for words;
        `return_language` adds the language to chunks. `prompt`: text that the recording continues, such as names that
        are said in it; its ids are `prompt_ids`. `generate_kwargs`, whose items may also be passed as arguments:
        the fields of `SpeechSettings` and the options of `SpecGenerator.generate`. `progress(done, whole)` is called
        with seconds of sound. Once `stop_when()`, which is called after each round of windows, is true, the results are
        what was heard so far, without recordings that were not begun.

        Raises OptionError for wrong options before decoding, and for an unreadable recording when it is reached; with
        `on_error(input, error)` its result is None instead, and the others are transcribed.
        """
        request = self._request(options, progress, on_error, stop_when)
        if isinstance(inputs, list | tuple):
            return self._transcribe(inputs, request)
        if isinstance(inputs, Iterator) and not hasattr(inputs, "read"):
            return self._stream(inputs, request)
        return self._transcribe([inputs], request)[0]

    def stream(
        self, source: Any, *, progress: Progress | None = None, **options: Any
    ) -> Generator[str, None, Transcription]:
        """Yields the text of one recording window by window, and returns the `Transcription`.

        Takes the options of a call, and raises its errors with the first piece. The pieces add up to the whole text;
        text that a later window may change (overlapping chunks, words with times) is one piece at the end.
        """
        request, output = self._request(options, progress), ""
        recordings, results = list[Recording](), list[Transcription | None]()
        is_final = request.chunking is None and request.settings.return_timestamps != "word"
        for _ in self._windows([source], recordings, results, request):
            text = self._text(recordings[0], request)["text"] if is_final else ""
            if text != output and text.startswith(output):
                yield text[len(output) :]
                output = text
        [transcription] = results
        assert transcription is not None
        if rest := transcription["text"][len(output) :]:
            yield rest
        return transcription

    def live(self, *, step: float = 0.5, **options: Any) -> Live[Transcription]:
        """A recording that is still made, at the model's rate: it takes sound as it comes, and its text follows.

        `step`: seconds of new sound after which its window is decoded again. Takes the options of a call for one
        recording, without chunks; its result covers the whole recording.
        """
        request = self._request(options)
        if request.chunking is not None:
            raise OptionError("`chunk_length_s` cuts whole recordings, and live sound comes in windows: leave it out")
        if not is_number(step) or step <= 0:
            raise OptionError.of("step", "seconds above 0", step)
        copies = {} if any(name in request.options for name in DRAFT_NAMES) else self._copying
        options = {**request.options, **copies}
        listener = Listener(self.generator, self._whisper, request.settings, options, lambda seconds: None)

        def finish(recording: Recording, seconds: float) -> Transcription:
            result = self._result(recording, request)
            result.seconds, result.stats = seconds, total(listener.stats)
            return result

        return Live(
            listener,
            self._extractor,
            step=step,
            read=lambda recording: self._text(recording, request)["text"],
            finish=finish,
        )

    @cached_property
    def _copying(self) -> dict[str, Any]:
        """The option of a call for a draft that copies from predictions; none if the generator's draft does."""
        draft = copying_beside(self.generator.draft)
        return {} if draft is self.generator.draft else {"assistant_model": draft}

    def _check_parts(self) -> None:
        """Raises OptionError where extractor, target and draft read different features."""
        whisper, extractor = self._whisper, self._extractor
        size = (extractor.feature_size, extractor.nb_max_frames)
        if size != (whisper.mels, whisper.frames):
            expected = f"one of {whisper.mels} mels and {whisper.frames} frames, as the target reads"
            raise OptionError.of("feature_extractor", expected, size)
        draft = self.generator.draft
        for model in draft.models if draft is not None else ():
            if not model.is_encoder_decoder or model.config.model_type != "whisper":
                continue
            size = (model.config.num_mel_bins, model.config.max_source_positions)
            if size != (whisper.mels, whisper.positions):
                reads = f"{whisper.mels} mels and {whisper.positions} positions"
                raise OptionError.of("draft", f"a model that reads {reads}, as the target does", size)

    def _request(
        self,
        arguments: Mapping[str, Any],
        progress: Progress | None = None,
        on_error: OnError | None = None,
        stop_when: Stop = lambda: False,
    ) -> _Request:
        """A call's options over the defaults, checked."""
        check_function("progress", progress, "done, whole")
        check_function("on_error", on_error, "input, error")
        options = {**_flat(self._defaults), **_flat(arguments)}
        options = {name: value for name, value in options.items() if value is not None and name not in _IGNORED}
        call, speech = pop_fields(options, _CALL), pop_fields(options, NAMES)
        if (prompt := call.get("prompt")) not in (None, ""):
            speech["prompt_ids"] = self._prompt_ids(prompt, speech.get("prompt_ids"))
        if options.pop("do_sample", False):
            speech.setdefault("temperature", 1.0)  # `generate` samples at this temperature by default
        if "seed" not in options:
            options["seed"] = int(torch.randint(2**62, ()))
        if not isinstance(options["seed"], int):
            raise OptionError.of("seed", "one number for all inputs", options["seed"])
        if "prediction" in options:
            raise OptionError("`prediction` is set by the Transcriber for each window: leave it out")
        for name in ("num_return_sequences", "num_samples"):
            if options.get(name, 1) != 1:
                raise OptionError(f"`{name}` above 1 is not supported by a Transcriber: call SpecGenerator for it")
        refuse_outputs("Transcriber", options)
        batch_size = call.get("batch_size", 1)
        check_whole("batch_size", batch_size)
        chunking = read_chunking(call.get("chunk_length_s"), call.get("stride_length_s"), self._extractor)
        settings = speech_settings(speech, self._whisper)
        for temperature in settings.temperatures:
            self.generator.options(**options_at(temperature, options, settings))
        language = bool(call.get("return_language"))
        return _Request(settings, chunking, batch_size, language, options, progress, on_error, stop_when)

    def _prompt_ids(self, prompt: object, ids: object) -> list[int]:
        """The ids of a text before the recording; raises OptionError for special tokens in it."""
        if not isinstance(prompt, str):
            raise OptionError.of("prompt", "text that the recording continues", prompt)
        if ids is not None:
            raise OptionError("`prompt` and `prompt_ids` are two forms of one text: leave one out")
        try:
            return [int(token) for token in self._whisper.tokenizer.get_prompt_ids(prompt)]
        except ValueError as error:
            raise OptionError(f"`prompt`: {error}") from None

    def _stream(self, inputs: Iterator[Any], request: _Request) -> Iterator[Transcription | None]:
        first = 0
        while not request.stop_when() and (batch := list(islice(inputs, request.batch_size))):
            recordings = list[Recording]()
            yield from self._transcribe(batch, request, recordings, first)
            first += sum(len(recording.tracks) for recording in recordings)

    def _transcribe(
        self, inputs: Iterable[Any], request: _Request, recordings: list[Recording] | None = None, first: int = 0
    ) -> list[Transcription | None]:
        """The results of all inputs; `recordings` and `first` as in `_windows`."""
        results: list[Transcription | None] = []
        for _ in self._windows(inputs, [] if recordings is None else recordings, results, request, first):
            pass
        return results

    def _windows(
        self,
        inputs: Iterable[Any],
        recordings: list[Recording],
        results: list[Transcription | None],
        request: _Request,
        first: int = 0,
    ) -> Iterator[None]:
        """Transcribes all inputs; yields after each window, and fills `recordings`, and at the end `results`.

        `first`: the number of the first track; random draws depend on a track's number.
        """
        began, done = clock(), 0.0

        def report(seconds: float) -> None:
            nonlocal done
            done += seconds
            if request.progress is not None:
                request.progress(done, sum(recording.duration for recording in recordings))

        def tracks() -> Iterator[Track]:
            number, timestamps = first, bool(request.settings.return_timestamps)
            for source in inputs:
                recordings.append(Recording())
                try:
                    for track in recordings[-1].read(source, self._extractor, request.chunking, number, timestamps):
                        recordings[-1].tracks.append(track)
                        number += 1
                        yield track
                except SpecdecError as error:
                    if request.on_error is None:
                        raise
                    recordings[-1].failed = True
                    request.on_error(source, error)

        listener = Listener(self.generator, self._whisper, request.settings, request.options, report)
        for _ in listener.listen(tracks(), request.batch_size):
            yield
            if request.stop_when():
                break
        seconds, stats = clock() - began, total(listener.stats)
        whole = sum(recording.duration for recording in recordings) or 1.0
        results += [None if recording.failed else self._result(recording, request) for recording in recordings]
        for transcription in filter(None, results):
            transcription.seconds, transcription.stats = seconds * transcription.duration / whole, stats

    def _result(self, recording: Recording, request: _Request) -> Transcription:
        """The result of a recording, as far as it is decoded; warns where a long one has no words."""
        result = Transcription(self._text(recording, request))
        result.stopped = not recording.is_whole
        if recording.duration >= _WORDLESS and not (result.stopped or result["text"].strip()):
            warnings.warn(
                f"{recording.name} is {recording.duration:.0f} s of sound, and not a word was heard in it: if it has "
                "speech, pass `language=`, or a larger model",
                stacklevel=2,
            )
        result.cues = result.get("chunks", [])
        if request.settings.return_timestamps == "word":
            result.cues = recording.cues(self._whisper, result.cues)
        result.segments = [track.segments for track in recording.tracks]
        result.finish_reasons = [reason for track in recording.tracks for reason in track.finish_reasons]
        openings = [segment.opening for track in recording.tracks for segment in track.segments]
        openings += [track.opening for track in recording.tracks]
        result.language = next(map(self._whisper.language, openings), None)
        result.duration = recording.duration
        return result

    def _text(self, recording: Recording, request: _Request) -> dict[str, Any]:
        """Text and chunks of a recording, as far as it is decoded."""
        return recording.text(
            self._whisper,
            timestamps=request.settings.return_timestamps,
            language=request.return_language,
            seconds=self._extractor.chunk_length / self._whisper.positions,
        )


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the items of their `generate_kwargs`; raises OptionError for one that is passed both ways."""
    flat = {name: value for name, value in options.items() if name != "generate_kwargs" and value is not None}
    nested = options.get("generate_kwargs") or {}
    if not isinstance(nested, Mapping):
        raise OptionError.of("generate_kwargs", "a mapping of options", nested)
    if both := [name for name in nested if name in flat]:
        raise OptionError(f"`{both[0]}` is given twice, also in `generate_kwargs`: pass it once")
    return {**nested, **flat}


def check_early(options: Mapping[str, Any], extractor: Any, target: str | PathLike[str], revision: str | None) -> None:
    """Raises OptionError for options of a call that the files of a model, which is not loaded yet, cannot serve."""
    read_chunking(options.get("chunk_length_s"), options.get("stride_length_s"), extractor)
    name = bundled_models.locate(str(target), "target")
    try:
        settings = GenerationConfig.from_pretrained(name, revision=revision)
        vocab_size = AutoConfig.from_pretrained(name, revision=revision).vocab_size
    except (OSError, ValueError):  # without these files, or with code of its own: the loaded model says more
        return
    speech_settings({n: v for n, v in options.items() if n in NAMES}, SpeechConfig(settings, vocab_size))


def processor_beside(target: Any, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The processor in the folder or hub repository of a Whisper model; UnsupportedError where it is none."""
    check_folder(target, "target")
    name = bundled_models.locate(str(target), "target")
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with explain_errors(name, "target"):
        kind = AutoConfig.from_pretrained(name, **hub).model_type
    if kind != "whisper":
        raise UnsupportedError(
            f"`target` must be a Whisper model, and {str(target)!r} is of the kind {kind!r}: pass a speech model, "
            "or give the text model to SpecGenerator"
        )
    try:
        return AutoProcessor.from_pretrained(name, **hub)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"no processor lies beside {str(target)!r} ({error}): pass `processor=`") from None
