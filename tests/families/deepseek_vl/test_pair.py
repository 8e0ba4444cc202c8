"""Random DeepSeek-VLs, with one tower and with two, through the whole program, against
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.families.deepseek_vl.random_pair import (
    FAMILIES,
    HYBRID,
    save_deepseek,
    save_deepseek_draft,
)
from tests.families.deepseek_vl.test_reader import copied, older, published
from tests.families.gates import failed, validate_pair
from tests.families.random_pairs import DRAFTS, config_of
from tests.families.test_readers import changed
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.deepseek_vl_hybrid import vision_graph
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.multimodal import squares
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

ANSWER = SamplingParams(max_tokens=12, ignore_eos=True)
ASKED = [
    Question("What is this?", [draw_image(1, (72, 100))]),
    Question("What changed?", [draw_image(2, (40, 24)), draw_image(3, (300, 11))]),
    Question("What is 12 plus 30?"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of each family and its drafts of two producers."""
    folder = tmp_path_factory.mktemp("deepseek")
    for family in FAMILIES:
        model = save_deepseek(folder / family / "target", family)
        for producer in DRAFTS:
            save_deepseek_draft(folder / family / producer, model, producer)
        older_config = changed(folder / family / "target", folder / family / "older", older)
        copied(older_config, folder / family / "published", published)
    return folder


def built(root: Path, output: Path, draft: str = "specforge", **engine: Any) -> Path:
    engine = {"prefill_chunk": 64, **engine}
    return build(config_of(root / "target", root / draft, output, engine=engine)).path


@pytest.mark.parametrize(
    ("backend", "layout", "draft"),
    [("onnxruntime", "target", "specforge"), ("torch", "published", "speculators")],
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_speculative_equals_autoregressive_equals_transformers(
    family: str, backend: str, layout: str, draft: str, root: Path, tmp_path: Path
) -> None:
    q, engine = ASKED[1], {"prefill_chunk": 64, "backend": backend}
    pair = config_of(root / family / layout, root / family / draft, tmp_path, engine=engine)
    with LLM(build(pair).path) as llm:
        plain = llm.generate(q.prompt, images=q.images, sampling=ANSWER, speculation=False)
        drafted = llm.generate(q.prompt, images=q.images, sampling=ANSWER)
    assert drafted.token_ids == plain.token_ids
    assert len(set(plain.token_ids)) > 3, "an answer that repeats itself shows little"
    folder = root / family / "target"
    model = FAMILIES[family].from_pretrained(folder).eval()
    spec = read_target(folder)
    reference = load_reference(spec, torch.float32, "cpu")
    theirs = family_of(spec).processor_reference(
        folder, reference, family_of(spec).processor(folder, spec)
    )
    prepared: Any = theirs._processor  # type: ignore[attr-defined]
    content = [{"type": "image"}] * 2 + [{"type": "text", "text": q.prompt}]
    messages = [{"role": "user", "content": content}]
    text = prepared.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = prepared(text=[text], images=q.images, return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    out = model.generate(**inputs, **options)
    assert plain.token_ids == tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gate_holds(family: str, root: Path, tmp_path: Path) -> None:
    found = validate_pair(built(root / family, tmp_path), ASKED)
    assert failed(found) == []
    names = ("processor.pixel_values", "processor.token_ids", "vision.embeds", "tokens.plain")
    assert all(found.recorder[name].worst is not None for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_names_family_and_producer(family: str, root: Path) -> None:
    paths = [str(root / family / name) for name in ("target", "speculators")]
    result = CliRunner().invoke(cli, ["inspect", *paths])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "DeepSeek-VL" in words
    assert "5 layers" in words
    assert "by speculators" in words.lower()


@pytest.mark.parametrize("family", FAMILIES)
def test_tensorrt_bundle_is_exported(family: str, root: Path, tmp_path: Path) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    script = (built(root / family, tmp_path, **engine) / "build_engine.sh").read_text()
    assert "vision" in script


def test_video_is_refused_in_one_line(root: Path) -> None:
    spec = read_target(root / "deepseek_vl" / "target")
    processor = family_of(spec).processor(spec.path, spec)
    with pytest.raises(UserError, match="reads text and images, it takes no videos") as caught:
        processor.prompt("What moves?", videos=[[draw_image(1)]])
    assert "\n" not in str(caught.value)


def _without_ones(patch: pytest.MonkeyPatch) -> None:
    true = vision_graph._own_places
    patch.setattr(vision_graph, "_own_places", lambda *args: np.zeros_like(true(*args)))


def _corners_aligned(patch: pytest.MonkeyPatch) -> None:
    def weights(old: int, new: int) -> Any:
        place = np.arange(new) * (old - 1) / (new - 1)
        return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(old))).astype(np.float32)

    patch.setattr(vision_graph, "_bilinear", weights)


def _no_early_block(patch: pytest.MonkeyPatch) -> None:
    true = GraphBuilder.op

    def op(self: GraphBuilder, op_type: str, *inputs: Any, name: str = "", **options: Any) -> Any:
        dropped = name == "features"
        return inputs[0] if dropped else true(self, op_type, *inputs, name=name, **options)

    patch.setattr(GraphBuilder, "op", op)


FAULTS = {
    "no relative positions": _without_ones,
    "bilinear with its corners aligned": _corners_aligned,
    "the early block is dropped": _no_early_block,
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_the_graph_of_two_towers_is_caught(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        FAULTS[name](patch)
        bundle = built(root / HYBRID, tmp_path)
    assert failed(validate_pair(bundle, ASKED[:1]))[0] == "vision.embeds"


def test_small_square_made_of_the_image_itself_is_caught(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller square is resized from the larger one, not from the image."""
    bundle, true = built(root / HYBRID, tmp_path), squares._squared
    images: list[Any] = []

    def squared(image: Any, *args: Any) -> Any:
        images.append(image)
        return true(images[-1 - (len(images) % 2 == 0)], *args)

    monkeypatch.setattr(squares, "_squared", squared)
    assert failed(validate_pair(bundle, ASKED[:1]))[0] == "processor.pixel_values"
