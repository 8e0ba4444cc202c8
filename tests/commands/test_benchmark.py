"""bench on the command line: a peer's rows as JSON, and options that do not go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench.fake_vllm import write_fake_vllm
from tests.tiny import build_tiny
from trt_eagle3.commands.benchmark import bench


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def test_bench_against_prints_the_peer_s_rows_as_json(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('[{"prompt": "one two"}]')
    python = write_fake_vllm(tmp_path)
    arguments = [str(bundle), "--against", "vllm", "--peer-python", str(python), "--json"]
    arguments += ["--prompts", str(tmp_path / "prompts.json"), "--batch", "1", "--rounds", "1"]
    ended = CliRunner().invoke(bench, [*arguments, "--requests", "1", "--max-tokens", "4"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert (found["peer"], found["peer_version"]) == ("vllm", "0.25.1")
    assert found["prompts"] == "file"
    assert [row["peer_speculation"] for row in found["rows"]] == [False, True]
    assert "1 in flight, plain, trt-eagle3 and vllm: " in ended.stderr
    assert "1 in flight, speculative, trt-eagle3 and vllm: " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "vllm", "--tune"], "--tune: not with --against"),
        (["--against", "vllm", "--rate", "2"], "--rate: not with --against"),
        (["--peer-python", "python"], "only with --against"),
        (["--images", "--against", "sglang"], "--against sglang: expected transformers or vllm"),
    ],
)
def test_bench_options_that_do_not_go_together_are_refused(
    bundle: Path, arguments: list[str], message: str
) -> None:
    ended = CliRunner().invoke(bench, [str(bundle), *arguments])
    assert message in str(ended.exception)


def test_generic_prompts_are_named_in_every_output(bundle: Path) -> None:
    words = [str(bundle), "--batch", "1", "--requests", "1", "--rounds", "1", "--max-tokens", "4"]
    ended = CliRunner().invoke(bench, [*words, "--tune", "--json"])
    found = json.loads(ended.stdout)
    assert (found["prompts"], found["tuning"]["prompts"]) == ("generic", "generic")
    shown = CliRunner().invoke(bench, words).stdout
    assert "note: generic prompts were used, because the bundle has none" in shown
    assert "--prompts FILE" in shown


@pytest.mark.usefixtures("wide_console")
def test_bench_says_which_files_it_wrote(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('[{"prompt": "one two"}]')
    words = [str(bundle), "--prompts", str(tmp_path / "prompts.json"), "--batch", "1"]
    words += ["--rounds", "1", "--max-tokens", "4", "--tune", "--plot", str(tmp_path / "a.svg")]
    ended = CliRunner().invoke(bench, words)
    assert ended.exit_code == 0, ended.output
    wrote = [line for line in ended.stdout.splitlines() if line.startswith("wrote ")]
    assert wrote == [f"wrote {bundle}/tuning.json", f"wrote {tmp_path}/a.svg"]
