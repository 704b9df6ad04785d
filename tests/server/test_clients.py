"""Who asks, and how much a client may have: requests under way, new tokens, users behind a proxy."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import HTTPConnection

from specdec.server.state import sender_of
from tests.server.process import KEY, OTHER_KEY
from tests.server.served import app, asking, facts_of, posted, text_model, turns_of, until

PATH = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
SHORT = {"prompt": "abc", "max_tokens": 4}
KEY_HEADS = [("authorization", f"Bearer {key}") for key in (KEY, OTHER_KEY)]
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}


async def beside(application: FastAPI, *requests: tuple[dict[str, Any], dict[str, str]]) -> list[int]:
    """How requests with these bodies and headers are answered while a long one with the first headers runs."""
    leave = asyncio.Event()
    work = posted(application, {**LONG, "stream": True}, leave=leave, **requests[0][1])
    await until(lambda: turns_of(application).running)
    codes = [(await posted(application, body, **headers)).status for body, headers in requests]
    leave.set()
    await work
    return codes


async def test_a_client_has_so_many_requests() -> None:
    """Prompts of one request are one request. (They were counted one by one: nine where eight may be were a 429.)"""
    application = app(limits={"per_key": 1})
    many = {**SHORT, "prompt": ["ab"] * 9}
    alone = [(await posted(application, body)).status for body in (many, many, {"n": 0}, many)]
    assert [*alone, *await beside(application, (SHORT, {}))] == [200, 200, 400, 200, 429]
    assert (await posted(application, many)).status == 200


async def test_uploads_are_requests_under_way() -> None:
    """Also while their body is on its way, and until it has been given up."""
    application = app(limits={"per_key": 1, "upload_seconds": 0.2})
    slow = posted(application, None, chunks=[b"{", None])
    await asyncio.sleep(0.01)
    codes = [(await task).status for task in (posted(application, SHORT), slow)]
    assert [*codes, (await posted(application, SHORT)).status] == [429, 408, 200]
    assert json.loads((await slow).body)["error"]["code"] == "slow_upload"


def test_new_tokens_are_bounded() -> None:
    """The limit was read by nobody: who asks for more is told in their own word, who says nothing gets so many."""
    with asking(app(limits={"new_tokens": 5})) as c:
        chat = "/v1/chat/completions"
        answers: list[Any] = [
            c.complete(**{**LONG, "max_tokens": 6}),
            c.post(chat, json={**MESSAGES, "max_completion_tokens": 6}).json(),
            c.complete(prompt="abc", min_tokens=6),
            *(c.complete(prompt=prompt, ignore_eos=True) for prompt in ("abc", "a" * 500)),
            c.complete(**{**LONG, "max_tokens": 3}),
            c.post(chat, json=MESSAGES).json(),
        ]
    errors = [answer["error"] for answer in answers[:3]]
    assert [error["param"] for error in errors] == ["max_tokens", "max_completion_tokens", "min_tokens"]
    assert all(f"`{error['param']}`" in error["message"] and "5" in error["message"] for error in errors)
    assert [answer["usage"]["completion_tokens"] for answer in answers[3:]] == [5, 5, 3, 5]


PROXIES = ["127.0.0.1", "10.0.0.0/8", "2001:db8::/32"]
ALICE = [
    "1.2.3.4", "1.2.3.4:5678", "::ffff:1.2.3.4", "9.9.9.9, 1.2.3.4", "unknown, 1.2.3.4, 10.0.0.7, [2001:db8::1]:80",
]  # fmt: skip
OTHERS = ["9.9.9.9", "1.2.3.4, 9.9.9.9", "1.2.3.4, unknown", "", "10.0.0.7"]


@pytest.mark.parametrize(("proxies", "others"), [(PROXIES, 200), (["10.0.0.0/8"], 429)])
async def test_users_behind_a_proxy_are_clients(proxies: list[str], others: int) -> None:
    """They were one. What stands before the last address that is no proxy's may be invented, and counts for nothing.

    Of a proxy that is not trusted nothing counts.
    """
    application = app(trusted_proxies=proxies, limits={"per_key": 1})
    codes = await beside(application, *((SHORT, {"x-forwarded-for": user}) for user in (*ALICE, *OTHERS)))
    assert codes == [*[429] * len(ALICE), *[others] * len(OTHERS)]


def test_the_log_has_addresses(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refused key could not be traced to anybody."""
    with caplog.at_level("INFO", "specdec.server"):
        for proxies in (PROXIES, []):
            with asking(app(api_key_file=key_file, trusted_proxies=proxies)) as c:
                c.get("/v1/models", headers={"x-forwarded-for": "9.9.9.9, 1.2.3.4", "authorization": "Bearer revoked"})
    lines = facts_of(caplog)
    assert [(line["status"], line["client"]) for line in lines] == [(401, "1.2.3.4"), (401, "127.0.0.1")]


async def test_a_network_of_one_host_is_one_client() -> None:
    """Whoever has a /64 of IPv6 was as many clients as that has addresses."""
    users = ["2001:db9::1", "2001:db9::2", "[2001:db9:0:0:ffff::1]:80", "2001:db9:0:1::1", "1.2.3.4"]
    application = app(trusted_proxies=PROXIES, limits={"per_key": 1})
    codes = await beside(application, *((SHORT, {"x-forwarded-for": user}) for user in users))
    assert codes == [429, 429, 429, 200, 200]
    connection = HTTPConnection({"type": "http", "client": ("::ffff:1.2.3.4", 5000)})
    assert sender_of(connection) == "1.2.3.4"


@pytest.mark.parametrize("heads", [[("x-forwarded-for", user) for user in ("1.2.3.4", "5.6.7.8")], KEY_HEADS])
def test_clients_read_and_remember_for_themselves(heads: list[tuple[str, str]], key_file: Path) -> None:
    """Whether a prompt was read before, and what was answered, tells nobody about another's; the same client's request
    is continued and guessed (arXiv 2411.01076 tells what timing gives away).
    """
    prompt = "a long prompt that two users have in common by chance " * 2
    body = {**SHORT, "prompt": prompt, "temperature": 0, "max_tokens": 32, "ignore_eos": True, "return_metrics": True}
    how: dict[str, Any] = {"api_key_file": key_file} if heads == KEY_HEADS else {"trusted_proxies": PROXIES}
    with asking(app(text_model(memory=True), **how)) as c:  # that has read nothing
        answers = [c.post(PATH, json=body, headers=dict([head])).json() for head in (*heads, heads[0])]
    counts = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert counts[:2] == [0, 0]
    assert counts[2] > 50
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
    accepted = [answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in answers]
    assert accepted[0] == accepted[1] < accepted[2]
