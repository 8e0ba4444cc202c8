"""The built-in chat page: what it is served with, and in a real browser what it does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.browser import Browser, needs_browser
from tests.serving.scripted_answers import ScriptedAnswers
from tests.serving.site import SERVING, Site, serving
from tests.tiny import ROOT, build_tiny
from tests.triton.server import data_uri
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.serving.http_options import HttpOptions

SCENE = ROOT / "examples/tiny/images/scene.png"
QUESTION = "What is 12 plus 30?"
LOADED = "document.readyState === 'complete' && $('model').textContent === 'tiny'"


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
def page(browser: Browser, site: Site) -> Iterator[Browser]:
    url = f"http://127.0.0.1:{site.port}/"
    browser.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
    open_page(browser, url)
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])


@pytest.fixture
def script(page: Browser) -> ScriptedAnswers:
    return ScriptedAnswers(page)


def open_page(page: Browser, url: str, loaded: str = LOADED) -> None:
    page.call("Page.navigate", url="about:blank")
    page.call("Page.navigate", url=url)
    page.wait_for(f"document.readyState === 'complete' && typeof $ !== 'undefined' && {loaded}")
    page.errors.clear()


def ask(page: Browser, text: str) -> None:
    page.evaluate(
        f"$('prompt').value = {json.dumps(text)}, showBox(), $('form').requestSubmit(), 0"
    )


def press(page: Browser, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
        )


def shown(page: Browser, selector: str) -> list[str]:
    """The texts of the elements that ``selector`` finds."""
    found = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    assert isinstance(found, list)
    return found


def count(page: Browser, selector: str) -> int:
    return len(shown(page, selector))


def answered(page: Browser, turns: int) -> str:
    """The last answer, once it is complete."""
    page.wait_for(f"turns.length === {turns} && running === null")
    return shown(page, ".turn:last-child .md")[0]


def figures(page: Browser, pane: str = ".pane") -> dict[str, str]:
    names, values = shown(page, f"{pane} dt"), shown(page, f"{pane} dd")
    return dict(zip(names, values, strict=True))


def attach(page: Browser, *files: tuple[str, str, bytes]) -> None:
    """Drop files of these names, types and contents on the page."""
    made = [
        f"new File([Uint8Array.from(atob('{base64.b64encode(data).decode()}'), "
        f"(c) => c.charCodeAt(0))], '{name}', {{ type: '{kind}' }})"
        for name, kind, data in files
    ]
    page.evaluate(
        f"""(() => {{
            const data = new DataTransfer();
            for (const file of [{", ".join(made)}]) data.items.add(file);
            document.body.dispatchEvent(
              new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
        }})()"""
    )


def compare(page: Browser) -> None:
    page.evaluate("$('compare').click()")


def test_page_loads_nothing_from_elsewhere(site: Site, engine: LLM) -> None:
    status, text, headers = site.request("GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert not re.findall(r"https?://|(?:src|href)=\"(?!#|data:)", text)
    with serving(engine, http=HttpOptions(chat_page=False)) as plain:
        assert plain.request("GET", "/")[0] == 404


def test_policy_names_the_script_and_the_style_by_their_hashes(site: Site) -> None:
    _, text, headers = site.request("GET", "/")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        [inline] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.findall(r"\son\w+=\"|\sstyle=\"|innerHTML|insertAdjacentHTML", text)


@needs_browser
def test_answer_is_streamed_with_accepted_tokens_marked(page: Browser, engine: LLM) -> None:
    expected = engine.generate([{"role": "user", "content": QUESTION}])
    ask(page, QUESTION)
    assert answered(page, 1) == expected.text == "12 plus 30 equals 42."
    assert shown(page, ".md .draft") == ["2 plus 30", "42."]
    found = figures(page)
    assert found["acceptance length"] == f"{expected.acceptance_length:.2f}"
    assert found["tokens"] == str(len(expected.token_ids))
    assert found.keys() == {"tokens/s", "first token", "acceptance length", "tokens"}
    assert page.errors == []


@needs_browser
def test_speed_is_the_server_s_own(page: Browser, script: ScriptedAnswers) -> None:
    ask(page, QUESTION)
    script.write("A", " short", " answer", accepted=2)
    assert figures(page) == {"acceptance length": "3.00", "tokens": "3"}
    script.finish()
    answered(page, 1)
    assert figures(page) == {
        "tokens/s": "142",
        "first token": "38 ms",
        "acceptance length": "3.17",
        "tokens": "24",
    }


@needs_browser
def test_second_turn_knows_the_first_and_new_forgets_it(page: Browser, engine: LLM) -> None:
    first = engine.generate([{"role": "user", "content": QUESTION}]).text
    ask(page, QUESTION)
    answered(page, 1)
    ask(page, "And 7 plus 5?")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And 7 plus 5?"},
    ]
    assert answered(page, 2) == engine.generate(messages).text
    page.evaluate("$('new').click()")
    assert count(page, ".turn") == count(page, ".figures") == 0
    ask(page, QUESTION)
    assert answered(page, 1) == first
    assert count(page, ".figures") == 1


@needs_browser
def test_new_while_an_answer_is_streamed_stops_and_forgets_it(
    page: Browser, script: ScriptedAnswers
) -> None:
    ask(page, QUESTION)
    script.write("The answer")
    page.evaluate("$('new').click()")
    page.wait_for("running === null && turns.length === 0")
    assert page.evaluate("$('prompt').value") == ""
    ask(page, QUESTION)
    script.answer("42")
    assert answered(page, 1) == "42"


@needs_browser
def test_side_by_side_shows_both_speeds_and_that_the_answers_are_the_same(
    page: Browser, engine: LLM
) -> None:
    expected = engine.generate([{"role": "user", "content": QUESTION}]).text
    compare(page)
    ask(page, QUESTION)
    answered(page, 1)
    assert shown(page, ".md") == [expected, expected]
    assert shown(page, ".pane .title") == ["With the draft", "Without the draft"]
    assert count(page, ".pane:last-child .draft") == 0
    assert "acceptance length" in figures(page, ".pane:first-child")
    assert "acceptance length" not in figures(page, ".pane:last-child")
    assert "the same, letter for letter" in shown(page, ".comparison p")[0]
    speeds = [figures(page, f".pane:{which}-child")["tokens/s"] for which in ("first", "last")]
    assert shown(page, ".race b") == [f"{speed} tokens/s" for speed in speeds]
    assert page.errors == []


@needs_browser
def test_side_by_side_asks_once_with_and_then_once_without_the_draft(
    page: Browser, script: ScriptedAnswers
) -> None:
    compare(page)
    ask(page, QUESTION)
    script.write("forty", " two", accepted=1)
    assert [body["speculation"] for body in script.bodies] == [True], "they share no machine"
    script.finish(tokens_per_second=150.0)
    script.write("forty")
    script.finish(tokens_per_second=60.0, acceptance_length=None)
    answered(page, 1)
    assert [body["speculation"] for body in script.bodies] == [True, False]
    assert shown(page, ".comparison h3") == ["2.5\u00d7 faster with the draft"]
    assert "The answers differ" in shown(page, ".comparison p")[0]
    ask(page, "And then?")
    page.wait_for("script.bodies.length === 3")
    assert script.bodies[2]["messages"][1] == {"role": "assistant", "content": "forty two"}


@needs_browser
def test_draft_that_does_not_pay_is_told_so(page: Browser, script: ScriptedAnswers) -> None:
    compare(page)
    ask(page, QUESTION)
    script.write("x")
    script.finish(tokens_per_second=50.0, acceptance_length=None)
    script.write("x")
    script.finish(tokens_per_second=100.0, acceptance_length=None)
    answered(page, 1)
    assert shown(page, ".comparison h3") == ["2.0\u00d7 slower with the draft"]
    assert "drafted nothing" in shown(page, ".comparison p")[0]


@needs_browser
def test_dropped_images_and_videos_are_thumbnails_that_can_be_removed(
    page: Browser, engine: LLM
) -> None:
    data = SCENE.read_bytes()
    attach(
        page,
        ("scene.png", "image/png", data),
        ("notes.txt", "text/plain", b"x"),
        ("clip.mp4", "video/mp4", b"x"),
    )
    assert count(page, "#media img") == count(page, "#media video") == 1
    assert shown(page, "#problem p")[0].startswith("notes.txt: not an image or video")
    page.evaluate("document.querySelector('#media [aria-label=\"Remove clip.mp4\"]').click()")
    assert count(page, "#media li") == 1
    page.errors.clear()
    ask(page, "What do you see?")
    parts = [
        {"type": "image_url", "image_url": {"url": data_uri(data)}},
        {"type": "text", "text": "What do you see?"},
    ]
    expected = engine.generate([{"role": "user", "content": parts}]).text
    assert answered(page, 1) == expected
    assert page.evaluate("document.querySelector('.user img').naturalWidth") > 0
    assert page.evaluate("document.querySelector('.user img').alt") == "scene.png"
    assert count(page, "#media li") == 0
    assert page.errors == []


@needs_browser
def test_video_is_sent_as_a_video(page: Browser, script: ScriptedAnswers) -> None:
    attach(page, ("clip.mp4", "video/mp4", b"frames"))
    ask(page, "")
    script.answer("A film.")
    answered(page, 1)
    url = f"data:video/mp4;base64,{base64.b64encode(b'frames').decode()}"
    part = {"type": "video_url", "video_url": {"url": url}}
    assert script.bodies[0]["messages"] == [{"role": "user", "content": [part]}]


@needs_browser
def test_refused_message_stays_in_the_box_and_can_be_tried_again(
    page: Browser, engine: LLM
) -> None:
    ask(page, "word " * 2000)
    page.wait_for("!$('problem').hidden && running === null")
    [problem] = shown(page, "#problem p")
    assert re.match(r"The conversation has \d+ tokens, the limit is", problem)
    assert page.evaluate("$('prompt').value") == ("word " * 2000).strip()
    assert count(page, ".turn") == 0
    page.evaluate(f"$('prompt').value = '{QUESTION}', document.querySelector('.again').click()")
    assert answered(page, 1) == engine.generate([{"role": "user", "content": QUESTION}]).text
    assert page.evaluate("$('problem').hidden")


@needs_browser
def test_error_about_a_file_names_no_data_url_and_keeps_the_file(page: Browser) -> None:
    attach(page, ("broken.png", "image/png", b"no image at all" * 20))
    ask(page, "What is this?")
    page.wait_for("!$('problem').hidden && running === null")
    [problem] = shown(page, "#problem p")
    assert problem.startswith("Attached image: ")
    assert "data:" not in problem
    assert count(page, "#media img") == 1
    assert page.evaluate("$('prompt').value") == "What is this?"


@needs_browser
@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (0, "", "The server did not answer."),
        (413, "", "The message is too large"),
        (503, "overloaded: 8 requests wait.", "Overloaded: 8 requests wait."),
        (400, "url: got 'data:image/png;base64,AAAA...'", "Url: got 'attachment'"),
    ],
)
def test_error_is_told_in_words(
    page: Browser, script: ScriptedAnswers, status: int, message: str, expected: str
) -> None:
    script.refuse(status, message)
    ask(page, QUESTION)
    page.wait_for("!$('problem').hidden")
    assert shown(page, "#problem p")[0].startswith(expected)
    page.evaluate("document.querySelector('.again').click(), 0")
    script.answer("42")
    assert answered(page, 1) == "42"


@needs_browser
def test_message_that_comes_back_stands_before_what_was_typed_meanwhile(
    page: Browser, script: ScriptedAnswers
) -> None:
    ask(page, "first")
    page.wait_for("script.stream !== null")
    page.evaluate("$('prompt').value = 'second', 0")
    script.fail("the engine has stopped")
    page.wait_for("!$('problem').hidden")
    assert page.evaluate("$('prompt').value") == "first\n\nsecond"


@needs_browser
def test_answer_that_breaks_off_is_kept_and_can_be_tried_again(
    page: Browser, script: ScriptedAnswers
) -> None:
    ask(page, QUESTION)
    script.write("The answ")
    script.fail("it took longer than 600 s.")
    assert answered(page, 1) == "The answ"
    assert shown(page, ".note.bad") == ["It took longer than 600 s.Try again"]
    page.evaluate("document.querySelector('.note button').click(), 0")
    script.answer("42")
    assert answered(page, 1) == "42"
    assert script.bodies[1] == script.bodies[0]


@needs_browser
def test_escape_stops_an_answer_and_retry_asks_again(
    page: Browser, script: ScriptedAnswers
) -> None:
    ask(page, QUESTION)
    script.write("The answer", " is", accepted=1)
    assert page.evaluate("$('send').ariaLabel") == "Stop"
    press(page, "Escape", 27)
    assert answered(page, 1) == "The answer is"
    assert shown(page, ".note") == ["Stopped."]
    assert "tokens/s" not in figures(page), "the server has told none"
    assert page.evaluate("$('send').ariaLabel") == "Send"
    page.evaluate("script.stream = null, document.querySelector('.retry').click(), 0")
    script.answer("42")
    assert answered(page, 1) == "42"


@needs_browser
@pytest.mark.usefixtures("script")
def test_stop_before_the_first_token_gives_the_message_back(page: Browser) -> None:
    ask(page, QUESTION)
    page.wait_for("script.stream !== null")
    page.evaluate("$('form').requestSubmit()")
    page.wait_for("running === null")
    assert page.evaluate("$('prompt').value") == QUESTION
    assert page.evaluate("$('problem').hidden")


@needs_browser
def test_cut_answer_says_so(page: Browser, script: ScriptedAnswers) -> None:
    ask(page, QUESTION)
    script.write("The")
    script.finish("length")
    answered(page, 1)
    assert shown(page, ".note") == ["The answer was cut at the length limit."]


MARKDOWN = """# Title

Some **bold**, *thin*, ~~old~~ and `code`, snake_case_name and 2 * 3 * 4 \\*.
A [link](https://example.com/a_(b)), https://example.com/c_d.

- one
- two
  1. inner **x**
  2. inner

| a | b |
|---|:-:|
| 1 | `x|y` |

> quoted
> text

```python
def f():

    return "<b>" * 2
```

---

end"""


@needs_browser
def test_markdown_is_rendered(page: Browser, script: ScriptedAnswers) -> None:
    ask(page, QUESTION)
    script.write(*re.findall(r"\s*\S+", MARKDOWN), accepted=3)
    script.finish()
    answered(page, 1)
    assert shown(page, ".md h2") == ["Title"]
    assert [shown(page, f".md > p {tag}") for tag in ("strong", "em", "del", "code")] == [
        ["bold"],
        ["thin"],
        ["old"],
        ["code"],
    ]
    assert "snake_case_name and 2 * 3 * 4 *.\n" in shown(page, ".md > p")[0]
    links = page.evaluate("[...document.querySelectorAll('.md a')].map((a) => a.href)")
    assert links == ["https://example.com/a_(b)", "https://example.com/c_d"]
    assert shown(page, ".md > ul > li > ol > li") == ["inner x", "inner"]
    assert shown(page, ".md th") + shown(page, ".md td") == ["a", "b", "1", "x|y"]
    assert shown(page, ".md blockquote p") == ["quoted\ntext"]
    assert shown(page, ".code code") == ['def f():\n\n    return "<b>" * 2']
    assert shown(page, ".code span")[0] == "python"
    assert count(page, ".md hr") == 1
    assert shown(page, ".md > p")[-1] == "end"
    assert page.errors == []


@needs_browser
def test_markdown_in_pieces_is_the_markdown_of_the_whole(page: Browser) -> None:
    html = page.evaluate(
        f"""(() => {{
            const text = {json.dumps(MARKDOWN)};
            const show = (pieces) => {{
              const made = new AnswerText(document.createElement("div"));
              for (const piece of pieces) {{
                made.push(piece, new Array(piece.length).fill(null));
                made.render();
              }}
              return made.parent.outerHTML.replaceAll("><", ">\\n<");
            }};
            return [show([...text]), show([text])];
        }})()"""
    )
    assert html[0] == html[1]


@needs_browser
@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[click](javascript:alert(1))",
        "[click](JaVaScRiPt:alert(1)) [x]( data:text/html,<script>alert(1)</script>)",
        "![picture](https://example.com/spy.png)",
        "```html\n<script>alert(1)</script>\n```",
        "<a href='javascript:alert(1)'>x</a>",
        "> " * 500 + "deep",
        "*a " * 500 + "`" * 99 + "[" * 500,
    ],
)
def test_what_a_model_writes_never_runs_nor_loads(
    page: Browser, script: ScriptedAnswers, text: str
) -> None:
    ask(page, QUESTION)
    script.answer(text)
    answered(page, 1)
    assert count(page, ".md :is(img, script, iframe, object, embed, style, form, input)") == 0
    links = page.evaluate("[...document.querySelectorAll('.md a')].map((a) => [a.href, a.rel])")
    assert all(url.startswith("https://") and "noopener" in rel for url, rel in links)
    assert page.errors == []


@needs_browser
def test_reasoning_is_folded_once_the_answer_begins(page: Browser, script: ScriptedAnswers) -> None:
    ask(page, QUESTION)
    script.write("Twelve", " and", " thirty", accepted=2, reasoning=True)
    assert page.evaluate("document.querySelector('details').open")
    script.write("42")
    assert not page.evaluate("document.querySelector('details').open")
    assert shown(page, "details .draft") == ["Twelve and"]
    script.finish()
    assert answered(page, 1) == "42"


LINES = [f"Line {i} of an answer.\n\n" for i in range(60)]


@needs_browser
def test_page_follows_its_answer_unless_one_scrolls_up(
    page: Browser, script: ScriptedAnswers
) -> None:
    below = "$('scroll').scrollHeight - $('scroll').clientHeight - $('scroll').scrollTop"
    ask(page, QUESTION)
    script.write(*LINES)
    assert page.evaluate(below) < 2
    assert page.evaluate("$('latest').hidden")
    page.evaluate("$('scroll').scrollBy(0, -300)")
    page.wait_for("!$('latest').hidden")
    place = page.evaluate("$('scroll').scrollTop")
    script.write(*LINES)
    assert page.evaluate("$('scroll').scrollTop") == place
    page.evaluate("$('latest').click()")
    script.write(*LINES)
    assert page.evaluate(below) < 2
    page.evaluate("$('scroll').scrollBy(0, -300)")
    page.wait_for("!$('latest').hidden")
    page.evaluate("$('scroll').scrollTop = 1e9")
    page.wait_for("$('latest').hidden")
    script.write(*LINES)
    assert page.evaluate(below) < 2


@needs_browser
def test_side_by_side_follows_the_second_answer_from_its_beginning(
    page: Browser, script: ScriptedAnswers
) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=1200,
        height=700,
        deviceScaleFactor=1,
        mobile=False,
    )
    compare(page)
    ask(page, QUESTION)
    script.write(*LINES)
    script.finish()
    script.write("First words")
    place = "document.querySelectorAll('.md')[1].getBoundingClientRect()"
    assert 0 < page.evaluate(f"{place}.bottom") < page.evaluate("innerHeight")
    script.write(*LINES)
    bottom = page.evaluate("$('scroll').getBoundingClientRect().bottom")
    assert 0 < bottom - page.evaluate(f"{place}.bottom") < 200


@needs_browser
def test_marks_differ_by_more_than_colour_and_can_be_switched_off(
    page: Browser, script: ScriptedAnswers
) -> None:
    ask(page, QUESTION)
    script.write("A", " cat", " sat", accepted=2)
    script.finish()
    answered(page, 1)
    style = "getComputedStyle(document.querySelector('.md .draft'))"
    assert page.evaluate(f"{style}.textDecorationLine") == "underline"
    tint = page.evaluate(f"{style}.backgroundColor")
    assert tint != "rgba(0, 0, 0, 0)"
    assert shown(page, "#legend > span") == [
        "Underlined: drafted and accepted",
        "Not underlined: the target\u2019s own",
    ]
    page.evaluate("$('marks').click()")
    assert page.evaluate(f"{style}.textDecorationLine") == "none"
    assert page.evaluate(f"{style}.backgroundColor") == "rgba(0, 0, 0, 0)"
    assert page.evaluate("$('legend').innerText").strip() == "Marks"
    page.call("Page.reload")
    page.wait_for(LOADED)
    assert page.evaluate("$('marks').ariaChecked") == "false"


@needs_browser
def test_settings_are_sent_and_kept_until_they_are_reset(
    page: Browser, script: ScriptedAnswers
) -> None:
    chosen = {"system": "Be brief.", "temperature": "0.5", "length": "64"}
    page.evaluate("$('open-settings').click()")
    for name, value in chosen.items():
        page.evaluate(f"$('{name}').value = '{value}', $('{name}').oninput()")
    press(page, "Escape", 27)
    page.wait_for("!$('settings').open")
    ask(page, QUESTION)
    script.answer("42")
    answered(page, 1)
    [body] = script.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.5, 64)
    page.call("Page.reload")
    page.wait_for(LOADED)
    assert [page.evaluate(f"$('{name}').value") for name in chosen] == [*chosen.values()]
    page.evaluate("$('reset').click()")
    again = ScriptedAnswers(page)
    ask(page, QUESTION)
    again.answer("42")
    answered(page, 1)
    [body] = again.bodies
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert "temperature" not in body
    assert "max_tokens" not in body


@needs_browser
def test_copy_takes_the_markdown(page: Browser, site: Site, script: ScriptedAnswers) -> None:
    page.call(
        "Browser.grantPermissions",
        origin=f"http://127.0.0.1:{site.port}",
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    ask(page, QUESTION)
    script.answer("**42**\n\n```\nx = 42\n```")
    answered(page, 1)
    page.evaluate("window.copied = [], navigator.clipboard.writeText = async (t) => copied.push(t)")
    page.evaluate("document.querySelector('.code button').click()")
    page.evaluate("document.querySelector('.acts button').click()")
    assert page.evaluate("copied") == ["x = 42", "**42**\n\n```\nx = 42\n```"]
    assert shown(page, ".acts button")[0] == "Copied"


@needs_browser
def test_example_is_asked(page: Browser, engine: LLM) -> None:
    page.evaluate("document.querySelector('#examples button').click()")
    assert answered(page, 1) == engine.generate([{"role": "user", "content": QUESTION}]).text
    assert page.evaluate("$('welcome').hidden")


@needs_browser
def test_keyboard_is_enough_and_the_answer_is_announced(
    page: Browser, script: ScriptedAnswers
) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.call("Input.insertText", text="Hello")
    press(page, "Tab", 9)
    assert page.evaluate("document.activeElement.id") == "add"
    assert "solid" in page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.evaluate("$('prompt').focus()")
    page.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, text="\r"
    )
    script.write("Good day.")
    assert page.evaluate("$('announce').textContent") == "Answering"
    script.finish()
    answered(page, 1)
    assert page.evaluate("$('announce').textContent") == "Answer: Good day."
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if _role(node) in {"button", "switch", "textbox", "link"}]
    assert len(controls) > 7
    assert all(node["name"]["value"] for node in controls), controls


def _role(node: dict[str, Any]) -> Any:
    return node.get("role", {}).get("value")


CONTRAST = """(([ink, ground]) => {
  const luminance = (colour) => {
    const context = new OffscreenCanvas(1, 1).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((c) =>
      c / 255 <= .04045 ? c / 3294.6 : ((c / 255 + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const [a, b] = [luminance(ink), luminance(ground)].sort((x, y) => y - x);
  return (a + .05) / (b + .05);
})(%s.map((name) => getComputedStyle(document.documentElement).getPropertyValue(name)))"""


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(page: Browser, theme: str) -> None:
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
    )
    grounds = set()
    for ink in ("--ink", "--muted", "--accent", "--bad"):
        for ground in ("--ground", "--surface"):
            assert page.evaluate(CONTRAST % json.dumps([ink, ground])) >= 4.5, (ink, ground)
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert page.evaluate(CONTRAST % '["--on-accent", "--accent"]') >= 4.5
    assert grounds == {{"light": "rgb(251, 251, 250)", "dark": "rgb(19, 20, 22)"}[theme]}


@needs_browser
def test_page_fits_a_phone(page: Browser, script: ScriptedAnswers) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=True,
    )
    inside = "[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() "
    inside += "&& !e.closest('pre, .table, .sr, svg') && e.getBoundingClientRect().right > 361)"
    assert page.evaluate(f"{inside}.map((e) => e.outerHTML.slice(0, 80))") == []
    compare(page)
    ask(page, QUESTION * 20)
    for _ in range(2):
        script.answer(f"{MARKDOWN}\n\n{'long' * 40}\n\n```\n{'x' * 200}\n```")
    answered(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(f"{inside}.map((e) => e.outerHTML.slice(0, 80))") == []


@needs_browser
def test_api_key_is_asked_for_until_it_is_right(browser: Browser, engine: LLM) -> None:
    with serving(engine, api_key="secret") as guarded:
        open_page(browser, f"http://127.0.0.1:{guarded.port}/", "$('key-dialog').open")
        enter = "$('key').value = '{}', document.querySelector('[value=ok]').click()"
        browser.evaluate(enter.format("wrong"))
        browser.wait_for("$('key-dialog').open && $('key-note').textContent.includes('not')")
        browser.evaluate(enter.format("secret"))
        browser.wait_for(LOADED)
        ask(browser, QUESTION)
        assert answered(browser, 1) == "12 plus 30 equals 42."
