"""The gates of ``validate`` over a random pair: clean, and with a fault planted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.parity.conftest import OPTIONAL, without
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.multimodal import Video
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case, _frames, draw_image
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.report.summary import Findings
from trt_eagle3.parity.run import Validation
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["failed", "questions", "validate_pair"]


def questions(frame_side: int) -> list[Question]:
    """An image, and a video of ``frame_side`` pixels beside a second one.

    Frames stand a seventh of a second apart, whose positions in time are no whole numbers.
    """
    video = Video(_frames(8, (frame_side, frame_side)), fps=7.0)
    return [
        Question("What is this?", [draw_image(1, (72, 100))]),
        Question("What moves, and where?", [draw_image(2, (40, 64))], videos=[video]),
    ]


def validate_pair(
    bundle: Path, asked: Sequence[Question], *, made_from: TargetCheckpoint | None = None
) -> Findings:
    """Every check but those of files, batches, sampling and options.

    ``made_from``: the checkpoint that the build quantised.
    """
    engine = RecordingEngine(bundle)
    spec, manifest = read_sources(engine)
    cases = [Case(str(i), "image", question) for i, question in enumerate(asked)]
    return Validation(engine, left_out=without(*OPTIONAL)).run(cases, 10, spec, manifest, made_from)


def failed(found: Findings) -> list[str]:
    """Names of the checks that failed, in their order."""
    return [m.check.name for m in found.recorder.values() if m.failures]
