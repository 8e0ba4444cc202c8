"""What all tests share: each draws the same numbers on every machine and in any order, torch
keeps to one core, and the longest files begin first.
"""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from zlib import crc32

# two workers and the processes that they start share two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# of tests that import ONNX Runtime themselves
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import pytest
from hypothesis import HealthCheck, settings

# torch is imported by workers alone, in hooks and fixtures: who hands out the tests needs none

settings.register_profile(
    "trt-eagle3", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("trt-eagle3")


LONGEST = (
    "parity/test_faults_service.py",
    "engine/trt/test_rtx_builder.py",
    "parity/test_faults.py",
    "decode/test_stepper.py",
    "parity/test_clean.py",
    "decode/test_stepper_recurrent.py",
    "serving/test_cli.py",
    "decode/test_verify.py",
    "probe/test_search.py",
    "parity/test_faults_quantised.py",
    "probe/test_command.py",
    "serving/test_connection.py",
    "decode/test_decoder.py",
    "decode/test_core.py",
    "serving/test_chat_page.py",
    "families/qwen3_next/test_qwen3_next.py",
    "drafts/mtp/test_pair.py",
    "fuzz/test_fuzz.py",
    "triton/test_operations.py",
    "triton/test_server.py",
    "parity/test_faults_block.py",
    "parity/test_routes.py",
    "decode/parallel/test_modes.py",
    "parity/test_command.py",
    "drafts/block/test_pair.py",
    "benchmarks/test_host.py",
    "test_pipeline.py",
    "serving/test_remote_engine.py",
    "test_packaging.py",
    "multimodal/test_chat_template.py",
    "families/test_odd_geometry.py",
    "multimodal/test_decoder_pool.py",
    "decode/test_batches.py",
    "drafts/block/test_targets.py",
    "serving/test_app.py",
    "test_tiny_block.py",
    "decode/parallel/test_processes.py",
    "parity/test_report.py",
    "families/deepseek_vl/test_pair.py",
    "multimodal/test_policy.py",
    "commands/test_benchmark.py",
    "parity/test_option_ties.py",
    "test_tiny_hybrid_pair.py",
    "parity/test_serving.py",
    "test_cli.py",
    "families/qwen3/test_qwen3.py",
    "calibration/test_kv.py",
    "serving/test_operating.py",
    "bench/test_against.py",
    "test_tiny_pair.py",
    "decode/test_encoder_cache.py",
    "calibration/test_hybrid.py",
    "drafts/block/test_probe.py",
    "decode/test_fp8_kv.py",
    "engine/trt/test_session.py",
    "families/qwen3_vl_moe/test_pair.py",
    "decode/test_prompt_rows.py",
)
"""Files that take longest. They begin first, so that two workers end at the same time."""
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    import torch

    if not torch.cuda.is_available():
        leave_out_for_gpus(config, items)


def leave_out_for_gpus(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests of one function that would skip for want of a GPU keep the first: it says so."""
    kept, left_out, told = [], [], set()
    for item in items:
        function = (item.path, getattr(item, "originalname", item.name))
        skips = item.get_closest_marker("gpu") is not None
        (left_out if skips and function in told else kept).append(item)
        if skips:
            told.add(function)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_configure() -> None:
    """The garbage collector took 5 to 18 % of the CPU time, most of it during imports."""
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    """What imports made stays until the end, so the collector need not look at it."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """The last lines name what tests were skipped for lack of."""
    from tests.skips import skipped_for_lack

    yield
    found = terminalreporter.getreports("skipped")
    reasons = [report.longrepr[2] for report in found if isinstance(report.longrepr, tuple)]
    for line in skipped_for_lack(reasons):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """A test that changes what others share, and does not put it back, fails itself."""
    from tests.global_state import global_state

    before = global_state()
    yield
    after = global_state()
    left = {name: after.get(name) for name in before if after.get(name) != before[name]}
    assert not left, f"left changed by this test: {left}"


@pytest.fixture
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands print each text as one line, so that tests can search it."""
    from trt_eagle3.commands import console

    for printer in (console.out, console.log):
        monkeypatch.setattr(printer, "width", 1000)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """torch's own generator; a test that wants others makes one."""
    import torch

    # where there is no other device, the seeds for it pile up, each with a stack
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True, scope="session")
def sharing() -> Iterator[None]:
    """Decoder processes and sessions, for the engines of this process."""
    import torch

    from tests.sharing import shared_decoders, shared_sessions

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, shared_decoders(patch):
        shared_sessions(patch)
        # no test cuts the power, and a disk takes most of a build's time
        patch.setattr(os, "fsync", lambda _: None)
        yield
