"""The page, in a real browser: typing, streaming, stopping, errors, an upload, keyboard, phone, light and dark."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.options import bundled_models
from tests.browser import launched, needs_browser
from tests.server.process import KEY, Process

api = pytest.importorskip("playwright.sync_api", reason="the extra `test` is not installed: no playwright")

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One with a microphone that beeps."""
    with launched("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as opened:
        yield opened


@pytest.fixture
def page(server: Process, browser: Any) -> Iterator[Any]:
    """A page that knows the key; whatever the console complains of is an error, and so are loads from elsewhere."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: wrong.append(line.text) if "Content Security" in line.text else None)
    opened.on(
        "request",
        lambda route: None if route.url.startswith((server.url, "blob:", "data:")) else wrong.append(route.url),
    )
    opened.goto(server.url)
    opened.fill("#key", KEY)
    opened.keyboard.press("Tab")
    api.expect(opened.locator("#state")).to_have_text("ready")
    yield opened
    opened.close()
    assert not wrong


def test_typing_and_streaming(page: Any) -> None:
    """Text comes piece by piece, coloured by who wrote it, and figures follow; the plots have lines."""
    page.select_option("#model", "code")
    page.fill("#prompt", "def fibonacci(n):\n")
    page.keyboard.press("Control+Enter")
    api.expect(page.locator("#figures")).to_contain_text("drafted tokens accepted", timeout=30_000)
    api.expect(page.locator("#figures")).to_contain_text("estimate")
    assert page.locator("#output .drafted").count() > 3
    assert page.locator("#output .own").count() > 3
    colour = "element => getComputedStyle(element).backgroundColor"
    coloured, plain = (page.locator(f"#output .{kind}").first.evaluate(colour) for kind in ("drafted", "own"))
    assert coloured != plain
    page.uncheck("#colours")
    assert page.locator("#output .drafted").first.evaluate(colour) == plain
    page.check("#colours")
    assert page.locator("#plot-speed path").count() == 1
    page.click("#measure")
    api.expect(page.locator("#figures")).to_contain_text(re.compile(r"measured: .*×"), timeout=60_000)


def test_stopping(page: Any, server: Process) -> None:
    """Escape ends the text, and the server's work."""
    page.select_option("#model", "tiny")
    page.fill("[name=max_tokens]", "5000")
    page.fill("[name=temperature]", "1")
    page.fill("#prompt", "abc")
    page.click("#tab-complete")
    page.route(
        "**/v1/completions",
        lambda route: route.continue_(
            post_data=route.request.post_data.replace('"prompt"', '"ignore_eos":true,"prompt"').replace("5000", "900")
        ),
    )
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    api.expect(page.locator("#output .own").nth(3)).to_be_attached(timeout=30_000)
    page.keyboard.press("Escape")
    api.expect(page.locator("#figures")).to_have_text("stopped")
    api.expect(page.locator("#now-queue")).to_have_text("0 and 0", timeout=15_000)
    with server.client() as client:
        assert 'requests_aborted_total{endpoint="/v1/completions"}' in client.get("/metrics").text


def test_chatting(page: Any) -> None:
    page.select_option("#model", "tiny")
    page.click("#tab-chat")
    page.fill("[name=max_tokens]", "12")
    for turn in (1, 2):
        page.fill("#prompt", "hello")
        page.click("#send")
        api.expect(page.locator(".turn")).to_have_count(2 * turn, timeout=30_000)
    api.expect(page.locator(".turn").first).to_contain_text("hello")
    page.click("#clear")
    api.expect(page.locator(".turn")).to_have_count(0)


def test_errors_are_said(page: Any) -> None:
    """What the server refuses, what the browser can tell by itself, a lost key, a server that is gone."""
    alert = page.locator("#alert")
    page.select_option("#model", "tiny")
    page.fill("#prompt", "x" * 9000)
    page.click("#send")
    api.expect(alert).to_contain_text("context")
    page.fill("#prompt", "x")
    page.fill("[name=schema]", "{")
    page.click("#send")
    api.expect(alert).to_contain_text("schema is not JSON")
    page.fill("[name=schema]", "")
    page.fill("[name=max_tokens]", "8")
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, json={"error": {"message": "full."}}),
    )
    page.click("#tab-complete")
    page.click("#send")
    api.expect(alert).to_contain_text("busy: full. Try again in 7 s")
    page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda route: route.abort())
    page.click("#send")
    api.expect(alert).to_contain_text("cannot be reached")
    page.unroute("**/v1/completions")
    page.fill("#key", "wrong")
    page.keyboard.press("Tab")
    api.expect(alert).to_contain_text("API key")
    api.expect(page.locator("#key")).to_be_focused()


def test_structured_answers(page: Any) -> None:
    page.select_option("#model", "code")
    page.fill("#prompt", "x = ")
    page.fill(
        "[name=schema]",
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],'
        ' "additionalProperties": false}',
    )
    page.click("#send")
    api.expect(page.locator("#figures")).to_contain_text("per second", timeout=30_000)
    assert re.search(r'\{"a":\s?(true|false)\}$', page.locator("#output").inner_text())


def test_an_upload(page: Any) -> None:
    """A recording of the package is written down, as text and as subtitles; what is no sound is told."""
    path, text = bundled_models.recordings()[0]
    page.select_option("#model", "speech")
    page.set_input_files("#file", str(path))
    page.click("#hear")
    api.expect(page.locator("#transcript")).to_contain_text(text.split(".")[0], timeout=60_000)
    page.select_option("#form", "srt")
    page.click("#hear")
    api.expect(page.locator("#transcript")).to_contain_text("-->", timeout=60_000)
    page.set_input_files("#file", {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"nothing"})
    page.click("#hear")
    api.expect(page.locator("#alert")).to_contain_text("is not sound")


def test_the_microphone(page: Any) -> None:
    """What it hears is sent as a wav file."""
    page.select_option("#model", "speech")
    page.click("#record")
    api.expect(page.locator("#record")).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(1500)
    with page.expect_response("**/v1/audio/transcriptions") as answered:
        page.click("#record")
    assert answered.value.status == 200  # which it is for sound that the server can read
    api.expect(page.locator("#sound-figures")).to_contain_text("in ", timeout=60_000)


def test_phone_dark_and_keyboard(server: Process, browser: Any) -> None:
    """Nothing is wider than a phone; dark follows the system and the button; all can be reached by the keyboard."""
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True)
    page.goto(server.url)
    api.expect(page.locator("#state")).to_have_text("key needed")
    page.fill("#key", KEY)
    page.keyboard.press("Tab")
    api.expect(page.locator("#state")).to_have_text("ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = "element => getComputedStyle(element).backgroundColor"
    dark = page.locator("body").evaluate(background)
    page.click("#theme")
    assert page.locator("body").evaluate(background) != dark
    page.click("#theme")
    assert page.locator("body").evaluate(background) == dark
    page.select_option("#model", "tiny")
    page.focus("#tab-complete")
    page.keyboard.press("ArrowRight")
    api.expect(page.locator("#tab-chat")).to_be_focused()
    api.expect(page.locator("#tab-chat")).to_have_attribute("aria-selected", "true")
    page.focus("#theme")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"prompt", "send", "clear", "output", "colours", "max_tokens", "schema", "key"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !e.labels?.length && !e.textContent.trim() && !e.ariaLabel).map(e => e.outerHTML)"
    )
    assert unnamed == []
    page.close()
