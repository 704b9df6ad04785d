"""What went wrong in other servers, one test each; the docstrings name the advisory or the issue."""

import asyncio
import hmac
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import WebSocketDenialResponse

from specdec.errors import OptionError
from specdec.options.resolve import read_yaml
from specdec.server import keys as keys_module
from specdec.server import read_settings
from specdec.server.app import ROUTERS
from specdec.server.guards import PublicRoute
from specdec.server.keys import Keys
from tests.server.process import KEY, OTHER_KEY
from tests.server.served import (
    Answered,
    app,
    asgi,
    asking,
    client,
    events,
    facts_of,
    idle,
    model_of,
    posted,
    settings,
    state_of,
    text_model,
    turns_of,
    until,
)

BODY = {"prompt": "abc", "max_tokens": 4}


async def test_every_route_is_closed(key_file: Path) -> None:
    """Keys were asked for by path, and a mounted prefix went round that (CVE-2026-48746, CVE-2026-48710).

    Here every route that does not say it is public answers 401, whatever path it is reached by.
    """
    application = app(api_key_file=key_file)
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    paths = {route.path for route in routes}
    assert {path_of_route for route in application.routes if (path_of_route := getattr(route, "path", None))} <= paths
    open_paths = {route.path for route in routes if isinstance(route, PublicRoute)}
    assert open_paths == {"/health", "/ready", "/", "/page/app.js", "/page/style.css"}
    async with client(application) as c:
        for method, route in ((method, one) for one in routes for method in getattr(one, "methods", ())):
            path = route.path.replace("{name:path}", "text")
            path_of_route = await c.request(method, path, json=BODY if method == "POST" else None)
            assert path_of_route.status_code == (200 if path in open_paths else 401), path
        ways = ("//v1/models", "/v1/models/", "/V1/models", "/v1/./models", "/health/../v1/models", "/v1%2fmodels")
        for path in ways:
            assert (await c.get(path)).status_code in (401, 404), path
        mounted = await asgi(application, "GET", "/v1/models", root_path="/v1/models")
        assert mounted.status in (401, 404)
    sockets = [route.path for route in routes if not hasattr(route, "methods")]
    assert sockets == ["/v1/realtime"]
    with asking(application) as http, pytest.raises(WebSocketDenialResponse) as refused:
        http.websocket_connect(f"ws://127.0.0.1:8000{sockets[0]}").__enter__()
    assert refused.value.status_code == 401


def test_keys(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any key of the file opens, nothing else does; what the file says counts at once.

    (A file that was deleted, emptied or broken left revoked keys valid, and no line in the log told of it.)
    """
    third = "a-third-key-that-is-new"

    with asking(app(api_key_file=key_file)) as c:

        def codes(*headers: str) -> list[int]:
            return [c.get("/v1/models", headers={"Authorization": one}).status_code for one in headers]

        old, other, new = (f"Bearer {key}" for key in (KEY, OTHER_KEY, third))
        assert codes(old, other) == [200, 200]
        wrong = ("", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"{old}x", old[:-1], "Bearer x y")
        assert {*codes(*wrong)} == {401}
        key_file.write_text(f"new: {third}\n")
        assert codes(old, new) == [401, 200]
        for broken, words in ((f"{KEY}\nshort", "line 2 has no key"), ("", "has no key"), (None, "cannot be read")):
            caplog.clear()
            key_file.unlink() if broken is None else key_file.write_text(broken)
            assert codes(new, new) == [401, 401]
            assert [words in line.message for line in caplog.records if line.levelname == "ERROR"] == [True]
            assert codes(old) == [200 if broken and KEY in broken else 401]
        key_file.write_text(third)
        assert codes(new) == [200]


@pytest.fixture
def keys_of(tmp_path: Path) -> Callable[[str], Keys]:
    """The keys of a file with this text."""

    def read(text: str) -> Keys:
        (tmp_path / "keys").write_text(text, encoding="utf-8")
        return Keys(tmp_path / "keys")

    return read


def test_lines_of_keys(keys_of: Callable[[str], Keys]) -> None:
    """Two keys of one name are both valid (the first was dropped), and a key keeps its colons (it lost its head).

    A byte order mark, which editors write, is no part of the first one.
    """
    old, new, colons = "the-old-key-of-alice", "the-new-key-of-alice", "ab:cdefghijklmnopqrstuvwx"
    keys = keys_of(f"\ufeffalice: {old}\nalice:  {new}\n{colons}\nbob: {colons}y\n")
    assert [keys.name(key) for key in (old, new, colons, f"{colons}y")] == ["alice", "alice", "key-3", "bob"]
    assert keys.name(colons.partition(":")[2]) is None


NO_KEY = "line 3 has no key of 16 or more ASCII characters, no space"
ALICE = "alice: a-good-key-of-letters\n" * 2
WRONG_KEYS = {
    f"{ALICE}short": NO_KEY,
    f"{ALICE}a-key-of-letters-with-é": NO_KEY,
    f"{ALICE}a-key-of\x00enough-letters": NO_KEY,
    f"{ALICE}a-key-of\tenough-letters": NO_KEY,
    f"{ALICE}bob a-key-of-enough-letters": NO_KEY,  # it was one key, without its colon
    f"{ALICE}bob: a key of enough letters": NO_KEY,
    f"{ALICE}bob: a-good-key-of-letters": "line 3 is a key of 'alice', too",
    f"{ALICE}a-good-key-of-letters": "line 3 is a key of 'alice', too",
    f"{ALICE}key-1: another-key-of-letters": "line 3 .*choose another",
    "": "has no key in it",
    "# nothing\n": "has no key in it",
}


@pytest.mark.parametrize("text", WRONG_KEYS)
def test_wrong_files_of_keys(text: str, keys_of: Callable[[str], Keys]) -> None:
    """A key that was never valid, one with two names, two clients that were one: each is said, and none is served."""
    with pytest.raises(OptionError, match=f"`api_key_file`.*{WRONG_KEYS[text]}"):
        keys_of(text)
    with pytest.raises(OptionError, match="`api_key_file`"):
        Keys(Path("/no/such/file"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_key_file(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reading it stopped the event loop for good."""
    keys = Keys(key_file)
    key_file.unlink()
    os.mkfifo(key_file)
    assert keys.name(KEY) is None
    assert [one.levelname for one in caplog.records if "no regular file" in one.getMessage()] == ["ERROR"]
    with pytest.raises(OptionError, match="no regular file"):
        Keys(key_file)


def test_keys_are_compared_in_constant_time(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were compared with == (CVE-2025-59425): every key is compared whole, also after the one that fits."""
    lengths: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: lengths.append(len(b)) or compare(a, b))
    keys = Keys(key_file)
    assert [keys.name(key) for key in (KEY, OTHER_KEY, "x")] == ["key-2", "bob", None]
    assert lengths == [32] * 6


def test_other_machines_need_keys(key_file: Path) -> None:
    """A server that others reach does not start without keys, unless somebody says so."""
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(OptionError, match="api-key-file"):
            settings(host=host)
        assert settings(host=host, api_key_file=key_file).host == host
        assert settings(host=host, insecure=True).insecure
    for host in ("127.0.0.1", "localhost", "::1"):
        assert settings(host=host).is_local


async def test_nothing_is_read_without_a_key(key_file: Path) -> None:
    """A stranger's body is not even received."""
    answer = await posted(app(api_key_file=key_file), None, chunks=[b"{"] * 50)
    assert (answer.status, answer.received) == (401, 0)


def test_large_headers() -> None:
    """Unbounded headers filled the memory (CVE-2025-48956)."""
    with asking(app()) as c:
        assert c.get("/health", headers={"x-large": "a" * 20_000}).status_code == 431


async def test_large_bodies() -> None:
    """By what the header says, and by what comes where it lies or says nothing."""
    application = app(limits={"body_bytes": 1000})
    async with client(application) as c:
        declared = await c.post("/v1/completions", json={"prompt": "a" * 2000})
    chunks = [b'{"prompt": "', *[b"a" * 100] * 50]
    unsaid, lying = [await posted(application, None, chunks=chunks, length=length) for length in (None, "5")]
    senseless = [await posted(application, {}, length=length) for length in ("-5", "9" * 5000)]
    assert unsaid.received <= 12
    assert [declared.status_code, *(one.status for one in (unsaid, lying, *senseless))] == [413] * 5


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/x", "multipart/form-data; boundary=x"])
async def test_bodies_of_another_kind(kind: str) -> None:
    """A 415 names the header, and nothing is read. (Of a form as much was read as a recording may have, 25 MiB.)"""
    answer = await posted(app(), None, chunks=[b"{"] * 9, content_type=kind)
    assert (answer.status, answer.received) == (415, 0)
    error = json.loads(answer.body)["error"]
    assert error["param"] == "Content-Type"
    assert "`Content-Type: application/json`" in error["message"]


def test_other_sites_are_kept_out() -> None:
    """A page elsewhere may not use a server on this machine, by its own name or by a form; ours may.

    (An `Origin` that is no URL was a 500, names with capitals that were allowed were not, and any page of this machine
    passed, whatever its port.)
    """
    with asking(app(hosts=["Models.Example.org:443", "b.example.org", "c.example.org:8443"])) as c:
        strangers = ["https://evil.example", "null", "", "http://[", "http://[::1", "//", "http://127.0.0.1:3000"]
        strangers += ["http://127.0.0.1", "ftp://127.0.0.1:8000", "https://b.example.org:8443", "https://c.example.org"]
        heads = [
            {"Host": "evil.example"}, *({"Origin": origin} for origin in strangers),
            {"Host": "localhost", "Origin": "http://localhost:443"},
            {"Host": "localhost", "Origin": "http://localhost:80"},
            {"Host": "localhost:443", "Origin": "https://localhost"}, {"Origin": "https://b.example.org"},
            {"Origin": "https://C.example.org:8443"},
            {"Host": "models.EXAMPLE.org", "Origin": "https://models.example.org"}, {"Origin": "http://127.0.0.1:8000"},
            {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        ]  # fmt: skip
        codes = [c.post("/v1/completions", json=BODY, headers=head).status_code for head in heads]
        plain = c.post("/v1/completions", content=json.dumps(BODY), headers={"Content-Type": "text/plain"})
        preflight = c.request("OPTIONS", "/v1/completions", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in preflight.headers
    assert [*codes, plain.status_code] == [421, *[403] * 12, *[200] * 7, 415]


def test_origins_that_are_let_in() -> None:
    """Panels of editors by a pattern, with the headers that browsers ask for. (None could use the server.)"""
    named = ["vscode-webview://*", "http://localhost:3000", "http://[::1]:3000", "app://Ab", "https://a.example:443"]
    with asking(app(origins=named)) as c:
        for origin in ("vscode-webview://1Ab2", *named[1:-1], "https://a.example"):
            asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asks["Access-Control-Request-Headers"] = "authorization,content-type"
            preflight = c.request("OPTIONS", "/v1/completions", headers=asks)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            answer = c.post("/v1/completions", json=BODY, headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        for origin in (
            "vscode-webview:",
            "http://1:3000",
            "https://evil.example",
            "http://localhost:3000.evil.example",
        ):
            answer = c.post("/v1/completions", json=BODY, headers={"Origin": origin})
            assert answer.status_code == 403
            assert "--allow-origin" in answer.json()["error"]["message"]
            assert "access-control-allow-origin" not in answer.headers
    with pytest.raises(OptionError, match=r"`origins.0`: must be an origin without path"):
        app(origins=["vscode-webview"])


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave(stream: bool) -> None:
    """Their requests went on for ever (llama.cpp #24496), or nothing did (#27604): all is freed within two rounds.

    (They were counted once for each prompt.)
    """
    model = model_of("suffix")
    long = {"prompt": ["abc", "ab"], "max_tokens": 450, "ignore_eos": True, "stream": stream}
    application = app(model)
    state = application.state.server
    engine = model.generator.engine
    for _ in range(3):
        leave = asyncio.Event()
        task = posted(application, long, leave=leave)
        await until(lambda: engine.running)
        reached = max(len(row.tokens) for row in list(engine.running) or [engine])  # type: ignore[arg-type]
        leave.set()
        await task
        await idle(model)
        assert state.hosts["text"].load["running"] == 0
        assert reached < 450
    async with client(application) as c:
        assert (await c.post("/v1/completions", json=BODY)).status_code == 200
        text = (await c.get("/metrics")).text
    assert 'specdec_requests_aborted_total{endpoint="/v1/completions"} 3.0' in text


async def test_leaving_while_waiting() -> None:
    """A client that gives up in the queue leaves no trace, and those behind it move up."""
    application, leave = app(limits={"running": 1, "waiting": 2}), asyncio.Event()
    first, turns = posted(application, {**BODY, "max_tokens": 300, "ignore_eos": True}), turns_of(application)
    await until(lambda: turns.running)
    second, third = posted(application, BODY, leave=leave), posted(application, BODY)
    await until(lambda: turns.waiting >= 2)
    refused = await posted(application, BODY)
    assert refused.headers["retry-after"]
    leave.set()
    await second
    assert turns.waiting <= 1
    codes = [(await task).status for task in (first, third)]
    assert [*codes, refused.status, turns.running, turns.waiting] == [200, 200, 429, 0, 0]


async def test_stuck_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server said 200 while nothing moved (tabbyAPI #428): `/ready` decodes, and tells when that does not work."""
    model, wait = text_model(draft="none"), threading.Event()
    model.generator.target.model.register_forward_pre_hook(lambda *_: wait.wait(20) and None)
    monkeypatch.setattr("specdec.server.models._PROBE_SECONDS", 0.3)
    application = app(model)
    async with client(application) as c:
        codes = [(await c.get(path)).status_code for path in ("/health", "/ready")]
        wait.set()
        codes.append((await c.get("/ready")).status_code)
        state_of(application).draining = True
        codes.append((await c.get("/ready")).status_code)
        refused = await c.post("/v1/completions", json=BODY)
    assert [*codes, refused.status_code] == [200, 503, 200, 503, 503]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(torch.OutOfMemoryError("no"), 503), (MemoryError(), 503), (RuntimeError("a defect, with a secret"), 500)],
)
def test_a_pass_that_fails(error: Exception, expected: int, stream: bool) -> None:
    """Out of memory ends that request with a 503, a defect with a 500 that tells nothing; the next one works."""
    model = text_model(draft="none")

    def fail(*_: Any) -> None:
        raise error

    with asking(app(model)) as c:
        hook = model.generator.target.model.register_forward_pre_hook(fail)
        broken = c.post("/v1/completions", json={**BODY, "stream": stream})
        hook.remove()
        assert c.post("/v1/completions", json={**BODY, "stream": stream}).status_code == 200
    assert "secret" not in broken.text
    if stream:
        assert events(broken.text)[-1]["error"]["type"] == "server_error"
    else:
        assert broken.status_code == expected


async def test_requests_that_take_too_long() -> None:
    """They end with a 504, or an event that says so, and free what they held. (They were counted as left.)"""
    application = app(limits={"request_seconds": 0.15})
    long = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
    async with client(application) as c:
        whole, stream = [await c.post("/v1/completions", json={**long, "stream": on}) for on in (False, True)]
        await idle(model_of("suffix"))
        assert "requests_aborted_total{" not in (await c.get("/metrics")).text
    assert (whole.status_code, events(stream.text)[-1]["error"]["code"]) == (504, "timeout")


async def test_a_closed_model_tells_its_clients() -> None:
    """A stream that it cut ends with an error. (It just ended, as if its client had left.)"""
    model, answer = text_model(draft="none"), Answered()
    long = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True}
    task = posted(app(model), long, answer=answer)
    await until(lambda: b"data" in answer.body)
    await asyncio.to_thread(model.generator.close)
    assert events((await task).body.decode())[-1]["error"]["code"] == "unavailable"


def test_prompts_are_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nor are answers, unknown paths or queries; the id of the request and the size of its answer are."""
    with caplog.at_level(logging.INFO, "specdec.server"), asking(app(), **{"x-request-id": "id-1"}) as c:
        answer = c.post("/v1/completions?secret=1", json={**BODY, "prompt": "a secret prompt"})
        assert answer.headers["x-request-id"] == "id-1"
        c.get("/a-secret-path")
        odd = c.get("/health", headers={"x-request-id": "a b\tc"})
        assert odd.headers["x-request-id"] != "a b\tc"
    assert [facts_of(caplog)[0][name] for name in ("request_id", "bytes")] == ["id-1", len(answer.content)]
    assert "secret" not in caplog.text


def test_the_example_is_understood() -> None:
    """`configs/serve.yaml` holds no key that nobody reads."""
    settings_of_file = read_settings(read_yaml(Path(__file__).parents[2] / "configs" / "serve.yaml"))
    assert [model.name for model in settings_of_file.models] == ["python-code", "python-summary", "speech"]


MODEL = {"name": "a", "target": "x"}


@pytest.mark.parametrize(
    "wrong",
    [{"models": []}, {"models": [MODEL] * 2}, {"models": [{**MODEL, "name": "a b"}]}, {"limits": {"running": 0}}],
    ids=str,
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """No models, doubled and wrong names, and numbers out of bounds are told before a model is loaded."""
    with pytest.raises(OptionError):
        read_settings({"models": [MODEL], **wrong})
