"""The report's page in a real browser: nothing sticks out on a phone, passed checks are folded,
plots come first, and the security policy refuses what the page does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.conftest import inspect
from tests.parity.planting import plant_in
from tests.serving.browser import Browser, needs_browser
from trt_eagle3.parity.report.html import report_html
from trt_eagle3.parity.report.result import Report
from trt_eagle3.parity.report.summary import summarise

_STICKS_OUT = """[...document.querySelectorAll('main *')].filter(e => !e.closest('svg'))
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def report(tree_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        planted = plant_in(tree_bundle, tmp_path_factory.mktemp("page"), patch)
        return summarise(inspect(planted.engine(), patch), suite="quick", reference="PyTorch")


@pytest.mark.usefixtures("without_plots")
def test_head_has_card_dtype_and_date(report: Report) -> None:
    here = report.bundle.model_copy(update={"device": "cuda", "machine": "NVIDIA <H200>"})
    at = {"created_at": "2026-11-28T13:59:07+00:00", "bundle": here}
    head = report_html(report.model_copy(update=at)).split("</header>")[0]
    assert "<dt>Card</dt><dd>NVIDIA &lt;H200&gt;</dd>" in head
    assert f"<dt>Dtype</dt><dd>{here.dtype}</dd>" in head
    assert ">28 November 2026, 13:59 UTC</time>" in head


@pytest.mark.usefixtures("without_plots")
def test_passed_checks_are_folded_and_have_percentages(report: Report) -> None:
    page = report_html(report)
    held = report.num_checks("passed")
    exact = sum(g.status == "passed" and g.tolerance == 0 for g in report.checks)
    shown, after = page.split(f"{held} checks passed, {exact} of them exactly: nothing differs")
    assert "<code>processor.token_ids</code>" not in shown
    assert "<code>target.layers</code>" not in shown
    assert shown.index("<svg") < shown.index("<h2>Checks")
    assert "<code>processor.token_ids</code>" in after
    [layers] = [g for g in report.checks if g.name == "target.layers"]
    assert layers.measured is not None
    used = layers.measured / layers.tolerance
    assert layers.used == used
    assert f"{100 * used:.{0 if used >= 0.1 else 1 if used >= 0.01 else 2}f} %<svg" in after


@pytest.mark.usefixtures("without_plots")
def test_failed_check_is_not_folded(report: Report) -> None:
    checks = [
        g.model_copy(update={"status": "failed", "failed": 1}) if g.tolerance == 0 else g
        for g in report.checks
    ]
    page = report_html(report.model_copy(update={"checks": tuple(checks), "passed": False}))
    shown, folded = page.split(" checks passed</summary>")
    assert "<code>processor.token_ids</code>" in shown
    assert "<code>target.layers</code>" in folded


@pytest.mark.usefixtures("without_plots")
def test_time_is_a_table_with_a_sum(report: Report) -> None:
    page = report_html(report.model_copy(update={"seconds": {"answers": 3.0, "<b>": 1.0}}))
    [table] = re.findall(r'<table class="time">.*?</table>', page, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")[2:]]
    assert rows == [
        ["answers", "3.00", "75 %"],
        ["&lt;b&gt;", "1.00", "25 %"],
        ["total", "4.00", ""],
    ]


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return report_html(report)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@needs_browser
@pytest.mark.parametrize(("width", "cards"), [(390, True), (1180, False)])
def test_nothing_sticks_out_and_rows_are_cards_on_a_phone(
    page: str, browser: Browser, tmp_path: Path, width: int, cards: bool
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": cards}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Page.navigate", url=file.as_uri())
    browser.wait_for("document.readyState === 'complete' && !!document.querySelector('.fold')")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    display = browser.evaluate("getComputedStyle(document.querySelector('tbody tr')).display")
    assert display == ("block" if cards else "table-row")
    if cards:
        assert browser.evaluate(_STICKS_OUT) == []
    assert not browser.errors


@needs_browser
def test_policy_permits_the_page_s_own_style_and_nothing_else(
    page: str, browser: Browser, tmp_path: Path
) -> None:
    assert " style=" not in page
    planted = (
        "<script>document.title = 'ran'</script><style>body { color: red }</style>"
        '<p id="styled" style="color: red">text</p><img src="data:image/gif;base64,R0lGODlhAQABAA">'
    )
    file = tmp_path / "planted.html"
    file.write_text(page.replace("<main>", f"<main>{planted}"), encoding="utf-8")
    browser.call("Page.navigate", url=file.as_uri())
    browser.wait_for("document.readyState === 'complete' && !!document.querySelector('.fold')")
    assert browser.evaluate("document.title") != "ran"
    red = "getComputedStyle(document.getElementById('styled')).color === 'rgb(255, 0, 0)'"
    assert not browser.evaluate(red)
    assert browser.evaluate("getComputedStyle(document.body).margin") == "0px"
    assert browser.errors, "the browser reports what it refused"
    browser.errors.clear()
