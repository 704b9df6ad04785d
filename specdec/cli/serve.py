"""`specdec serve`: models behind an HTTP server with OpenAI's interface."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer import Option

from specdec.cli import flags
from specdec.cli.request import DRAFT_FLAGS, FLAGS, choose_draft, loading_flags, passed, refuse_idle
from specdec.cli.terminal import OK, is_quiet, loading
from specdec.errors import OptionError, SpecdecError
from specdec.options.load import NAMES as LOADING
from specdec.options.resolve import read_yaml

NEEDS = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "llguidance")
PAIRS = ("python-code", "python-summary", "speech")  # --demo serves these
# Parameters that are keys of the settings, and of their limits.
SERVER = ("host", "port", "api_key_file", "insecure", "hosts", "origins", "trusted_proxies", "stream_chunk", "log")
LIMITS = ("running", "waiting", "per_key", "request_seconds", "drain_seconds")


@flags.takes(
    "draft num_draft_tokens schedule",
    "dtype quantization gguf_file activations backend device_map offload offload_folder trust_remote_code",
    "prefix_cache memory quiet",
)
def serve(
    ctx: typer.Context,
    target: str | None = flags.target("Hub id, folder, GGUF file, or zoo:NAME; without it, pass --config."),
    demo: bool = Option(False, "--demo", help="Serve the bundled pairs."),
    config: Path | None = flags.flag("YAML file such as configs/serve.yaml; flags win."),
    name: str | None = flags.flag("The model's name for clients; by default the end of its id."),
    host: str | None = flags.flag("Address to listen on (127.0.0.1)."),
    port: int | None = flags.flag("Port to listen on (8000); 0 chooses a free one."),
    api_key_file: Path | None = flags.flag("File of API keys, KEY or NAME: KEY on each line; reread when it changes."),
    insecure: bool | None = flags.flag("Allow a public address without API keys.", "--insecure"),
    hosts: list[str] | None = flags.flag(
        "Another host name that browsers may use; repeatable.", "--allow-host", metavar="HOST"
    ),
    origins: list[str] | None = flags.flag(
        "Origin of pages that may use the server, as in vscode-webview://*; repeatable.",
        "--allow-origin",
        metavar="ORIGIN",
    ),
    trusted_proxies: list[str] | None = flags.flag(
        "Proxy or network whose X-Forwarded-For header is trusted; repeatable.", "--trusted-proxy", metavar="ADDRESS"
    ),
    context: int | None = flags.flag("Limit on the tokens of prompt and answer."),
    kv_budget: float | None = flags.flag("Memory for keys and values: a share of free memory up to 1, or bytes (0.5)."),
    running: int | None = flags.flag("Limit on running requests (32).", "--max-running"),
    waiting: int | None = flags.flag("Limit on waiting requests (128).", "--max-waiting"),
    per_key: int | None = flags.flag("Limit on one client's requests in progress."),
    request_seconds: float | None = flags.flag(
        "Abort a request after this many seconds (600).", "--request-timeout", metavar="SECONDS"
    ),
    drain_seconds: float | None = flags.flag(
        "Time for running requests to finish after SIGTERM (30).", "--drain", metavar="SECONDS"
    ),
    stream_chunk: int | None = flags.flag("Send events of N tokens each, which hide accepted drafts.", metavar="N"),
    log: str | None = flags.flag("Format of the request log: text, json or none (text)."),
) -> int:
    """Serve models over an OpenAI-compatible HTTP API. Completions, chats, transcriptions, and a playground at /."""
    if modules := [module for module in NEEDS if find_spec(module) is None]:
        raise SpecdecError(f"a server needs {', '.join(modules)}: pip install -c constraints.txt -e '.[serve]'")
    keys = settings_keys(ctx.params)
    silent = keys.get("log") == "json"  # all lines are JSON then
    with loading("reading the settings", quiet=silent):
        from specdec.server import check_address, create_app, load_served, read_settings, start_log
        from specdec.server import serve as run
        from specdec.server.keys import Keys

        settings = read_settings(keys)
        if settings.api_key_file is not None:
            Keys(settings.api_key_file)
        check_address(settings)  # before anything is loaded
    start_log(settings.log)
    if not is_quiet():  # Python's warnings become lines of the log
        warnings.showwarning = lambda message, *_, **__: logging.getLogger("specdec.server").warning("%s", message)
    with loading(f"loading {', '.join(model.name for model in settings.models)}", quiet=silent):
        share = 0.5 / len(settings.models)  # of the free memory
        models = [load_served(model, settings.limits, share) for model in settings.models]
        app = create_app(settings, models)
    run(app, settings)
    return OK


def settings_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the settings: the flags', over the keys of the file of --config."""
    keys = read_yaml(params["config"]) if params["config"] is not None else {}
    if bool(params["target"]) + bool(params["demo"]) + bool(keys.get("models")) != 1:
        raise OptionError("pass a TARGET, --demo, or a --config file with `models`, and only one of them")
    keys |= passed(params, SERVER)
    if limits := passed(params, LIMITS):
        keys["limits"] = {**(keys.get("limits") or {}), **limits}
    if params["demo"]:
        keys["models"] = [{"name": name, "target": f"zoo:{name}", "draft": f"zoo:{name}"} for name in PAIRS]
    elif params["target"]:
        keys["models"] = [model_keys(params)]
    models = keys.get("models")
    for model in models if isinstance(models, list) else ():  # a file's; others have a draft
        if isinstance(model, dict) and isinstance(target := model.get("target"), str):
            model.setdefault("draft", choose_draft({}, {}, target, {}))
    if not params["target"]:
        names = ("name", "draft", "num_draft_tokens", "schedule", "context", "kv_budget", "prefix_cache", "memory")
        refuse_idle(
            params, (*names, *LOADING, *DRAFT_FLAGS), "configures TARGET: pass TARGET, or write it into the file"
        )
    return keys


def model_keys(params: Mapping[str, Any]) -> dict[str, Any]:
    target = params["target"]
    options = {FLAGS[name]: value for name, value in passed(params, ("num_draft_tokens", "schedule")).items()}
    kv_budget = params["kv_budget"]
    keys: dict[str, Any] = {
        "name": params["name"] or plain_name(target),
        "target": target,
        "draft": choose_draft(params, {}, target, {}),
        "loading": {n: v for n, v in loading_flags(params).items() if n not in ("prefix_cache", "memory")},
        "options": options,
        **passed(params, ("context", "prefix_cache", "memory")),
    }
    return keys if kv_budget is None else {**keys, "kv_budget": kv_budget if kv_budget <= 1 else int(kv_budget)}


def plain_name(target: str) -> str:
    """A model's default name for clients: the end of its id or path, without the ending of a GGUF file."""
    end = target.removeprefix("zoo:").removesuffix(".gguf").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.:@-]", "-", end)[:128] or "model"
