"""The built-in chat page: what it is served with, and in a real browser what it does."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.browser import Browser, needs_browser
from tests.serving.site import SERVING, Site, serving
from tests.tiny import ROOT, build_tiny
from tests.triton.server import data_uri
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.serving.http_options import HttpOptions

SCENE = ROOT / "examples/tiny/images/scene.png"
QUESTION = "What is 12 plus 30?"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    engine = load(build_tiny(tmp_path_factory.mktemp("engines")), media=SERVING.media())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine) as site:
        yield site


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, site: Site) -> Browser:
    browser.errors.clear()
    browser.call("Page.navigate", url=f"http://127.0.0.1:{site.port}/")
    browser.wait_for("document.readyState === 'complete' && $('model').textContent === 'tiny'")
    return browser


def ask(page: Browser, text: str) -> None:
    page.evaluate(f"$('prompt').value = {json.dumps(text)}; $('form').requestSubmit()")


def answered(page: Browser, turns: int) -> str:
    """The last answer, once it is complete."""
    page.wait_for(f"document.querySelectorAll('.turn').length === {turns} && running === null")
    found = page.evaluate("document.querySelector('.turn:last-child').textContent")
    assert isinstance(found, str)
    return found


def test_page_loads_nothing_from_elsewhere(site: Site, engine: LLM) -> None:
    status, text, headers = site.request("GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.findall(r"https?://|<link|src=", text)
    with serving(engine, http=HttpOptions(chat_page=False)) as plain:
        assert plain.request("GET", "/")[0] == 404


@needs_browser
def test_answer_is_streamed_with_accepted_tokens_in_colour(page: Browser, engine: LLM) -> None:
    expected = engine.generate([{"role": "user", "content": QUESTION}])
    ask(page, QUESTION)
    assert answered(page, 2) == expected.text
    drafted = page.evaluate("document.querySelectorAll('.assistant .draft').length")
    own = page.evaluate("document.querySelectorAll('.assistant .own').length")
    assert drafted + own == len(expected.token_ids)
    assert drafted == sum(length - 1 for length in expected.accepted_lengths)
    stats = page.evaluate("$('stats').textContent")
    assert f"acceptance length {expected.acceptance_length:.2f}" in stats
    assert f"{len(expected.token_ids)} tokens" in stats
    assert page.errors == []


@needs_browser
def test_second_turn_knows_the_first_and_new_forgets_it(page: Browser, engine: LLM) -> None:
    first = engine.generate([{"role": "user", "content": QUESTION}]).text
    ask(page, QUESTION)
    answered(page, 2)
    ask(page, "And 7 plus 5?")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And 7 plus 5?"},
    ]
    assert answered(page, 4) == engine.generate(messages).text
    page.evaluate("$('clear').click()")
    ask(page, QUESTION)
    assert answered(page, 2) == first


@needs_browser
def test_dropped_image_is_seen(page: Browser, engine: LLM) -> None:
    data = SCENE.read_bytes()
    encoded = base64.b64encode(data).decode()
    page.evaluate(
        f"""(() => {{
            const bytes = Uint8Array.from(atob("{encoded}"), (c) => c.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "scene.png", {{ type: "image/png" }}));
            data.items.add(new File(["x"], "notes.txt", {{ type: "text/plain" }}));
            document.body.dispatchEvent(
              new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
        }})()"""
    )
    page.wait_for("document.querySelectorAll('#images img').length === 1")
    ask(page, "What do you see?")
    parts = [
        {"type": "image_url", "image_url": {"url": data_uri(data)}},
        {"type": "text", "text": "What do you see?"},
    ]
    expected = engine.generate([{"role": "user", "content": parts}]).text
    assert answered(page, 2) == expected
    assert page.evaluate("document.querySelector('.user img').naturalWidth") > 0
    assert page.errors == []


@needs_browser
def test_refusal_is_shown_and_the_next_question_answered(page: Browser, engine: LLM) -> None:
    ask(page, "word " * 2000)
    assert "the limit is" in answered(page, 2)
    assert page.evaluate("document.querySelectorAll('.error').length") == 1
    ask(page, QUESTION)
    assert answered(page, 4) == engine.generate([{"role": "user", "content": QUESTION}]).text


@needs_browser
def test_what_a_model_writes_is_text_and_no_markup(page: Browser) -> None:
    page.evaluate("showText(turn('assistant'), '<img src=x onerror=alert(1)>', null)")
    assert page.evaluate("document.querySelectorAll('.assistant img').length") == 0


@needs_browser
def test_page_fits_a_phone(page: Browser, tmp_path: Path) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=True,
    )
    try:
        ask(page, QUESTION)
        answered(page, 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        shot = page.call("Page.captureScreenshot", format="png")["data"]
        (tmp_path / "phone.png").write_bytes(base64.b64decode(shot))
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
