"""No false alarm: random geometries, weights, drafts and prompts pass every check, on every
backend and type here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.decode.bundle import config_of, save_pair
from tests.parity.conftest import ask_few_options, inspect, without
from tests.tiny import build_tiny
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.record import answers, options
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case, bundled_cases, draw_image
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.run import Validation
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

SHAPES = {
    "chain": {"mode": "chain", "steps": 4},
    "tree": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 9},
    "dynamic": {"mode": "dynamic", "steps": 3, "topk": 2, "num_draft_tokens": 6},
}
ENGINES = [
    {"backend": "onnxruntime"},
    {"backend": "torch"},
    {"backend": "torch", "dtype": "bfloat16"},
    {"backend": "torch", "dtype": "float16"},
]
FRAMES = [draw_image(40 + step, (64, 96)) for step in range(3)]
QUESTIONS = (
    Question("Why is the sky blue?"),
    Question("Что это? \U0001f30a", [draw_image(30, (70, 90))]),
    Question("What changed?", [draw_image(31), draw_image(32, (64, 192))]),
    Question("Describe the video.", videos=[FRAMES]),
    Question("Both.", [draw_image(33, (33, 40))], [FRAMES]),
)


@dataclass(frozen=True)
class Pair:
    """What ``draw`` makes; ``open`` builds the bundle of it."""

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


HEADS = [
    (1, 1, 8),
    (4, 2, 4),
    (6, 2, 6),
    (7, 1, 8),
]  # query heads, key/value heads, pairs of a head
OVERRIDES: dict[str, list[Any]] = {
    "residual": ["hidden", "normed"],
    "feedback": ["pre_norm", "post_norm"],
    "first_norm": ["single", "double"],
    "image_rows": ["pad", "vision"],
    "image_rows_rotated": [False, True],
    "positions": ["temporal", "linear", "3d"],
    "position_shift": [0, 1],
    "aux_pre_deepstack": [False, True],
}


def draw(number: int) -> Pair:
    """The ``number``-th pair: engines, shapes, questions, heads take turns; the rest is random."""
    random = Random(number)
    heads, kv_heads, pairs_of_head = HEADS[number % len(HEADS)]
    height, width = (random.randint(0, pairs_of_head // 3) for _ in range(2))
    text = {
        "hidden_size": random.choice([24, 40]),
        "num_hidden_layers": random.randint(5, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * pairs_of_head,
        "attention_bias": random.choice([False, True]),
        "tie_word_embeddings": random.choice([False, True]),
    }
    return Pair(
        text=text,
        vision={"deepstack_visual_indexes": list(range(random.randint(0, 2)))},
        sections=(pairs_of_head - height - width, height, width),
        overrides={name: random.choice(values) for name, values in OVERRIDES.items()},
        engine=ENGINES[number % len(ENGINES)],
        shape=sorted(SHAPES)[number % len(SHAPES)],
        question=(number + number // len(QUESTIONS)) % len(QUESTIONS),
        seed=number,
    )


PAIRS = [draw(number) for number in range(8)]


def test_tiny_pair_passes_every_check_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ONNX Runtime: ``test_faults_service.py``."""
    monkeypatch.setattr(sampling_check, "_DRAWS", 250)
    monkeypatch.setattr(options, "NUM_CASES", 1)
    ask_few_options(monkeypatch)
    some = {name: sampling_check._SETTINGS[name] for name in ("all filters", "penalties")}
    monkeypatch.setattr(sampling_check, "_SETTINGS", some)
    engine = RecordingEngine(build_tiny(tmp_path, engine={"backend": "torch"}))
    kinds = {case.kind: case for case in bundled_cases("quick", engine, 8)}
    cases = [case for kind, case in kinds.items() if kind != "long"]
    found = Validation(engine).run(cases, 8, *read_sources(engine))
    assert found.diagnosis is None
    absent = ["weights.values", "weights.made", "kv.rows", "kv.attention"]
    absent += [f"draft.{name}" for name in ("context", "scores", "confidence", "tokens")]
    statuses = {name: m.status for name, m in found.recorder.items()}
    assert statuses == {
        **dict.fromkeys(CHECKS, "passed"),
        **dict.fromkeys(absent, "not_applicable"),
    }


def test_pair_of_a_large_vocabulary_passes_by_some_columns_of_its_logits(
    tree_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of every real target: all logits of its verify forwards would be too many to keep."""
    monkeypatch.setattr(answers, "_MAX_LOGITS", 1000)
    monkeypatch.setattr(answers, "_KEPT_COLUMNS", 50)
    engine = RecordingEngine(tree_bundle)
    kept = answers.kept_columns(engine)
    assert kept is not None
    assert len(set(kept.tolist())) == 50
    found = inspect(engine, monkeypatch, looks=("batch",))
    assert found.diagnosis is None
    for check in ("verify.logits", "batch.logits"):
        assert found.recorder[check].taken
        assert not found.recorder[check].failures


def test_random_pairs_hold_every_choice() -> None:
    for name, values in OVERRIDES.items():
        assert all(any(pair.overrides[name] == value for pair in PAIRS) for value in values), name
    assert all(any(pair.engine == engine for pair in PAIRS) for engine in ENGINES)
    assert {pair.shape for pair in PAIRS} == set(SHAPES)
    assert {pair.question for pair in PAIRS} == set(range(len(QUESTIONS)))
    assert {len(pair.vision["deepstack_visual_indexes"]) for pair in PAIRS} == {0, 1, 2}
    for name in ("attention_bias", "tie_word_embeddings"):
        assert {pair.text[name] for pair in PAIRS} == {False, True}


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_random_pair_passes_every_check(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of options take turns."""
    pair = PAIRS[number]
    with pair.open() as engine:
        sets = list(options.option_sets(engine.processor.end_token_ids, engine.processor.tokenizer))
        ask_few_options(monkeypatch, sets[number :: len(PAIRS)])
        case = Case("drawn", "drawn", QUESTIONS[pair.question])
        check = Validation(engine, left_out=without("sampling", "batch"))
        found = check.run([case], 16, *read_sources(engine))
    assert found.diagnosis is None
    wanted = {
        "tokens.plain",
        "tokens.speculative",
        "target.layer_steps",
        "draft.logits",
        "draft.proposals",
    }
    assert all(found.recorder[check].taken for check in wanted)
