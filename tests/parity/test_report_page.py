"""The report's page in a real browser: nothing sticks out on a phone, exact checks are folded, and
plots come first.
"""

from __future__ import annotations

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
def test_exact_and_skipped_checks_are_folded_and_others_have_percentages(report: Report) -> None:
    page = report_html(report)
    before, after = page.split("exact checks passed")
    assert "<code>processor.token_ids</code>" in after
    assert "<code>processor.token_ids</code>" not in before
    assert "<code>target.layers</code>" in before
    assert before.index("<svg") < before.index("<h2>Checks")
    [layers] = [g for g in report.checks if g.name == "target.layers"]
    assert layers.measured is not None
    used = layers.measured / layers.tolerance
    assert layers.used == used
    assert f"{100 * used:.{0 if used >= 0.1 else 1 if used >= 0.01 else 2}f} %<div" in before


@pytest.mark.usefixtures("without_plots")
def test_exact_check_that_fails_is_not_folded(report: Report) -> None:
    checks = [
        g.model_copy(update={"status": "failed", "failed": 1}) if g.tolerance == 0 else g
        for g in report.checks
    ]
    page = report_html(report.model_copy(update={"checks": tuple(checks), "passed": False}))
    assert "exact checks passed" not in page


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
