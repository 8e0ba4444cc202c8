"""The worst values that sound engines have given, by check and type: ``python -m
tests.parity.tolerances``.

Random pairs as ``test_clean`` draws them, and the tiny pair with the quick suite; what tolerances
are set by.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tests.parity.test_clean import QUESTIONS, draw
from tests.tiny import build_tiny
from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import THRESHOLDS
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case, bundled_cases
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.run import Validation

BACKENDS = {"float32": ("torch", "onnxruntime"), "float16": ("torch",), "bfloat16": ("torch",)}


def _draw(note: Callable[[CheckRecorder], None], engine: dict[str, str], examples: int) -> None:
    for number in range(examples):
        pair = replace(draw(number), engine=engine)
        with pair.open() as drawn:
            case = Case("drawn", "drawn", QUESTIONS[pair.question])
            note(Validation(drawn).run([case], 16, *read_sources(drawn)).recorder)


def main(examples: int = 20) -> None:
    """Print a Markdown table."""
    torch.set_num_threads(1)
    worst: dict[tuple[str, str], float] = {}

    def note(recorder: CheckRecorder, dtype: str) -> None:
        for check in CHECKS:
            if (found := recorder[check].worst) is not None:
                sign = 1 if recorder[check].limit.better == "low" else -1
                key = (check, dtype)
                worst[key] = max(
                    worst.get(key, found.value), found.value, key=lambda value: sign * value
                )

    for dtype, backend in (
        (dtype, backend) for dtype, backends in BACKENDS.items() for backend in backends
    ):
        config = {"backend": backend, "dtype": dtype}
        _draw(partial(note, dtype=dtype), config, examples)
        with tempfile.TemporaryDirectory() as folder:
            engine = RecordingEngine(build_tiny(Path(folder), engine=config))
            cases = bundled_cases("quick", engine, 32)
            note(Validation(engine).run(cases, 32, *read_sources(engine)).recorder, dtype)
    print("| check | " + " | ".join(f"{dtype}: worst | allowed" for dtype in BACKENDS) + " |")
    print("|---" * (1 + 2 * len(BACKENDS)) + "|")
    for name, check in CHECKS.items():
        limits = THRESHOLDS[check.threshold].values
        cells = [f"{worst.get((name, d), float('nan')):.3g} | {limits[d]:.7g}" for d in BACKENDS]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
