"""The request of a command: flags over a YAML file, checked before anything is loaded."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specdec.cli.terminal import loading, remark
from specdec.errors import OptionError
from specdec.options.bundled_models import locate
from specdec.options.drafts import read_draft
from specdec.options.fields import COPYING, DRAWING
from specdec.options.generate import FORMS
from specdec.options.load import AUTO, Loading
from specdec.options.load import NAMES as LOADING
from specdec.options.resolve import read_yaml, resolve

if TYPE_CHECKING:
    from specdec.generator.generator import SpecGenerator

DEFAULT_NEW_TOKENS = 128
ANSWER_TOKENS = 1024  # the limit of a chat's answer
_LONG = 140  # tokens
STDIN = "-"
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "sampling")
_SAME = ("schedule", "max_new_tokens", *SAMPLING_FLAGS, "seed", "num_return_sequences")
# Flag of `generate` -> option of the library; most have its name.
FLAGS = {
    **{"num_draft_tokens": "num_assistant_tokens", "num_draft_branches": "num_assistant_branches"},
    **{"sample": "do_sample", "stop": "stop_strings"},
    **{name: name for name in (*_SAME, "response_format", "guided_regex", "guided_choice")},
}
# Options that name a draft, so that they replace --draft.
DRAFT_OPTIONS = ("prompt_lookup_num_tokens", "assistant_early_exit")
CALL_ONLY = (*DRAFT_OPTIONS, "max_matching_ngram_size")
MODELS = ("target", "draft")
GENERATOR = (*LOADING, "prefix_cache", "memory")  # arguments of `from_pretrained`
DRAFT_FLAGS = {f"draft_{name}": name for name in ("dtype", "quantization", "gguf_file", "revision")}


@dataclass(frozen=True)
class CommandRequest:
    """The models to load, and the options of the call."""

    target: str
    draft: str | None
    options: dict[str, Any]
    loading: dict[str, Any]


def read_request(
    params: Mapping[str, Any],
    *,
    argument: str = "TARGET",
    new_tokens: int | None = DEFAULT_NEW_TOKENS,
    seed: int | None = None,
) -> CommandRequest:
    """The request of flags over the file of --config; raises OptionError for unknown options and contradictions.

    `params` may lack flags. `argument`: the command's word for its target. Where nothing sets them, `new_tokens` is the
    length limit, which None leaves to the model, and `seed` the seed of sampling, which None draws.
    """
    file = read_config_file(params.get("config"))
    target = params.get("target") or file.get("target")
    if not target:
        raise OptionError(f"no target was named: pass {argument}, or a --config file with a `target`")
    if params.get("json_") and params.get("show_draft"):
        raise OptionError("--show-draft colors text on the screen and --json prints none: leave one of them out")
    if params.get("show_draft") and not params.get("stream"):
        raise OptionError("--show-draft colors text as it is generated: leave out --no-stream")
    loading = read_loading(params, file)
    no_options = {*MODELS, *GENERATOR, "draft_options"}
    options = read_options(params, {n: v for n, v in file.items() if n not in no_options}, new_tokens, seed)
    if params.get("show_draft") and options.get("num_return_sequences", 1) > 1:
        raise OptionError("--show-draft shows one text: leave out --num-return-sequences")
    locate(target, "target", argument)  # first, as an error about a draft of the same name would mislead
    draft = choose_draft(params, file, target, options)
    if "draft_options" in loading and (draft is None or read_draft(draft).model is None):
        raise OptionError(f"options of loading a draft were given, and the draft {draft} is no model: leave them out")
    return CommandRequest(target, draft, options, loading)


def read_config_file(path: Path | None) -> dict[str, Any]:
    """The keys of a --config file; none without a file."""
    file = {} if path is None else read_yaml(path)
    for name in MODELS:
        if not isinstance(file.get(name, ""), str):
            raise OptionError.of(name, f"text in {path}", file[name])
    return file


def read_loading(params: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` from flags and file."""
    flags, draft = loading_flags(params), file.get("draft_options")
    if "max_memory" in flags:
        memory = [(text, *text.partition("=")) for text in flags["max_memory"]]
        if wrong := [text for text, *parts in memory if not all(parts)]:
            raise OptionError.of("--max-memory", "DEVICE=SIZE such as cpu=2GiB", wrong[0])
        flags["max_memory"] = {int(name) if name.isdecimal() else name: size for _, name, _, size in memory}
    loading = {name: value for name in GENERATOR if (value := flags.get(name, file.get(name))) is not None}
    how, _ = Loading.split(loading)
    how.of_draft(draft)  # raises for what is no mapping
    if draft := {**(draft or {}), **flags.get("draft_options", {})}:
        how.of_draft(draft)
        loading["draft_options"] = draft
    return loading


def passed(params: Mapping[str, Any], names: Iterable[str] = GENERATOR) -> dict[str, Any]:
    """The values of the flags in `names`, by default a generator's, that the user passed."""
    values = {name: params.get(name) for name in names}
    return {name: value for name, value in values.items() if value not in (None, [], ())}


def loading_flags(params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that flags set, with `draft_options`."""
    draft = {DRAFT_FLAGS[flag]: value for flag, value in passed(params, DRAFT_FLAGS).items()}
    return {**passed(params), **({"draft_options": draft} if draft else {})}


def refuse_idle(params: Mapping[str, Any], names: Iterable[str], why: str) -> None:
    """Raises OptionError where the user passed one of these flags, which have no effect: `why`."""
    if idle := [*passed(params, names)]:
        raise OptionError(f"{_flag(idle[0])} {why}")


def read_options(
    params: Mapping[str, Any], file: Mapping[str, Any], new_tokens: int | None, seed: int | None
) -> dict[str, Any]:
    """The options of the call from flags, --set and file, with a length limit, and a seed for sampling."""
    flags = {FLAGS[flag]: value for flag, value in passed(params, FLAGS).items()}
    if "response_format" in flags:
        flags["response_format"] = _response_format(flags["response_format"])
    is_greedy, drawing = params.get("sample") is False, [*passed(params, SAMPLING_FLAGS)]
    if drawing and is_greedy:
        raise OptionError(f"{_flag(drawing[0])} is for sampling and --greedy forbids it: leave one out")
    if drawing or is_greedy:
        flags["do_sample"] = not is_greedy
    options = _merged(file, {**flags, **read_assignments(params.get("set_") or [], flags)})
    if new_tokens is not None and "max_new_tokens" not in options and "max_length" not in options:
        options["max_new_tokens"] = new_tokens
    try:
        resolved = resolve({n: v for n, v in options.items() if n not in CALL_ONLY})
        if resolved.form is not None:
            resolved.form.check()
    except OptionError as error:  # in the flags' names
        text = str(error).replace("`do_sample=True`", "--sample")
        for flag, name in FLAGS.items():
            if name in flags:
                text = text.replace(f"`{name}`", _flag(flag))
        raise type(error)(text) from None
    if resolved.samples:
        options.setdefault("seed", secrets.randbits(32) if seed is None else seed)
    return options


def _response_format(text: str) -> dict[str, Any]:
    """The field in JSON or a file of it, either of which may be a schema alone, or the field for the word json."""
    if text == "json":
        return {"type": "json_object"}
    try:
        value = json.loads(text if text.lstrip().startswith("{") else read_text(text))
    except json.JSONDecodeError as error:
        expected = "json, a JSON schema or a file with one"
        raise OptionError.of("--response-format", expected, text, str(error)) from None
    if not isinstance(value, dict) or value.get("type") in ("text", "json_object", "json_schema"):
        return value  # the check of the option finds faults
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"


def _merged(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """`flags` over `file`: a flag also replaces its rivals in the file; null unsets."""
    rivals = [{"max_new_tokens", "max_length"}, {"schedule", "num_assistant_tokens_schedule"}, {*FORMS}]
    replaced = {name for group in rivals if group & flags.keys() for name in group}
    if flags.get("do_sample") is False:
        replaced |= {*DRAWING, "seed", "num_return_sequences"}
    merged = {**{n: v for n, v in file.items() if n not in replaced}, **flags}
    return {name: value for name, value in merged.items() if value is not None}


def read_assignments(settings: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The `KEY=VALUE` pairs of --set, with values in YAML; raises OptionError for an option that `flags` set, too."""
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise OptionError.of("--set", "KEY=VALUE", setting)
        try:
            options[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise OptionError.of("--set", "KEY=VALUE with a value in YAML", setting) from None
    if both := sorted(flags.keys() & options.keys()):
        raise OptionError(f"`{both[0]}` was set by its flag and by --set: pass one of them")
    return options


def choose_draft(
    params: Mapping[str, Any], file: Mapping[str, Any], target: str, options: Mapping[str, Any]
) -> str | None:
    """The spelling of the draft; None where one of `options` names it."""
    if names := [name for name in DRAFT_OPTIONS if name in options]:
        if params.get("draft") is not None:
            raise OptionError(f"`{names[0]}` names a draft, and so does --draft: pass one of them")
        return None
    default = target if target.startswith("zoo:") else AUTO
    flag: str | None = params.get("draft")
    draft: str = file.get("draft", default) if flag is None else flag
    read_draft(draft, "draft" if flag is None else "--draft")
    return draft


def of_one_answer(request: CommandRequest) -> CommandRequest:
    """The request with a draft that pays in one answer.

    Making the target's copy in 4 bits takes about as long as it saves in 140 tokens, whatever the size of the target.
    """
    if request.draft == AUTO and request.options.get("max_new_tokens", _LONG) < _LONG:
        return replace(request, draft=COPYING[0])
    return request


def load_with_spinner(request: CommandRequest, **more: Any) -> SpecGenerator:
    """The generator of a request, loaded under a spinner; `more` are further arguments of `from_pretrained`."""
    names = " and ".join(_models(request.target, request.draft))
    with loading(f"loading {names}", downloads=not are_here(request.target, request.draft)):
        from specdec.generator.generator import SpecGenerator

        return SpecGenerator.from_pretrained(request.target, request.draft, **{**request.loading, **more})


def are_here(target: str | None, draft: str | None) -> bool:
    """Whether neither model is downloaded: each is a path, a model of the package, or none."""
    return all(model.startswith("zoo:") or Path(model).exists() for model in _models(target, draft))


def _models(target: str | None, draft: str | None) -> list[str]:
    """The ids and paths of the models that are loaded."""
    models = (target, None if draft is None else read_draft(draft).model)
    return [*dict.fromkeys(model for model in models if model is not None)]


def read_prompt(prompt: str | None) -> str:
    """The prompt, or all of stdin for `-`."""
    if prompt is None:
        raise OptionError("no prompt was given: pass -p TEXT, or -p - to read stdin")
    if not prompt:  # as of "$(cat FILE)" without that file
        raise OptionError("the prompt is empty: pass -p TEXT, or -p - to read stdin")
    if prompt == "-":
        if not (text := read_text("-")):
            raise OptionError("standard input is empty: pipe a prompt into it, or pass -p TEXT")
        return text
    try:
        prompt.encode()  # bytes that the locale cannot decode arrive as surrogates
    except UnicodeError as error:
        raise not_utf8("the prompt", error) from None
    if os.path.isfile(prompt):
        remark(f'hint: the prompt is the name of a file; for the text in it, pass -p "$(cat {prompt})"')
    return prompt


def with_images(text: str, files: Sequence[str]) -> Any:
    """A message's content: the text, after the pictures in these files; raises OptionError for broken pictures."""
    if not files:
        return text
    from specdec.generator.inputs.pictures import open_picture

    return [*({"type": "image", "image": open_picture(Path(file))} for file in files), {"type": "text", "text": text}]


def read_prediction(file: str | None, request: CommandRequest) -> tuple[str | None, CommandRequest]:
    """The text of the file of --prediction, and a request whose draft model copies from it besides.

    Raises OptionError where the draft copies nothing.
    """
    if file is None:
        return None, request
    spelling = read_draft(request.draft or "none")
    if request.draft == AUTO:
        request = replace(request, draft=COPYING[0])
    elif spelling.model is not None and spelling.word is None:
        request = replace(request, draft=f"{COPYING[0]}+{request.draft}")
    elif not spelling.copies:
        raise OptionError(
            f"--prediction is for drafts that copy, and the draft is {request.draft}: pass --draft {COPYING[0]} or "
            f"{COPYING[0]}+MODEL"
        )
    text = read_text(file)
    if not text:
        raise OptionError(f"--prediction: {file} is empty: leave it out")
    return text, request


def files_among(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    """The files, and for each folder the files below it with one of the endings; OptionError if it has none."""
    files: list[str] = []
    for name in names:
        if name == STDIN or not Path(name).is_dir():
            files.append(name)
            continue
        inside = sorted(str(path) for path in Path(name).rglob("*") if path.suffix[1:].lower() in endings)
        if not inside:
            kinds = f"{', '.join(endings[:-1])} or {endings[-1]}"
            raise OptionError(f"the folder {name} has no {kinds} file (a model is named with --model)")
        files += inside
    return files


def read_text(file: str) -> str:
    """The text of a file, or of stdin (`-`); raises OptionError where it cannot be read or is not text in UTF-8."""
    source = "standard input" if file == "-" else file
    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8-sig")
    except UnicodeError as error:
        raise not_utf8(source, error) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{source} cannot be read ({reason}): check the name") from None
    if "\0" in text:
        raise OptionError(f"{source} contains zero bytes, so it is no text file: extract its text first")
    return text


def not_utf8(source: str, error: UnicodeError) -> OptionError:
    return OptionError(f"{source} is not text in UTF-8 ({error}): convert it first, for example with iconv")
