"""The report: its schema, its page, its JUnit file, and the tolerances that a user sets."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from rich.console import Console

from tests.parity.conftest import LIMITS, OPTIONAL, case, inspect, without
from tests.parity.faults import FAULTS
from tests.parity.planting import MANIFEST, SPEC, plant_in
from tests.parity.shared_reference import share_reference
from tests.terminal import assert_fits
from tests.tiny import QUESTIONS, ROOT, build_tiny
from trt_eagle3.commands.console import show
from trt_eagle3.decode.llm import load
from trt_eagle3.errors import CheckFailedError, UserError
from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import THRESHOLDS, Thresholds, read_overrides
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import read_cases
from trt_eagle3.parity.reference.drafting import AcceptanceCounts
from trt_eagle3.parity.report.files import write_junit, write_report
from trt_eagle3.parity.report.html import report_html
from trt_eagle3.parity.report.result import OverrideResult, Report
from trt_eagle3.parity.report.schema import SCHEMA_FILE, report_schema
from trt_eagle3.parity.report.summary import summarise
from trt_eagle3.parity.run import Validation


@pytest.fixture(scope="module")
def reports(tree_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Of a sound bundle, and of one with a transposed weight."""
    made = {}
    for name in ("sound", "faulty"):
        with pytest.MonkeyPatch.context() as patch:
            planted = plant_in(tree_bundle, tmp_path_factory.mktemp(name), patch)
            if name == "faulty":
                FAULTS["transposed weight"].plant(planted)
            looks = OPTIONAL if name == "sound" else ()
            found = inspect(planted.engine(), patch, looks, ("temperature 0.7", "penalties"))
            made[name] = summarise(found, suite="quick", reference="PyTorch")
    return made


@pytest.fixture(scope="module")
def page(reports: dict[str, Report]) -> str:
    return report_html(reports["sound"])


@pytest.mark.parametrize("name", ["sound", "faulty"])
def test_report_follows_its_schema_and_reads_back(name: str, reports: dict[str, Report]) -> None:
    text = reports[name].to_json()
    jsonschema.validate(json.loads(text), json.loads(SCHEMA_FILE.read_text()))
    assert Report.model_validate_json(text) == reports[name]


def test_schema_file_is_the_models() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == report_schema(), (
        "run: python -m trt_eagle3.parity.report.schema"
    )


@pytest.mark.usefixtures("without_plots")
def test_infinite_error_is_text_in_json(reports: dict[str, Report]) -> None:
    checks = reports["faulty"].checks
    wild = reports["faulty"].model_copy(
        update={"checks": (checks[0].model_copy(update={"measured": float("inf")}), *checks[1:])}
    )
    raw = json.loads(wild.to_json())
    assert raw["checks"][0]["measured"] == "Infinity"
    jsonschema.validate(raw, report_schema())
    assert Report.model_validate(raw).checks[0].measured == float("inf")
    assert "infinite" in report_html(wild)


def test_every_gate_has_its_own_line(reports: dict[str, Report], page: str) -> None:
    assert [g.name for g in reports["sound"].checks] == list(CHECKS)
    assert all(page.count(f"<code>{name}</code><br>") == 1 for name in CHECKS)


def test_page_loads_nothing_and_has_both_themes_and_all_plots(page: str) -> None:
    assert not re.search(
        r'(?:src|href|url)\s*[=(]\s*["\']?(?!#)', page.replace('xlink:href="#', "")
    )
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg ") - page.count('<svg class="bar"') == 4
    colours = set(re.findall(r"#[0-9a-f]{6}", page.split("</style>", 1)[1]))
    assert colours <= {"#000000", "#ffffff"}, "a colour of its own would ignore the theme"


@pytest.mark.usefixtures("without_plots")
def test_page_of_a_failure_says_where_to_look(reports: dict[str, Report]) -> None:
    page = report_html(reports["faulty"])
    assert "FAILED" in page
    assert "Look here first: target, <code>layers.3.self_attn.output</code>" in page
    assert reports["faulty"].mismatches, "its tokens differ too"
    failed = [m for m in reports["faulty"].mismatches if m.kind == "failure"]
    assert all(m.first_tensor == "layers.3.output" for m in failed)


@pytest.mark.usefixtures("without_plots")
def test_report_says_what_was_not_checked(reports: dict[str, Report]) -> None:
    sound = reports["sound"]
    num_held = sound.num_checks("passed")
    assert not any("sampling" in what or "batch" in what for what in sound.not_checked)
    (first, *rest), (prompt, *_) = sound.checks, sound.prompts
    skipped = first.model_copy(update={"status": "skipped", "reason": "no reason"})
    other = sound.model_copy(
        update={
            "checks": (skipped, *rest),
            "left_out": ("video",),
            "prompts": (prompt.model_copy(update={"prompt_tokens": 10, "answer_tokens": 2}),),
            "bundle": sound.bundle.model_copy(update={"draft_overrides": {"residual": '"normed"'}}),
        }
    )
    expected = (
        "bundle.meaning (no reason)",
        "video",
        "sequences longer than 12 of max_seq_len 128 tokens",
    )
    assert all(part in what for part, what in zip(expected, other.not_checked, strict=True))
    lines = "\n".join(other.lines(()))
    page = report_html(other)
    assert all(what in lines and what.replace("'", "&#39;") in page for what in other.not_checked)
    assert f"{num_held - 1} checks hold, 0 failed, 1 skipped, 8 not applicable; " in lines
    assert 'read with the config\'s override: residual = "normed"' in lines
    assert "1 checks were skipped" in page


def test_checks_that_do_not_apply_are_counted_apart_everywhere(
    reports: dict[str, Report], page: str, tmp_path: Path
) -> None:
    sound = reports["sound"]
    absent = {
        "weights.values": "no weight is quantised",
        "weights.made": "the build quantised no weight",
        "kv.rows": "keys and values are cached in the compute type",
        "kv.attention": "keys and values are cached in the compute type",
        "draft.context": "the draft is no block draft",
        "draft.scores": "the draft is no block draft",
        "draft.confidence": "the draft is no block draft",
        "draft.tokens": "the draft is no block draft",
    }
    found = {g.name: g.reason for g in sound.checks if g.status == "not_applicable"}
    assert found == absent
    assert all(g.compared == 0 and g.measured is None for g in sound.checks if g.name in absent)
    assert all(g.compared > 0 for g in sound.checks if g.status == "passed")
    assert [name for name in absent if any(name in what for what in sound.not_checked)] == []
    held, skipped = (sound.num_checks(status) for status in ("passed", "skipped"))
    assert held + skipped + len(absent) == len(CHECKS)
    lines = "\n".join(sound.lines(()))
    assert f"{held} checks hold, 0 failed, {skipped} skipped, 8 not applicable; " in lines
    assert "not applicable: weights.values (no weight is quantised)" in lines
    assert f"kv.rows, kv.attention ({absent['kv.rows']})" in lines
    assert f"All {held} checks that compared something passed" in page
    assert "8 checks do not apply to this bundle" in page
    assert ">weights (not applicable)</li>" in page
    folded = page.split("8 checks not applicable to this bundle")[1]
    assert all(f"<code>{name}</code>" in folded for name in absent)
    write_junit(sound, tmp_path / "checks.xml")
    cases = {case.get("name"): case for case in ET.parse(tmp_path / "checks.xml").iter("testcase")}
    [why] = cases["weights.made"].findall("skipped")
    assert why.get("message") == "not applicable: the build quantised no weight"
    rows = _table_rows(sound, width=120)
    assert [rows[name].split()[0] for name in absent] == ["n/a"] * 8
    assert absent["weights.values"] in rows["weights.values"]


def _shown(report: Report, width: int) -> str:
    """What ``validate`` prints of ``report`` in a terminal of ``width`` columns."""
    console = Console(width=width, record=True, file=io.StringIO())
    show(report.table(), *report.lines(()), to=console)
    return console.export_text()


def _table_rows(report: Report, width: int) -> dict[str, str]:
    """The rows of the terminal's table, by check; what is below a row belongs to it."""
    names = {g.name for g in report.checks}
    rows: dict[str, str] = {}
    name = ""
    for words in map(str.split, _shown(report, width).splitlines()[1:]):
        name = words[1] if len(words) > 1 and words[1] in names else name
        rows[name] = f"{rows.get(name, '')} {' '.join(words)}".strip()
    return rows


@pytest.mark.parametrize("width", [60, 80, 200])
def test_terminal_s_table_fits_and_cuts_no_description(
    reports: dict[str, Report], width: int
) -> None:
    for report in reports.values():
        assert_fits(_shown(report, width), width)
        rows = _table_rows(report, width)
        assert list(rows) == [g.name for g in report.checks]
        assert all((g.reason or g.title) in rows[g.name] for g in report.checks)


def test_p_value_s_bar_counts_powers_of_ten(reports: dict[str, Report], page: str) -> None:
    [drawn] = [g for g in reports["sound"].checks if g.name == "sampling.tokens"]
    assert drawn.measured is not None
    assert drawn.used == pytest.approx(math.log10(drawn.measured) / -6)
    assert f'<rect width="{100 * drawn.used:.1f}%"' in page.split("<code>sampling.tokens")[1][:2000]


def test_pages_are_equal_for_equal_reports(reports: dict[str, Report], page: str) -> None:
    assert report_html(reports["sound"]) == page


@pytest.mark.usefixtures("without_plots")
def test_user_text_is_escaped(reports: dict[str, Report]) -> None:
    prompt = reports["sound"].prompts[0].model_copy(update={"prompt": "<script>alert(1)</script>"})
    assert "<script>" not in report_html(reports["sound"].model_copy(update={"prompts": (prompt,)}))


def test_junit_has_a_case_per_gate_and_a_failure_per_failed_one(
    reports: dict[str, Report], tmp_path: Path
) -> None:
    report = reports["faulty"]
    write_junit(report, tmp_path / "deep" / "checks.xml")
    suite = ET.parse(tmp_path / "deep" / "checks.xml").getroot()[0]
    failed = [g.name for g in report.checks if g.status == "failed"]
    assert suite.tag == "testsuite"
    assert [case.get("name") for case in suite] == list(CHECKS)
    assert [case.get("name") for case in suite if case.find("failure") is not None] == failed
    assert suite.get("failures") == str(len(failed))
    assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))


@pytest.mark.usefixtures("without_plots")
def test_report_of_a_deployed_bundle_stays_what_it_was(
    reports: dict[str, Report], tmp_path: Path
) -> None:
    write_report(reports["sound"], tmp_path)
    old = (tmp_path / "report.json").read_text()
    (tmp_path / "deployed.json").hardlink_to(tmp_path / "report.json")
    write_report(reports["faulty"], tmp_path)
    assert (tmp_path / "deployed.json").read_text() == old != (tmp_path / "report.json").read_text()


@pytest.mark.usefixtures("without_plots")
def test_report_that_cannot_be_written_is_one_line(
    reports: dict[str, Report], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the report.*--output") as error:
        write_report(reports["sound"], tmp_path / "file")
    assert "\n" not in str(error.value)


def test_check_names_gates_stage_and_tensor(reports: dict[str, Report]) -> None:
    reports["sound"].check()
    with pytest.raises(
        CheckFailedError, match=r"target.layer_steps.*first in target: layers.3.self_attn.output"
    ):
        reports["faulty"].check()


@pytest.mark.usefixtures("without_plots")
def test_overrides_are_read_used_and_shown(tmp_path: Path, reports: dict[str, Report]) -> None:
    file = tmp_path / "thresholds.yaml"
    file.write_text("layer_step: 0.5\nvision: 1e-3\n")
    limits = Thresholds("bfloat16", read_overrides(file))
    assert limits["layer_step"].value == 0.5
    assert "set by the user; ours is 0.07" in limits["layer_step"].origin
    assert limits["layer_output"].value == THRESHOLDS["layer_output"].values["bfloat16"]
    recorder = CheckRecorder(CHECKS.values(), limits)
    recorder["target.layer_steps"].add(0.4, "a", "layers.0.output", compared=1)
    assert recorder["target.layer_steps"].failures == []
    changed = reports["sound"].model_copy(
        update={"overrides": tuple(OverrideResult(**vars(o)) for o in limits.overrides)}
    )
    page = report_html(changed)
    assert "Tolerances changed by the user" in page
    assert "<code>layer_step</code>: 0.5 instead of 0.07" in page


def test_tokens_after_the_end_of_an_answer_do_not_count_as_accepted() -> None:
    counts = AcceptanceCounts()
    counts.add(3, 2, 3, room=9)  # the answer goes on after this cycle
    counts.add(3, 3, 1, room=2)  # it ends with the second drafted token
    counts.add(3, 0, 0, room=1)  # with the bonus token
    counts.add(3, 3, 3, room=0)  # it has ended before
    assert counts.reached == [3, 2, 1]
    assert counts.engine == [2, 2, 0]
    assert counts.reference == [2, 1, 1]
    assert counts.lengths == {3: 1, 2: 1, 1: 1}


def test_acceptance_is_what_the_user_s_own_prompts_see_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other prompt is none of the user's, and its answer runs on, as the own ones do."""
    share_reference(monkeypatch)
    bundle = build_tiny(tmp_path, speculation={"mode": "chain", "steps": 3}, limits=LIMITS)
    cases = [*read_cases(QUESTIONS)[:2], case()]
    with load(bundle) as llm:
        found = [llm.generate(c.question.prompt, images=c.question.images) for c in cases[:2]]
    assert all(answer.finish_reason == "stop" for answer in found)
    validation = Validation(RecordingEngine(bundle), left_out=without(*OPTIONAL))
    findings = validation.run(cases, max(len(a.token_ids) for a in found) + 8, SPEC, MANIFEST)
    report = summarise(findings, suite="mine.json", reference="PyTorch")
    assert report.acceptance is not None
    assert report.acceptance.prompts == "file"
    seen = Counter(n for answer in found for n in answer.accepted_lengths)
    assert report.acceptance.lengths == seen
    assert sum(findings.evidence.acceptance.recorded.lengths.values()) > sum(seen.values())
    assert [p.answer for p in report.prompts[:2]] == [answer.text for answer in found]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer_stap: 1", "no threshold layer_stap. Did you mean layer_step"),
        ("layer_step: low", "layer_step: expected a number"),
        ("layer_step: -1", "layer_step: expected a number"),
        ("layer_step: .inf", "layer_step: expected a number"),
        ("- 1", "expected a mapping"),
        ("a: [", "thresholds.yaml: not YAML: "),
    ],
)
def test_bad_thresholds_are_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "thresholds.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_overrides(file)


def test_every_threshold_is_used_and_has_an_origin_for_every_type() -> None:
    used = {check.threshold for check in CHECKS.values()} | {"tie_margin", "drawn_tie"}
    assert used == set(THRESHOLDS)
    for threshold in THRESHOLDS.values():
        assert set(threshold.values) == {"float32", "float16", "bfloat16"}
        assert len(threshold.origin) > 20


def test_readme_counts_the_gates() -> None:
    assert f"`validate`: {len(CHECKS)} checks" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_documents_describe_every_check_threshold_and_key() -> None:
    pages = ("docs/validate.md", "docs/checks.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    wanted = [*CHECKS, *THRESHOLDS, *Report.model_fields]
    assert [name for name in wanted if f"`{name}`" not in text] == []
