"""`specdec serve`: flags over a file, and what does not go together."""

import json
import logging
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from psutil import virtual_memory

from specdec import LoadError, OptionError, SpecdecError
from specdec.cli import serve as command
from specdec.cli.serve import plain_name, settings_keys
from specdec.cli.terminal import notes
from specdec.pipelines.speech import audio
from specdec.server import load_served, read_settings, start_log
from specdec.server.settings import Limits, ModelSettings
from specdec.server.text import TextModel
from tests.folders import saved_model
from tests.server.served import app, asking


def keys(**flags: Any) -> dict[str, Any]:
    """The settings of these flags."""
    names = (*command.SERVER, *command.LIMITS, *command.LOADING, "target", "draft", "demo", "config")
    names += ("name", "context", "kv_budget", "prefix_cache", "num_draft_tokens", "schedule")
    return settings_keys({**dict.fromkeys(names), **flags})


def test_flags_of_one_model() -> None:
    """They become the settings of that model, of the server and of its limits."""
    settings = read_settings(
        keys(
            target="org/Model-7B", draft="org/draft", schedule="cost", dtype="bfloat16", port=9000,
            kv_budget=0.25, running=4, drain_seconds=5.0, hosts=["Models.example.org"], stream_chunk=8, context=512,
            trusted_proxies=["10.0.0.0/8"],
        )
    )  # fmt: skip
    model = settings.models[0]
    assert (model.name, model.target, model.draft) == ("Model-7B", "org/Model-7B", "org/draft")
    assert (model.loading, model.options) == ({"dtype": "bfloat16"}, {"schedule": "cost"})
    assert (model.kv_budget, model.context, model.prefix_cache) == (0.25, 512, None)
    for keeps in (True, False):
        assert keys(target="m", prefix_cache=keeps)["models"][0]["prefix_cache"] is keeps
    assert (settings.port, settings.hosts, settings.stream_chunk) == (9000, ("models.example.org",), 8)
    assert [str(proxy) for proxy in settings.trusted_proxies] == ["10.0.0.0/8"]
    assert (settings.limits.running, settings.limits.drain_seconds, settings.limits.waiting) == (4, 5.0, 128)


def test_drafts_are_chosen_as_elsewhere() -> None:
    """A pair of the package is its own draft, anything else has the best one unless told otherwise."""
    flag_sets: list[dict[str, Any]] = [{"target": "zoo:python-code"}, {"target": "org/m"}]
    flag_sets += [{"target": "m", "draft": "none"}, {"target": "m", "draft": "suffix+d"}]
    drafts = [read_settings(keys(**flags)).models[0].draft for flags in flag_sets]
    assert drafts == ["zoo:python-code", "auto", "none", "suffix+d"]


def test_a_file_under_flags(tmp_path: Path) -> None:
    """Flags win, limits are merged, and models come from one place."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "models: [{name: a, target: b}, {name: c, target: d, draft: none}]\nport: 1\nlimits: {running: 2, waiting: 3}\n"
    )
    settings = read_settings(keys(config=file, port=2, running=5))
    assert (settings.port, settings.limits.running, settings.limits.waiting) == (2, 5, 3)
    assert [model.draft for model in settings.models] == ["auto", "none"]
    assert read_settings(keys(config=file, port=0)).port == 0  # a free one


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pass a TARGET"),
        (["x", "--demo"], "only one of them"),
        (["--demo", "--draft", "x"], "--draft configures TARGET"),
        (["--demo", "--dtype", "float32"], "--dtype configures TARGET"),
        (["--demo", "--no-prefix-cache"], "--prefix-cache configures TARGET"),
        (["--demo", "--host", "0.0.0.0"], "--api-key-file"),
        (["--demo", "--host", "0.0.0.0"], "--trusted-proxy ADDRESS"),
        (["--demo", "--allow-host", "https://models.example.org"], "without scheme"),
        (["--demo", "--trusted-proxy", "nginx"], "trusted_proxies"),
        (["--demo", "--api-key-file", "/no/such/file"], "api_key_file"),
        (["--demo", "--port", "70000"], "port"),
        (["--demo", "--log", "loud"], "log"),
        (["x", "--draft", "sufix"], "`--draft` must be"),
    ],
)
def test_flags_that_do_not_go(arguments: list[str], words: str, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.server.load_served", lambda *_: pytest.fail("a model was loaded"))
    assert words in called("serve", *arguments, "--quiet", code=2).err


def test_every_wrong_key_is_named() -> None:
    """The first of them was, in pydantic's words."""
    models = [{"name": "m", "target": "t", "drafft": "suffix"}, {"target": "t"}]
    with pytest.raises(OptionError) as error:
        read_settings({"models": models, "prt": 1, "color": "red", "limits": {"runing": 3, "waiting": "x"}})
    assert str(error.value).split("; ") == [
        "`models.0.drafft`: unknown key (did you mean `draft`?)", "`models.1.name` is needed: pass it",
        '`limits.waiting` must be a whole number, got "x"', "`limits.runing`: unknown key (did you mean `running`?)",
        "`prt`: unknown key (did you mean `port`?)", "`color`: unknown key",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["json", "text", "none"])
def test_all_lines_of_a_log_have_its_format(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Text had JSON in it, and the library's notes were lines without JSON."""
    facts = {"path": "/v1/models", "status": 200, "key": "two words", "error": None}
    with notes():
        start_log(kind)
        logging.getLogger("specdec.models").info("compiling a model")
        logging.getLogger("specdec.server").info("{}", extra={"facts": facts})
        logging.getLogger("specdec.server").warning("take care")
    lines = capsys.readouterr().err.splitlines()
    if kind == "json":
        records = [{**json.loads(line), "time": 0} for line in lines]
        levels = [{"time": 0, "level": level} for level in ("info", "info", "warning")]
        messages = [{"message": "compiling a model"}, facts, {"message": "take care"}]
        assert records == [level | message for level, message in zip(levels, messages, strict=True)]
    else:
        messages = ["INFO compiling a model", 'INFO path=/v1/models status=200 key="two words"', "WARNING take care"]
        assert [line.split(" ", 2)[2] for line in lines] == (messages if kind == "text" else messages[2:])


def test_a_missing_package(called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NEEDS", ("no_such_package",))
    assert "-e '.[serve]'" in called("serve", "--demo", code=1).err


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_model_that_could_not_hear(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not loaded. (The server started, said it was ready, and failed at every recording.)"""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("specdec.server.models.Transcriber", None)
    with pytest.raises(SpecdecError, match=rf"needs {package}: pip install"):
        load_served(ModelSettings(name="m", target="zoo:speech"), Limits())


def test_the_extra_is_enough() -> None:
    """`serve` brings what the server checks for and what reads recordings. (The latter was in another extra.)"""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extra = re.search(r"^serve = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert extra
    brought = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', extra[1])}
    assert brought >= {*command.NEEDS, *audio.READERS}


def test_a_port_of_somebody_else(called: Any) -> None:
    """One line that names it, before any model is loaded. (It came from the socket, after minutes of loading.)"""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        err = called("serve", "/nonexistent/model", "--port", port, "-q", code=1).err
    assert re.search(rf"^error: port {port} of 127.0.0.1 cannot be had \(.*--port", err)
    err = called("serve", "/nonexistent/model", "--host", "192.0.2.1", "--insecure", "-q", code=1).err  # of a document
    assert "of 192.0.2.1 cannot be had" in err


def test_a_hub_out_of_reach_is_asked_once(asked: list[str]) -> None:
    """It was asked for the kind of a model, and then, with all retries again, for the model."""
    with pytest.raises(LoadError, match=r"`target` 'some/target' .*hub cannot be reached"):
        load_served(ModelSettings(name="m", target="some/target", draft="some/draft"), Limits())
    assert asked == ["some/target"]


def test_names() -> None:
    names = [plain_name(name) for name in ("org/Qwen3-0.6B", "/models/x y/", "zoo:python-code", "/")]
    assert names == ["Qwen3-0.6B", "x-y", "python-code", "model"]


@pytest.mark.parametrize("name", ["do_sample", "max_new_tokens", "num_return_sequences", "penalty_alpha"])
def test_options_that_requests_set_are_none_of_a_model(tmp_path: Path, name: str) -> None:
    """They were ignored; two sequences failed every request that named no number."""
    settings = ModelSettings(name="m", target=saved_model(tmp_path / "model"), options={name: 2})
    with pytest.raises(OptionError, match=f"`options` of a model may not name `{name}`"):
        load_served(settings, Limits())


def test_a_model_may_search_by_default(tmp_path: Path) -> None:
    """Its requests without a temperature do not draw then. (They sampled beams.)"""
    model = load_served(
        ModelSettings(name="m", target=saved_model(tmp_path / "model"), options={"num_beams": 2}), Limits()
    )
    with asking(app(model)) as c:
        texts = [c.complete(prompt="ab", max_tokens=9, seed=n)["choices"][0]["text"] for n in range(3)]
    alone = model.generator.generate("ab", max_new_tokens=9, do_sample=False, num_beams=2).texts[0]
    assert texts == [alone] * 3


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    """With what lies beside it, and the options that are its own."""
    folder = saved_model(tmp_path / "model")
    options = {"schedule": "constant", "temperature": 0.0}
    settings = ModelSettings(name="m", target=folder, draft="suffix", options=options, context=99)
    model = load_served(settings, Limits(), 0.25)
    assert isinstance(model, TextModel)
    assert 0 < model.generator.engine.memory.limit <= virtual_memory().total / 4
    assert model.generator.options(max_new_tokens=1).schedule == "constant"
    assert model.context == 99
    with asking(app(model)) as c:
        texts = {c.complete(prompt="ab", max_tokens=9)["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1  # the settings say how a request without a temperature samples
