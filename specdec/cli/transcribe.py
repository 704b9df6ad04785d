"""`specdec transcribe`: recordings to text, JSON lines or subtitles."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from signal import SIGTERM
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer import Argument, Option

from specdec.cli import flags, live
from specdec.cli.request import (
    CALL_ONLY,
    FLAGS,
    STDIN,
    CommandRequest,
    are_here,
    files_among,
    loading_flags,
    passed,
    read_assignments,
    refuse_idle,
)
from specdec.cli.show import print_text, show_stats
from specdec.cli.terminal import (
    FAILED,
    OK,
    Bar,
    Interrupt,
    in_flags,
    is_quiet,
    libraries_silenced,
    loading,
    remark,
    say,
)
from specdec.errors import OptionError, SpecdecError
from specdec.options import bundled_models
from specdec.options.bundled_models import locate
from specdec.options.drafts import read_draft
from specdec.options.fields import pop_fields
from specdec.options.load import AUTO
from specdec.options.resolve import resolve

if TYPE_CHECKING:
    from specdec.pipelines import Transcriber, Transcription

SOUNDS = ("wav", "flac", "mp3", "ogg")
ZOO = "zoo:speech"
LINES = ("max_line_width", "max_words_per_line", "max_line_count")
SHORT = re.compile(r"(tiny|base|small|medium)(\.en)?|large(-v[123])?|large-v3-turbo")  # openai-whisper's names
Format = Enum("Format", {"text": "text", "json": "json", "srt": "srt", "vtt": "vtt"})
SPEECH_FLAGS = {**FLAGS, "chunk_length": "chunk_length_s"}


@flags.takes("draft num_draft_tokens schedule dtype quantization backend exactness device_map prefix_cache stats quiet")
def transcribe(
    ctx: typer.Context,
    files: list[str] | None = Argument(
        None, metavar="FILE", help="Recordings (wav, flac, mp3, ogg) or folders of them; - reads stdin."
    ),
    stdin: bool = Option(
        False, "--stdin", help="Transcribe sound while it comes: WAV or raw samples, 16-bit little-endian mono."
    ),
    microphone: bool = Option(False, "--microphone", help="Transcribe a microphone's sound while it comes."),
    rate: int | None = flags.flag(f"Raw samples per second, by default {live.RATE}.", min=1000, max=384_000),
    demo: bool = Option(False, "--demo", help="Transcribe the bundled recordings."),
    model: str | None = flags.flag(f"Whisper model: hub id or folder. {ZOO}, the model of --demo, knows 299 words."),
    language: str | None = flags.flag("Language of the recordings, a name or code; detected by default."),
    task: Literal["transcribe", "translate"] | None = flags.flag("Translations are into English."),
    prompt: str | None = flags.flag(
        "Text that each recording continues, such as names that are said in it.", metavar="TEXT"
    ),
    format: list[Format] = Option([Format.text], help="Output; json is one object per file and line; repeatable."),
    words: bool = Option(
        False, "--words", help="Timestamps of words; in vtt they stand in the segments' cues, in json in segments."
    ),
    max_line_width: int | None = flags.flag("Characters in a line of srt and vtt.", min=1),
    max_words_per_line: int | None = flags.flag("Words in a cue of srt and vtt, whose times are its words'.", min=1),
    max_line_count: int | None = flags.flag("Lines of --max-line-width in a cue; more are several cues.", min=1),
    chunk_length: float | None = flags.flag(
        "Decode overlapping chunks of this length instead of window after window.", metavar="SECONDS"
    ),
    batch_size: int = Option(1, min=1, help="Windows or chunks that are decoded together."),
    fallback: bool = Option(
        False, "--fallback", help="Retry unlikely windows at higher temperatures; skip them if silent."
    ),
    context: bool = Option(False, "--context", help="Condition each window on the text before it."),
    max_new_tokens: int | None = flags.flag("Token limit per window."),
    seed: int | None = flags.flag("Seed of sampling, for --fallback."),
    set_: list[str] | None = flags.flag("Any other option of a call; repeatable.", "--set", metavar="KEY=VALUE"),
    output_dir: Path | None = flags.flag("Folder for NAME.txt, .json, .srt or .vtt; subfolders stay."),
    resume: bool = Option(False, "--resume", help="Skip recordings with their files in --output-dir."),
) -> int:
    """Transcribe recordings. The text is the same with and without a draft.

    Recordings that cannot be read are reported on stderr; the others are transcribed, and the exit code is 1.
    """
    began = clock()
    source = live.source_of(ctx.params)
    if source is None and bool(files) == demo:
        raise OptionError("pass the recordings to transcribe, or --demo for the bundled ones")
    bundled = [str(path) for path, _ in bundled_models.recordings()] if demo else []
    recordings = [source] if source else bundled or files_among(files or [], SOUNDS)
    name = ctx.params["model"] = choose_model(model, demo=demo)
    if source is None and not any(name == STDIN or Path(name).exists() for name in recordings):
        raise OptionError(f"there is no file {recordings[0]}: check the name, or download it first")
    formats = ctx.params["format"] = [*dict.fromkeys(kind.value for kind in format)]
    if len(formats) > 1 and output_dir is None:
        raise OptionError(f"--format {' and '.join(formats)} make a file each: pass --output-dir")
    for kind in formats:
        check_output(recordings, kind, output_dir, files or [])
    if not {"srt", "vtt"} & {*formats}:
        refuse_idle(ctx.params, LINES, "is for subtitles: pass --format srt or vtt")
    if words and formats == ["text"]:
        raise OptionError("--words gives times, which text has not: pass --format json, srt or vtt")
    if max_line_width is None:
        refuse_idle(ctx.params, ("max_line_count",), "counts lines of a width: pass --max-line-width")
    request = read_speech(ctx.params)
    make_folder(output_dir)
    if resume:
        recordings = unfinished(recordings, formats, output_dir, files or [])
        if not recordings:
            return OK
    with loading(f"loading {name}", downloads=not are_here(request.target, request.draft)):
        from specdec.pipelines import Transcriber
        from specdec.pipelines.speech.audio import check_readers
        from specdec.pipelines.speech.transcribe import CALL_OPTIONS

        if source is None:  # sound that comes is raw, or WAV
            check_readers()
        rest = dict(request.options)
        early = pop_fields(rest, CALL_OPTIONS)  # which are checked before the model is loaded
        resolve({name: value for name, value in rest.items() if name not in (*CALL_ONLY, "seed")})
        try:
            transcriber = Transcriber.from_pretrained(request.target, request.draft, **request.loading, **early)
        except SpecdecError as error:
            raise type(error)(str(error).replace("`target`", "--model")) from error
    loaded = clock()
    if source is not None:
        out, fault = live.transcribe_live(transcriber, request.options, ctx.params)
        if formats != ["text"] or output_dir is not None:
            show(source, out, ctx.params, headed=False)
        tell([out], ctx.params)
        if fault is not None:
            raise fault
        return OK
    are_read: list[bool] = []
    notice = "stopping after these windows; once more stops at once, without a text"
    try:
        with libraries_silenced(), Interrupt(SIGTERM, notice=notice) as interrupt:
            for is_read in transcribe_all(
                transcriber, recordings, request.options, ctx.params, lambda: interrupt.is_set
            ):
                are_read.append(is_read)
            if len(are_read) < len(recordings):
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        way = "leave these files out to resume (or pass --output-dir and --resume)"
        if output_dir is not None:
            way = f"run the same command {'again' if resume else 'with --resume'} to resume"
        say(f"{len(are_read)} of {len(recordings)} recordings are done; {way}")
        raise
    if failed := are_read.count(False):
        say(f"{failed} of {len(recordings)} recordings could not be read")
    remark(f"{clock() - began:.1f} s in all, {loaded - began:.1f} s of them to load")
    return OK if all(are_read) else FAILED


def transcribe_all(
    transcriber: Transcriber,
    recordings: Sequence[str],
    options: Mapping[str, Any],
    params: Mapping[str, Any],
    stop: Callable[[], bool],
) -> Iterator[bool]:
    """Transcribes and shows the recordings in batches, and yields for each that is done whether it could be read.

    Once `stop()` is true, what was heard is shown, too.
    """
    batch_size = params["batch_size"]

    def progress(done: float, total: float) -> None:
        bar(done, total, f"{done:.0f} of {total:.0f} s of {part}")

    inputs = iter([sys.stdin.buffer if name == STDIN else name for name in recordings])
    how: dict[str, Any] = {"batch_size": batch_size, "progress": progress, "on_error": unreadable, "stop_when": stop}
    results = transcriber(inputs, **how, **options)
    for first in range(0, len(recordings), batch_size):
        batch = recordings[first : first + batch_size]
        last = first + len(batch)
        numbers = f"recordings {first + 1} to {last}" if len(batch) > 1 else f"recording {last}"
        part, bar = f"{numbers} of {len(recordings)}", Bar(grows=True)
        with bar:
            outs = list(islice(results, len(batch)))
        heard = [(name, out) for name, out in zip(batch, outs, strict=False) if out is not None]
        for name, out in heard:
            files = show(name, out, params, headed=len(recordings) > 1)
            if out.stopped:
                say(f"of {name} what was heard until now is in {', '.join(files) or 'the output'}")
        yield from (out is not None for out in outs if out is None or not out.stopped)
        if heard and len(recordings) > 1 and (params["stats"] or not is_quiet()):
            say(", ".join(name for name, _ in heard), "dim")
        if whole := [out for _, out in heard if not out.stopped]:
            tell(whole, params)


def tell(heard: Sequence[Transcription], params: Mapping[str, Any]) -> None:
    """Shows the statistics, if asked for, and the pace of what was transcribed together."""
    stats = heard[0].stats
    if params["stats"]:
        show_stats(stats)
    duration, seconds = sum(out.duration for out in heard), sum(out.seconds for out in heard)
    length = f", mean acceptance length {stats.mean_acceptance_length:.2f}" if stats.num_draft_rounds else ""
    rate = f"{duration / seconds:.1f} times real time" if duration else "no sound"
    rate += "" if any(out["text"].strip() for out in heard) else ", no speech"
    advice = f"; {in_flags(stats.draft_advice)}" if stats.draft_advice else ""
    remark(f"{duration:.1f} s of sound in {seconds:.1f} s ({rate}){length}{advice}")


def unfinished(
    recordings: Sequence[str], formats: Sequence[str], folder: Path | None, named: Sequence[str]
) -> list[str]:
    """The recordings that lack a file in the folder."""
    if folder is None:
        raise OptionError("--resume skips recordings with a file in --output-dir: pass --output-dir")
    left = [name for name in recordings if not all(output_file(name, f, folder, named).exists() for f in formats)]
    say(f"{len(recordings) - len(left)} of {len(recordings)} recordings are done already")
    return left


def make_folder(folder: Path | None) -> None:
    """Makes the folder of --output-dir, if one was named; raises OptionError where it cannot be made."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output-dir: {folder} cannot be made ({error.strerror}): name another") from None


def output_file(name: str, format: str, folder: Path, named: Sequence[str]) -> Path:
    """Where a file's text goes; a file in a folder of those that were `named` keeps the subfolders between them."""
    path = Path(name if name != STDIN else "stdin")
    above = next((Path(root) for root in named if path != Path(root) and path.is_relative_to(root)), path.parent)
    return folder / path.relative_to(above).with_name(f"{path.stem}.{'txt' if format == 'text' else format}")


def unreadable(source: Any, error: SpecdecError) -> None:
    say(f"error: {' '.join(str(error).replace('`inputs`', '`FILE`').split())}", "red")


def choose_model(model: str | None, *, demo: bool) -> str:
    """The model that was named, or for the demo the package's; else raises OptionError."""
    if model is None and not demo:
        raise OptionError(
            f"no model was named: pass --model, for example --model openai/whisper-base (the bundled {ZOO} knows 299 "
            "words)"
        )
    return model or ZOO


def check_output(files: Sequence[str], format: str, folder: Path | None, named: Sequence[str]) -> None:
    """Raises OptionError where two files would have the same output, or a file would be written over."""
    if len(files) > 1 and folder is None and format in ("srt", "vtt"):
        raise OptionError(f"--format {format} makes one file per recording: pass --output-dir")
    if folder is None:
        return
    sources = dict[Path, str]()
    for name in files:
        path = output_file(name, format, folder, named)
        if path in sources:
            twice = f"--output-dir would get {path.stem} twice, of {sources[path]} and {name}"
            is_below = Path(sources[path]).parent == Path(name).parent
            way = "rename one" if is_below else "rename one, or name a folder above both, whose subfolders stay"
            raise OptionError(f"{twice}: {way}")
        if name != STDIN and path.resolve() == Path(name).resolve():
            raise OptionError(f"--output-dir would write over {name}: name another folder")
        sources[path] = name


def read_speech(params: Mapping[str, Any]) -> CommandRequest:
    """The models and the options; a target of the package brings its draft.

    `params` may lack flags.
    """
    from specdec.pipelines.speech.settings import FALLBACK

    model, how = params["model"], loading_flags(params)
    draft = params["draft"]
    if draft is None:
        draft = model if model.startswith("zoo:") else AUTO
    for flag, name in (("--model", model), ("--draft", draft)):
        if SHORT.fullmatch(name) and not Path(name).is_dir():
            raise OptionError(f"{flag} {name}: there is no such folder; for the hub's model pass openai/whisper-{name}")
    target = locate(model, "target", "--model")
    read_draft(draft, "--draft")
    same = ("num_draft_tokens", "schedule", "max_new_tokens", "seed", "language", "task", "prompt", "chunk_length")
    call = {SPEECH_FLAGS.get(name, name): value for name, value in passed(params, same).items()}
    if params.get("words") or params.get("max_words_per_line"):
        call["return_timestamps"] = "word"
    elif {*params.get("format", ())} - {"text"}:
        call["return_timestamps"] = True
    if params.get("context"):
        call["condition_on_prev_tokens"] = True
    extra = read_assignments(params["set_"] or [], call)
    options = {"seed": 0, **(FALLBACK if params.get("fallback") else {}), **call, **extra}
    return CommandRequest(target, draft, options, how)


def show(name: str, out: Transcription, params: Mapping[str, Any], *, headed: bool) -> list[str]:
    """Prints one recording's text, or writes it to the folder and returns its files.

    A text that was stopped gets names with `.part`.
    """
    files = list[str]()
    for kind in params["format"]:
        content = rendered(name, out, kind, params)
        if params["output_dir"] is None:
            print_text(content, name if headed and kind == "text" else None)
            continue
        path = output_file(name, kind, params["output_dir"], params["files"] or [])
        part = path.with_suffix(f".part{path.suffix}")
        files.append(str(part if out.stopped else path))
        write_file(Path(files[-1]), content)
        if not out.stopped:
            part.unlink(missing_ok=True)
    return files


def write_file(path: Path, content: str) -> None:
    """Writes a text and a line end, in a new folder if need be; raises SpecdecError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="utf-8")
    except OSError as error:
        raise SpecdecError(f"{path} cannot be written ({error.strerror}): make room there") from None


def rendered(name: str, out: Transcription, kind: str, params: Mapping[str, Any]) -> str:
    """The text of a recording in a format, without the last line's end."""
    from specdec.pipelines.speech.subtitles import srt, vtt

    if kind == "text":
        return str(out["text"].strip())
    if kind != "json":
        return (srt if kind == "srt" else vtt)(out.cues, *(params[name] for name in LINES)).removesuffix("\n")
    facts = {"file": name, "text": out["text"], "chunks": out["chunks"], "language": out.language}
    if any("words" in cue for cue in out.cues):
        facts["segments"] = [
            {**_timed(cue, "text"), "words": [_timed(word, "word") for word in cue["words"]]} for cue in out.cues
        ]
    facts |= {"finish_reasons": out.finish_reasons, "duration": round(out.duration, 3)}
    facts |= {"seconds": round(out.seconds, 3), "real_time_factor": round(out.real_time_factor, 4)}
    facts |= {"stopped": True} if out.stopped else {}
    return json.dumps(facts, ensure_ascii=False)


def _timed(chunk: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A chunk's times in seconds, and its text under a name, as openai-whisper writes them."""
    start, end = chunk["timestamp"]
    return {"start": start, "end": end, name: chunk["text"]}
