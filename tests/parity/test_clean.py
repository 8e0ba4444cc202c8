"""No false alarm: random geometries, weights, drafts and prompts pass every gate, on every
backend and type here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.bundle import config_of, save_pair
from tests.parity.conftest import inspect, without
from tests.tiny import build_tiny
from trt_eagle3.parity import answers, sampling_check
from trt_eagle3.parity.board import GATES
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.run import Validation
from trt_eagle3.parity.sources import read_sources
from trt_eagle3.parity.workload import Case, bundled_cases, picture
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

SHAPES = {
    "chain": {"mode": "chain", "steps": 4},
    "tree": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 9},
    "dynamic": {"mode": "dynamic", "steps": 3, "topk": 2, "num_draft_tokens": 6},
}
ENGINES = [
    *[{"backend": "onnxruntime"}] * 2,
    {"backend": "torch"},
    {"backend": "torch", "dtype": "bfloat16"},
    {"backend": "torch", "dtype": "float16"},
]
FRAMES = [picture(40 + step, (64, 96)) for step in range(3)]
QUESTIONS = (
    Question("Why is the sky blue?"),
    Question("Что это? \U0001f30a", [picture(30, (70, 90))]),
    Question("What changed?", [picture(31), picture(32, (64, 192))]),
    Question("Describe the video.", videos=[FRAMES]),
    Question("Both.", [picture(33, (33, 40))], [FRAMES]),
)


@dataclass(frozen=True)
class Pair:
    """What hypothesis draws; ``open`` builds the bundle of it."""

    text: dict[str, Any]
    vision: dict[str, Any]
    sections: tuple[int, int, int]
    overrides: dict[str, Any]
    engine: dict[str, Any]
    shape: str
    question: int
    seed: int

    @contextmanager
    def open(self) -> Iterator[RecordingEngine]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_pair(folder, text=self.text, sections=self.sections, seed=self.seed, **self.vision)
            config = config_of(
                folder,
                draft={"checkpoint": str(folder / "draft"), "overrides": self.overrides},
                engine={"prefill_chunk": 32, **self.engine},
                limits={"max_seq_len": 256, "max_visual_tokens": 128},
                speculation=SHAPES[self.shape],
            )
            yield RecordingEngine(build(config).path)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    heads, kv_heads, pairs_of_head = draw(
        st.sampled_from([(1, 1, 8), (4, 2, 4), (6, 2, 6), (7, 1, 8)])
    )
    height, width = (
        draw(st.integers(0, pairs_of_head // 3)),
        draw(st.integers(0, pairs_of_head // 3)),
    )
    levels = draw(st.integers(0, 2))
    text = {
        "hidden_size": draw(st.sampled_from([24, 40])),
        "num_hidden_layers": draw(st.integers(5, 7)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * pairs_of_head,
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    overrides = {
        "residual": draw(st.sampled_from(["hidden", "normed"])),
        "feedback": draw(st.sampled_from(["pre_norm", "post_norm"])),
        "first_norm": draw(st.sampled_from(["single", "double"])),
        "image_rows": draw(st.sampled_from(["pad", "vision"])),
        "image_rows_rotated": draw(st.booleans()),
        "positions": draw(st.sampled_from(["temporal", "linear", "3d"])),
        "position_shift": draw(st.integers(0, 1)),
        "aux_pre_deepstack": draw(st.booleans()),
    }
    return Pair(
        text=text,
        vision={"deepstack_visual_indexes": list(range(levels))},
        sections=(pairs_of_head - height - width, height, width),
        overrides=overrides,
        engine=draw(st.sampled_from(ENGINES)),
        shape=draw(st.sampled_from(sorted(SHAPES))),
        question=draw(st.integers(0, len(QUESTIONS) - 1)),
        seed=draw(st.integers(0, 10_000)),
    )


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_tiny_pair_passes_on_every_backend(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "_DRAWS", 250)
    some = {name: sampling_check._SETTINGS[name] for name in ("all filters", "penalties")}
    monkeypatch.setattr(sampling_check, "_SETTINGS", some)
    engine = RecordingEngine(build_tiny(tmp_path, engine={"backend": backend}))
    cases = [case for case in bundled_cases("quick", engine, 8) if case.kind != "long"]
    found = Validation(engine).run(cases, 8, *read_sources(engine))
    assert found.diagnosis is None
    assert set(GATES) - found.board.measurements.keys() == set()


def test_pair_of_a_large_vocabulary_passes_by_some_columns_of_its_logits(
    tree_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of every real target: all logits of its verify passes would be too many to keep."""
    monkeypatch.setattr(answers, "_MAX_LOGITS", 1000)
    monkeypatch.setattr(answers, "_KEPT_COLUMNS", 50)
    engine = RecordingEngine(tree_bundle)
    kept = answers.kept_columns(engine)
    assert kept is not None
    assert len(set(kept.tolist())) == 50
    found = inspect(engine, monkeypatch, looks=("batch",))
    assert found.diagnosis is None
    for gate in ("verify.logits", "batch.logits"):
        assert found.board.measurements[gate]
        assert not found.board.failures(gate)


@settings(max_examples=20)
@given(pair=pairs())
def test_random_pairs_pass_every_gate(pair: Pair) -> None:
    with pytest.MonkeyPatch.context() as patch, pair.open() as engine:
        without(patch, "sampling", "batch")
        case = Case("drawn", "drawn", QUESTIONS[pair.question])
        found = Validation(engine).run([case], 16, *read_sources(engine))
    assert found.diagnosis is None
    wanted = {
        "tokens.plain",
        "tokens.speculative",
        "target.layer_steps",
        "draft.logits",
        "draft.proposals",
    }
    assert wanted <= found.board.measurements.keys()
