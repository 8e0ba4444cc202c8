"""The report's page in a real browser: nothing sticks out on a phone, passed checks are folded,
plots come first, and the security policy refuses what the page does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
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


class _Page(HTMLParser):
    """Texts of a page, each with the elements around it: ``tag.class`` from the outside in."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._open: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(report_html(report))
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"}:
            self._open.append(f"{tag}.{dict(attrs).get('class') or ''}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Without content."""

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().startswith(f"{tag}.")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((tuple(self._open), " ".join(data.split())))

    def all(self, *elements: str) -> list[str]:
        """The texts within all of ``elements``, each a tag with or without its class."""
        return [
            text
            for around, text in self.texts
            if all(any(e in {a, a.split(".")[0]} for a in around) for e in elements)
        ]

    def folds(self) -> dict[str, list[str]]:
        """What each fold's table has in ``code``, by the fold's summary."""
        found: dict[str, list[str]] = {"": []}
        summary = ""
        for around, text in self.texts:
            if around[-2:] == ("details.fold", "summary."):
                summary = text
                found[summary] = []
            elif "table.cards" in around and around[-1] == "code.":
                found[summary if "details.fold" in around else ""].append(text)
        return found


def _names(report: Report, status: str) -> set[str]:
    return {g.name for g in report.checks if g.status == status}


@pytest.mark.usefixtures("without_plots")
def test_head_has_card_dtype_and_date(report: Report) -> None:
    here = report.bundle.model_copy(update={"device": "cuda", "machine": "NVIDIA <H200>"})
    at = {"created_at": "2026-11-28T13:59:07+00:00", "bundle": here}
    page = _Page(report.model_copy(update=at))
    head = zip(page.all("header", "dt"), page.all("header", "dd"), strict=True)
    assert dict(head) == {
        "Card": "NVIDIA <H200>",
        "Dtype": here.dtype,
        "Backend": here.backend,
        "Date": "28 November 2026, 13:59 UTC",
    }


@pytest.mark.usefixtures("without_plots")
def test_passed_checks_are_folded_and_those_that_do_not_apply_are_apart(report: Report) -> None:
    held, absent = _names(report, "passed"), _names(report, "not_applicable")
    exact = sum(g.status == "passed" and g.tolerance == 0 for g in report.checks)
    page = _Page(report)
    folds = page.folds()
    every = {g.name for g in report.checks}
    passed = f"{len(held)} checks passed, {exact} of them exactly: nothing differs"
    assert every.intersection(folds[passed]) == held
    assert (
        every.intersection(folds[f"{len(absent)} checks not applicable to this bundle"]) == absent
    )
    assert every.isdisjoint(folds[""])
    headings = page.all("h2")
    assert headings.index("Pipeline") < headings.index("Plots") < headings.index("Checks")
    [layers] = [g for g in report.checks if g.name == "target.layers"]
    assert layers.measured is not None
    used = layers.measured / layers.tolerance
    assert layers.used == used
    digits = 0 if used >= 0.1 else 1 if used >= 0.01 else 2
    assert f"{100 * used:.{digits}f} %" in page.all("details.fold", "td.num")


@pytest.mark.usefixtures("without_plots")
def test_failed_check_is_not_folded(report: Report) -> None:
    checks = tuple(
        g.model_copy(update={"status": "failed", "failed": 1}) if g.tolerance == 0 else g
        for g in report.checks
    )
    failed = report.model_copy(update={"checks": checks, "passed": False})
    folds = _Page(failed).folds()
    [passed] = [names for summary, names in folds.items() if summary.endswith("checks passed")]
    assert _names(failed, "failed") <= set(folds[""])
    assert _names(failed, "passed") <= set(passed)


@pytest.mark.usefixtures("without_plots")
def test_time_is_a_table_with_a_sum(report: Report) -> None:
    page = _Page(report.model_copy(update={"seconds": {"answers": 3.0, "<b>": 1.0}}))
    assert page.all("table.time", "tbody") == [
        *("answers", "3.00", "75 %"),
        *("<b>", "1.00", "25 %"),
        *("total", "4.00"),
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
