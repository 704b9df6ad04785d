"""Pictures of clients: data URLs within limits, answered as the library answers; nothing else is opened or fetched."""

from functools import cache
from typing import Any

import pytest
from PIL import Image

from specdec import SpecGenerator
from specdec.server.text import TextModel
from tests.generator.test_pictures import SMALL, asked, data_url
from tests.pictures import with_processor
from tests.server.served import Asking, app, asking, events, model_of


@cache
def seeing_model() -> TextModel:
    model, processor = with_processor()
    return TextModel("text", SpecGenerator(model, "suffix", tokenizer=processor), context=512, pixels=10_000)


def body(*urls: str, **fields: Any) -> dict[str, Any]:
    """A chat about pictures."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "What is it?"}
    return {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 8, "temperature": 0, **fields}


def refused(c: Asking, chat: dict[str, Any], words: str) -> None:
    """Checks that a chat is a 400 with these words, and so are its tokens."""
    for path, fields in (("/v1/chat/completions", chat), ("/tokenize", {"messages": chat["messages"]})):
        answer = c.post(path, json=fields)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_picture_is_answered_as_by_the_library() -> None:
    out = seeing_model().generator.generate(messages=asked(SMALL), max_new_tokens=8, do_sample=False)
    with asking(app(seeing_model())) as c:
        answer = c.post("/v1/chat/completions", json=body(data_url(SMALL))).json()
        stream = events(c.post("/v1/chat/completions", json=body(data_url(SMALL), stream=True)).text)
        counted = c.post("/tokenize", json={"messages": body(data_url(SMALL))["messages"]}).json()
        other = c.post("/v1/chat/completions", json=body(data_url(Image.new("RGB", (20, 30), "red")))).json()
    assert out.texts == [answer["choices"][0]["message"]["content"]]
    assert other["choices"] != answer["choices"]
    assert answer["usage"]["prompt_tokens"] == out.sequences.shape[1] - 8 == counted["count"]
    assert "".join(event["choices"][0]["delta"]["content"] for event in stream[:-1]) == out.texts[0]


def test_text_alone_is_read() -> None:
    """By the processor's template, in which texts are parts of messages."""
    messages = [{"role": "user", "content": "Is it teal?"}]
    out = seeing_model().generator.generate(messages=messages, max_new_tokens=8, do_sample=False)
    with asking(app(seeing_model())) as c:
        answer = c.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert out.texts == [answer["choices"][0]["message"]["content"]]
    assert answer["usage"]["prompt_tokens"] == out.sequences.shape[1] - 8 == len("user: Is it teal?. assistant:")


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (["https://example.org/cat.png"], "only data URLs are read"),
        (["file:///etc/hostname"], "only data URLs are read"),
        (["/etc/hostname"], "only data URLs are read"),
        (["data:image/png;base64,AAAA"], "cannot be opened"),
        (["data:image/png;base64,%%"], "no base64"),
        ([data_url(Image.new("1", (200, 200)))], "has 200 x 200 pixels"),
        ([data_url(SMALL)] * 3, "2 pictures at most"),
        (["data:image/png;base64," + "A" * 4000], "may have 2,000 bytes at most"),
    ],
)
def test_refused_pictures(urls: list[str], words: str) -> None:
    """A 400 that names the reason. (`/tokenize` had no bounds: a body of 2 MB took gigabytes of memory.)"""
    limits = {"pictures": 2, "picture_bytes": 2000}
    with asking(app(seeing_model(), limits=limits)) as c:
        refused(c, body(*urls), words)


@pytest.mark.parametrize(
    ("path", "asked_", "words"),
    [
        ("completions", {"prompt": "a <image> b"}, "1 places for a picture, and none was given: send it as a part of"),
        ("chat/completions", {"messages": [{"role": "user", "content": "<image>"}]}, "the model's processor refused"),
    ],
)
def test_a_place_without_a_picture(path: str, asked_: dict[str, Any], words: str) -> None:
    """The way out was the library's, `pixel_values`, and the chat's error was told twice."""
    with asking(app(seeing_model())) as c:
        error = c.post(f"/v1/{path}", json=asked_).json()["error"]
    assert (error["param"], words in error["message"], "template" in error["message"]) == ("messages", True, False)


def test_a_model_of_text_alone() -> None:
    with asking(app(model_of("suffix"))) as c:
        refused(c, body(data_url(SMALL)), "reads no pictures")
