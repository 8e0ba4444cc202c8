"""The worst values that sound engines have given, by gate and type: ``python -m
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
from hypothesis import given, settings

from tests.parity.test_clean import QUESTIONS, Pair, pairs
from tests.tiny import build_tiny
from trt_eagle3.parity.board import GATES, Board
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.run import Validation
from trt_eagle3.parity.sources import read_sources
from trt_eagle3.parity.thresholds import THRESHOLDS
from trt_eagle3.parity.workload import Case, bundled_cases

BACKENDS = {"float32": ("torch", "onnxruntime"), "float16": ("torch",), "bfloat16": ("torch",)}


def _draw(note: Callable[[Board], None], engine: dict[str, str], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(pair=pairs())
    def draw(pair: Pair) -> None:
        with replace(pair, engine=engine).open() as drawn:
            case = Case("drawn", "drawn", QUESTIONS[pair.question])
            note(Validation(drawn).run([case], 16, *read_sources(drawn)).board)

    draw()


def main(examples: int = 20) -> None:
    """Print a Markdown table."""
    torch.set_num_threads(1)
    worst: dict[tuple[str, str], float] = {}

    def note(board: Board, dtype: str) -> None:
        for gate in GATES:
            if (found := board.worst(gate)) is not None:
                sign = 1 if board.limit(gate).better == "low" else -1
                key = (gate, dtype)
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
            note(Validation(engine).run(cases, 32, *read_sources(engine)).board, dtype)
    print("| gate | " + " | ".join(f"{dtype}: worst | allowed" for dtype in BACKENDS) + " |")
    print("|---" * (1 + 2 * len(BACKENDS)) + "|")
    for name, gate in GATES.items():
        cells = [
            f"{worst.get((name, d), float('nan')):.3g} | {THRESHOLDS[gate.threshold].values[d]:.7g}"
            for d in BACKENDS
        ]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
