"""`specdec transcribe`: recordings to text, JSON lines or subtitles."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from specdec.cli import flags
from specdec.cli.request import FLAGS, WORDS, Request, passed, read_settings
from specdec.cli.show import PROMPT, show_stats, write
from specdec.cli.terminal import FAILED, OK, counting, loading, say
from specdec.errors import OptionError, SpecdecError
from specdec.options import bundled_models
from specdec.options.bundled_models import locate
from specdec.options.fields import DRAFT_WORDS

if TYPE_CHECKING:
    from specdec.pipelines import Transcriber, Transcription

STDIN = "-"
ZOO = "zoo:speech"
Format = Literal["text", "json", "srt", "vtt"]


@flags.takes("num_draft_tokens schedule dtype backend exactness device_map stats quiet")
def transcribe(
    ctx: typer.Context,
    files: list[str] | None = Argument(
        None, metavar="FILE", help="Recordings (wav, flac, mp3, ogg) or folders of them; - reads stdin."
    ),
    demo: bool = Option(False, "--demo", help="Transcribe the bundled recordings."),
    model: str | None = Option(
        None, help=f"Whisper model: hub id or folder. {ZOO}, the model of --demo, knows 299 words."
    ),
    draft_model: str | None = Option(
        None, help=f"Draft: hub id or folder of a smaller or distilled Whisper; or {', '.join(WORDS)}."
    ),
    language: str | None = Option(None, help="Language of the recordings, a name or code; detected by default."),
    task: str | None = Option(None, help="transcribe, or translate (into English)."),
    format: Format = Option("text", help="Output format; json is one object per file and line."),
    words: bool = Option(False, "--words", help="Timestamps of words instead of segments."),
    reference: Path | None = Option(
        None, help="Reference transcripts, for word error rates: a line per file, or lines of NAME|text."
    ),
    chunk_length: float | None = Option(
        None, metavar="SECONDS", help="Decode overlapping chunks of this length instead of window after window."
    ),
    batch_size: int = Option(1, min=1, help="Windows or chunks that are decoded together."),
    fallback: bool = Option(
        False, "--fallback", help="Retry unlikely windows at higher temperatures; skip silent ones."
    ),
    context: bool = Option(False, "--context", help="Condition each window on the text before it."),
    max_new_tokens: int | None = Option(None, help="Token limit per window."),
    seed: int | None = Option(None, help="Seed of sampling, for --fallback."),
    set_: list[str] | None = Option(None, "--set", metavar="KEY=VALUE", help="Any other option of a call; repeatable."),
    output_dir: Path | None = Option(None, help="Folder for NAME.txt, .json, .srt or .vtt."),
    resume: bool = Option(False, "--resume", help="Skip recordings with a file in --output-dir."),
    *,
    quiet: bool,
) -> int:
    """Transcribe recordings. The text is the same with and without a draft.

    Recordings that cannot be read are reported on stderr; the others are transcribed, and the exit code is 1.
    """
    files, references = read_files(files or [], demo=demo, reference=reference)
    ctx.params["model"] = read_model(model, demo=demo)
    check_output(files, format, output_dir)
    request = read_speech(ctx.params)
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    if resume:
        files, references = unfinished(files, references, format, output_dir)
        if not files:
            return OK
    transcriber = load(request, ctx.params["model"], quiet=quiet)
    texts: list[str | None] = []
    try:
        transcribe_all(transcriber, files, references, texts, request.options, ctx.params)
    except KeyboardInterrupt:
        say(f"{len(texts)} of {len(files)} recordings are done; {how_to_go_on(output_dir)}")
        raise
    if references is not None:
        say(whole_error_rate(transcriber, texts, references, language))
    return FAILED if None in texts else OK


def transcribe_all(
    transcriber: Transcriber,
    files: Sequence[str],
    references: Sequence[str] | None,
    texts: list[str | None],
    options: Mapping[str, Any],
    params: Mapping[str, Any],
) -> None:
    """Transcribes and shows the files in batches, and adds to `texts`: None for what could not be read."""
    batch_size, format, quiet = params["batch_size"], params["format"], params["quiet"]
    for first in range(0, len(files), batch_size):
        names = files[first : first + batch_size]
        with counting(quiet=quiet, grows=True) as notify:

            def progress(done: float, known: float, part: str = f"{first + len(names)}/{len(files)}") -> None:
                notify(done, known, f"{part}, {done:.0f} of {known:.0f} s of sound")

            inputs = [sys.stdin.buffer if name == STDIN else name for name in names]
            found = transcriber(inputs, batch_size=batch_size, progress=progress, on_error=unreadable, **options)
        for i, (name, out) in enumerate(zip(names, found, strict=True), first):
            texts.append(None if out is None else out["text"])
            if out is not None:
                wer = None
                if references is not None:
                    wer = transcriber.error_rate([out["text"]], [references[i]], language=out.language)
                show(name, out, wer, format, params["output_dir"], headed=len(files) > 1)
        heard = [out for out in found if out is not None]
        if heard and len(files) > 1 and (params["stats"] or not quiet):
            say(", ".join(name for name, out in zip(names, found, strict=True) if out is not None), "dim")
        if params["stats"] and heard:
            show_stats(heard[0].stats)
        if not quiet and heard:
            say(pace(heard))


def how_to_go_on(folder: Path | None) -> str:
    if folder is None:
        return "leave these files out to resume (or pass --output-dir and --resume)"
    return "run the same command with --resume to resume"


def unfinished(
    files: list[str], references: list[str] | None, format: Format, folder: Path | None
) -> tuple[list[str], list[str] | None]:
    """The recordings without a file in the folder, and their references."""
    if folder is None:
        raise OptionError("--resume skips recordings with a file in --output-dir: pass --output-dir")
    left = [i for i, name in enumerate(files) if not output_file(name, format, folder).exists()]
    say(f"{len(files) - len(left)} of {len(files)} recordings are done already")
    return [files[i] for i in left], None if references is None else [references[i] for i in left]


def output_file(name: str, format: Format, folder: Path) -> Path:
    ending = "txt" if format == "text" else format
    return folder / f"{Path(name).stem if name != STDIN else 'stdin'}.{ending}"


def unreadable(source: Any, error: SpecdecError) -> None:
    say(f"error: {' '.join(str(error).replace('`inputs`', '`FILE`').split())}", "red")


def whole_error_rate(
    transcriber: Transcriber, texts: Sequence[str | None], references: Sequence[str], language: str | None
) -> str:
    pairs = [(text, reference) for text, reference in zip(texts, references, strict=True) if text is not None]
    if not pairs:
        return "no recording could be read"
    rate = transcriber.error_rate(*map(list, zip(*pairs, strict=True)), language=language)
    return f"word error rate {rate:.2%}, {len(pairs)} recording{'s' * (len(pairs) > 1)}"


def read_files(files: list[str], *, demo: bool, reference: Path | None) -> tuple[list[str], list[str] | None]:
    """The recordings, and their references if known; raises OptionError where none is named."""
    if bool(files) == demo:
        raise OptionError("pass the recordings to transcribe, or --demo for the bundled ones")
    if not demo:
        files = [file for name in files for file in sounds(name)]
        return files, None if reference is None else read_references(reference, files)
    own = [(str(path), text) for path, text in bundled_models.recordings()]
    return [path for path, _ in own], [text for _, text in own]


def sounds(name: str) -> list[str]:
    """The recordings in a folder, or the name of a file; raises OptionError for a folder without any."""
    if name == STDIN or not Path(name).is_dir():
        return [name]
    from specdec.pipelines.speech.audio import sounds_in

    if not (found := sounds_in(Path(name))):
        raise OptionError(f"the folder {name} has no wav, flac, mp3 or ogg file (a model is named with --model)")
    return [str(path) for path in found]


def read_model(model: str | None, *, demo: bool) -> str:
    """The model that was named, or for the demo that of the package; else raises OptionError."""
    if model is None and not demo:
        raise OptionError(
            f"no model was named: pass --model, for example --model openai/whisper-base (the bundled {ZOO} knows 299 "
            "words)"
        )
    return model or ZOO


def check_output(files: Sequence[str], format: Format, folder: Path | None) -> None:
    """Raises OptionError where two recordings would have the same output."""
    if len(files) > 1 and folder is None and format in ("srt", "vtt"):
        raise OptionError(f"--format {format} makes one file per recording: pass --output-dir")
    stems = [Path(name).stem for name in files]
    if folder is not None and (twice := [stem for stem in stems if stems.count(stem) > 1]):
        raise OptionError(f"--output-dir would get {twice[0]} twice: rename one of these files")


def read_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the call, from flags and --set."""
    from specdec.pipelines.speech.settings import FALLBACK

    same = ("num_draft_tokens", "schedule", "max_new_tokens", "seed", "language", "task", "chunk_length")
    given = {FLAGS.get(name, name): value for name, value in passed(params, same).items()}
    if "chunk_length" in given:
        given["chunk_length_s"] = given.pop("chunk_length")
    if params["words"]:
        given["return_timestamps"] = "word"
    elif params["format"] != "text":
        given["return_timestamps"] = True
    if params["context"]:
        given["condition_on_prev_tokens"] = True
    extra = read_settings(params["set_"] or [], given)
    return {"seed": 0, **(FALLBACK if params["fallback"] else {}), **given, **extra}


def read_speech(params: Mapping[str, Any]) -> Request:
    """The models and the options; a target of the package brings its draft, and is loaded in float32."""
    model, draft, how = params["model"], params["draft_model"], passed(params)
    if model.startswith("zoo:"):
        draft, how = draft or model, {"dtype": "float32", **how}
    target, draft = locate(model, "target", "--model"), draft and locate(draft, "draft", "--draft-model")
    return Request(target, draft, "auto", read_options(params), how)


def load(request: Request, name: str, *, quiet: bool) -> Transcriber:
    target, draft = request.target, request.draft
    names = [target, *([draft] if draft is not None and draft.partition(":")[0] not in DRAFT_WORDS else [])]
    with loading(f"loading {name}", quiet=quiet, downloads=not all(Path(one).exists() for one in names)):
        from specdec.pipelines import Transcriber

        transcriber = Transcriber.from_pretrained(target, draft, **request.loading)
        transcriber.generator.compile()
        return transcriber


def show(
    name: str, out: Transcription, wer: float | None, format: Format, folder: Path | None, *, headed: bool
) -> None:
    """Writes one recording's text to the folder, or prints it."""
    content = rendered(name, out, wer, format)
    if folder is not None:
        path = output_file(name, format, folder)
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise SpecdecError(f"{path} cannot be written ({error.strerror}): make room there") from None
        return
    console = Console()
    if headed and format == "text":
        write(console, f"── {name} ──\n", PROMPT)
    write(console, content)


def rendered(name: str, out: Transcription, wer: float | None, format: Format) -> str:
    from specdec.pipelines.speech.subtitles import srt, vtt

    if format == "text":
        return out["text"].strip() + "\n"
    if format != "json":
        return (srt if format == "srt" else vtt)(out["chunks"])
    facts = {
        "file": name,
        "text": out["text"],
        "chunks": out["chunks"],
        "language": out.language,
        "duration": round(out.duration, 3),
        "seconds": round(out.seconds, 3),
        "real_time_factor": round(out.real_time_factor, 4),
        **({} if wer is None else {"word_error_rate": round(wer, 4)}),
    }
    return json.dumps(facts, ensure_ascii=False) + "\n"


def pace(found: Sequence[Transcription]) -> str:
    duration, seconds = sum(out.duration for out in found), sum(out.seconds for out in found)
    stats = found[0].stats
    length = f", mean acceptance length {stats.mean_acceptance_length:.2f}" if stats.num_spec_steps else ""
    rate = f"{seconds / duration:.3f} s per second" if duration else "no sound"
    return f"{duration:.1f} s of sound in {seconds:.1f} s ({rate}){length}"


def read_references(path: Path, files: Sequence[str]) -> list[str]:
    """The reference of each file: by its name, with or without ending, or line by line.

    Raises OptionError where `path` cannot be read or lacks a reference.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError.of("--reference", "a readable text file in UTF-8", str(path), str(error)) from None
    for mark in ("|", "\t"):
        if lines and all(mark in line for line in lines):
            parts = [line.split(mark) for line in lines]
            named = {Path(part[0].strip()).stem: part[-1].strip() for part in parts}
            if missing := [file for file in files if Path(file).stem not in named]:
                raise OptionError(f"--reference {path} has no line for {missing[0]}: add it, or leave that file out")
            return [named[Path(file).stem] for file in files]
    if len(lines) != len(files):
        raise OptionError.of("--reference", f"one line for each of {len(files)} files", f"{len(lines)} lines in {path}")
    return lines
