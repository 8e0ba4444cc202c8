"""bench --against: the same prompts and tokens on both sides, a process that ends with its job,
and one line for whatever is missing.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from tests.bench.fake_vllm import write_fake_vllm
from tests.tiny import DRAFT, TARGET, build_tiny
from tests.waiting import wait_for
from trt_eagle3.bench.against import against
from trt_eagle3.bench.peers import vllm_peer
from trt_eagle3.bench.peers.job import PeerOptions, shared_limits
from trt_eagle3.bench.peers.process import PeerProcess
from trt_eagle3.bench.peers.protocol import PeerJob, PeerPrompt
from trt_eagle3.bench.peers.report import AgainstReport
from trt_eagle3.bench.result import Side
from trt_eagle3.bench.workload import Run, TimedReply
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.errors import EnvironmentMissingError, UserError

TEXTS = ("What is 12 plus 30?", "What is 3 plus 4?")
JOB = PeerJob(str(TARGET), str(TARGET), None, 5, "float32", "cpu", 256, 2, 1 << 20, has_media=False)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def report(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> AgainstReport:
    file = tmp_path_factory.mktemp("prompts") / "prompts.json"
    file.write_text(json.dumps([{"prompt": text} for text in TEXTS]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        options = PeerOptions("transformers")
        return against(
            bundle, options, prompts=file, batches=(1, 2), requests=(2,), rounds=1, max_tokens=4
        )


def test_transformers_answers_the_same_prompts_with_the_same_tokens(report: AgainstReport) -> None:
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert [(row["concurrency"], row["speculation"]) for row in found["rows"]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    for row in report.rows:
        assert row.num_differing == 0
        assert [len(run.replies) for run in row.peer.runs] == [
            len(run.replies) for run in row.ours.runs
        ]
        assert row.ratio > 0
        assert not row.peer_speculation, "transformers has no EAGLE-3"


def test_report_shows_both_sides_and_the_peer_s_version(report: AgainstReport) -> None:
    shown = io.StringIO()
    Console(width=60, file=shown).print(*report.tables())
    found = shown.getvalue()
    assert "…" not in found
    assert found.count("transformers") == 3 * len(report.rows), "speed, first tokens, and steps"
    assert "p50 / 95 / 99" in found, "wide enough not to wrap"
    assert "against transformers" in report.lines()[0]


def test_peer_that_is_not_installed_is_one_line(bundle: Path) -> None:
    with pytest.raises(EnvironmentMissingError, match=r"vllm: not installed for .*pip install"):
        against(bundle, PeerOptions("vllm"))


def test_peer_that_is_too_old_is_one_line(tmp_path: Path) -> None:
    python = write_fake_vllm(tmp_path, "0.6.3")
    with pytest.raises(
        EnvironmentMissingError, match=r"vllm: expected 0\.25 or later .*got 0\.6\.3"
    ):
        wait(python)


def test_vllm_is_told_to_draft_with_a_head_of_the_target_itself() -> None:
    job = replace(JOB, draft=JOB.target, draft_options={"method": "mtp"})
    told = vllm_peer._arguments(job)["speculative_config"]
    assert told == {"method": "mtp", "num_speculative_tokens": 5}


def test_vllm_is_stepped_with_so_many_in_flight_and_given_the_bundle_s_draft(
    bundle: Path, tmp_path: Path
) -> None:
    """A stand-in for vLLM: a prompt's answer is its number of words, every image a hundred."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    prompts = [{"prompt": "one two three"}, {"prompt": "one two", "images": ["a.png"]}]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "long.json").write_text(json.dumps([{"prompt": "one two three four"}]))
    options = PeerOptions("vllm", python=write_fake_vllm(tmp_path), log=tmp_path / "log")
    report = against(
        bundle,
        options,
        prompts=tmp_path / "prompts.json",
        first_token=[tmp_path / "long.json"],
        batches=(2,),
        requests=(5,),
        rounds=1,
        max_tokens=5,
    )
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["most"] == 2
    arguments = seen["arguments"]
    assert arguments["model"] == str(TARGET)
    assert arguments["speculative_config"] == {
        "method": "eagle3",
        "model": str(DRAFT),
        "num_speculative_tokens": 5,
    }
    assert not arguments["enable_prefix_caching"]
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 8, 12]}
    assert seen["multiprocessing"] == "0"
    assert "chatter on stdout" in (tmp_path / "log/vllm-plain.log").read_text()
    assert (tmp_path / "log/vllm-speculative.log").exists()
    plain, speculative = report.rows
    assert speculative.peer_speculation
    for row in (plain, speculative):
        (run,) = row.peer.runs
        assert [reply.token_ids[:2] for reply in run.replies] == [(3, 7), (102, 7)] * 2 + [(3, 7)]
        assert row.num_differing == 2, "it is no model"
        assert row.peer.acceptance_length == 1.5, "passes of two tokens and of one"
    assert "tokens of 2 of 2 prompts differ" in report.lines()[1]
    for found in report.first_tokens:
        assert found.row.num_prompts == 1
        for side in (found.row.ours, found.row.peer):
            ((reply,),) = (run.replies for run in side.runs)
            assert len(reply.token_ids) == 1
            assert side.step_ms is None, "nothing comes after a first token"
    assert [found.row.speculation for found in report.first_tokens] == [False, True]
    shown = io.StringIO()
    Console(width=60, file=shown).print(*report.tables())
    assert "long.json" in shown.getvalue()
    assert "…" not in shown.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PeerOptions("sglang"), "--against sglang: expected transformers or vllm"),
        (PeerOptions("transformers", checkpoint=Path("/no")), "/no: no target checkpoint there"),
        (
            PeerOptions("transformers", python=Path("/no/python")),
            "--peer-python /no/python: cannot",
        ),
    ],
)
def test_wrong_options_are_refused(bundle: Path, options: PeerOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        against(bundle, options)


def test_peer_process_that_dies_is_one_line_and_ends(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho CUDA is on fire >&2\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"its process has ended\. Its last line: CUDA is on fire"):
        wait(python)


def test_peer_that_is_not_ready_in_time_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Capturing CUDA graphs >&2\nsleep 60\n")
    python.chmod(0o755)
    with PeerProcess("vllm", JOB, python, tmp_path / "log") as peer:
        wait_for(lambda: (tmp_path / "log").stat().st_size > 0)
        with pytest.raises(UserError, match=r"no answer within 0\.1 s\. Its last line: Capturing"):
            peer.wait(0.1)


def test_step_is_the_median_pass_of_the_later_halves() -> None:
    passes = ((9.0, 1), (8.0, 1), (0.02, 1), (0.04, 2))
    runs = tuple(Run((TimedReply((1,), 0.5, passes[n:]),), 1.0, 0, ()) for n in (0, 1, 2))
    assert Side(runs).step_ms == 40.0, "of 20 and 40, 20 and 40, and 40"


def wait(python: Path) -> None:
    with PeerProcess("vllm", JOB, python) as peer:
        peer.wait()


def test_closing_a_peer_ends_what_it_started(tmp_path: Path) -> None:
    """A peer whose child would outlive it, as vLLM's engine core may."""
    python, note = tmp_path / "python", tmp_path / "child"
    python.write_text(
        f'#!/bin/sh\nsleep 60 &\necho $! > {note}\necho \'{{"version": "1"}}\'\nwait\n'
    )
    python.chmod(0o755)
    with PeerProcess("vllm", JOB, python) as peer:
        peer.wait()
        child = Path(f"/proc/{note.read_text().strip()}/stat")
        assert child.exists()
    wait_for(lambda: not _lives(child))


def _lives(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_steps_of_a_peer_become_cycles_and_accepted_positions(tmp_path: Path) -> None:
    reply: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "first_token_seconds": 0.5,
        "passes": [[0.1, 3], [0.1, 1], [0.2, 1]],
    }
    lines = [{"version": "1"}, {"seconds": 1.0, "replies": [reply]}]
    python = tmp_path / "python"
    text = "\n".join(json.dumps(line) for line in lines)
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    python.chmod(0o755)
    with PeerProcess("vllm", JOB, python) as peer:
        assert peer.wait() == "1"
        run = peer.run([PeerPrompt("x")], max_tokens=6)
    assert (run.cycles, run.accepted) == (3, (1, 1))
    assert run.tokens_per_second == 6
    assert run.replies[0].passes == ((0.1, 3), (0.1, 1), (0.2, 1))


def test_limits_of_a_contest_hold_its_largest_load_and_no_more(bundle: Path) -> None:
    loaded = LoadedBundle.open(bundle)
    assert shared_limits(loaded, 6).max_kv_tokens == 6 * 1024
    assert shared_limits(loaded, 99).max_kv_tokens == 8 * 1024, "what the bundle has"
