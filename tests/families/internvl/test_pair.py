"""A random InternVL pair through the whole program, against transformers, and what its gates
catch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import InternVLForConditionalGeneration

from tests.families.gates import failed, questions, validate_pair
from tests.families.internvl.random_pair import save_internvl, save_internvl_draft
from tests.families.random_pairs import config_of
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.internvl import vision_rows
from trt_eagle3.families.internvl.reference import tiles_from_patches
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.multimodal import patches as patches_module
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.pipeline import build

ANSWER = SamplingParams(max_tokens=12)
ASKED = questions(24)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and drafts of two producers."""
    folder = tmp_path_factory.mktemp("internvl")
    model = save_internvl(folder / "target")
    for producer in ("specforge", "speculators"):
        save_internvl_draft(folder / producer, model, producer)
    return folder


def built(root: Path, output: Path, draft: str = "specforge", **sections: Any) -> Path:
    engine = {"prefill_chunk": 64, **sections.pop("engine", {})}
    config = config_of(root / "target", root / draft, output, engine=engine, **sections)
    return build(config).path


@pytest.fixture(scope="module")
def bundle(root: Path) -> Path:
    return built(root, root / "engines")


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("draft", ["specforge", "speculators"])
@torch.no_grad()
def test_speculative_equals_autoregressive_equals_transformers(
    backend: str, draft: str, root: Path, tmp_path: Path
) -> None:
    with LLM(built(root, tmp_path, draft, engine={"backend": backend})) as engine:
        q = ASKED[1]
        media = {"images": q.images, "videos": q.videos}
        plain = engine.generate(q.prompt, sampling=ANSWER, speculation=False, **media)
        drafted = engine.generate(q.prompt, sampling=ANSWER, **media)
        inputs = engine.prepare(q.prompt, **media)
    assert drafted.token_ids == plain.token_ids
    model = InternVLForConditionalGeneration.from_pretrained(root / "target").eval()
    ids = inputs.token_ids[None]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=tiles_from_patches(
            inputs.patches, inputs.grid_thw, model.config.vision_config, 2
        ),
        max_new_tokens=12,
        do_sample=False,
    )
    assert plain.token_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_inspect_names_the_family(root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), str(root / "speculators")])
    assert result.exit_code == 0, result.output
    assert "InternVL, 5 layers" in " ".join(result.output.split())


def test_every_gate_holds(bundle: Path) -> None:
    found = validate_pair(bundle, ASKED)
    assert failed(found) == []
    names = ("processor.pixel_values", "processor.position_ids", "vision.embeds", "tokens.plain")
    assert all(found.recorder[name].worst is not None for name in names)


def test_tiles_beyond_the_limit_are_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    limits = {"max_seq_len": 512, "max_visual_tokens": 30}
    with LLM(built(root, tmp_path, limits=limits)) as engine:
        one = engine.prepare("What?", images=[draw_image(1, (24, 24))])
        assert int(one.visual_rows.sum()) == 9
        with pytest.raises(UserError, match="45 visual tokens, this bundle takes 30") as caught:
            engine.generate("What?", images=[draw_image(1, (48, 48))], sampling=ANSWER)
    assert "\n" not in str(caught.value)


def _columns_first(patch: pytest.MonkeyPatch) -> None:
    """What a pixel shuffle with its axes swapped joins: a token's patches column by column."""

    def order(h: int, w: int, merge: int) -> Tensor:
        index = torch.arange(h * w).view(h // merge, merge, w // merge, merge)
        return index.permute(0, 2, 3, 1).reshape(-1)

    patch.setattr(vision_rows, "merge_order", order)
    vision_rows._one_tile.cache_clear()


def _thumbnail_first(patch: pytest.MonkeyPatch) -> None:
    true = patches_module.tile_patches

    def tiles(*args: Any) -> Any:
        pixels, grid = true(*args)
        rolled = np.roll(pixels.reshape(grid[0], -1), 1, axis=0) if grid[0] > 1 else pixels
        return rolled.reshape(pixels.shape), grid

    patch.setattr(patches_module, "tile_patches", tiles)


def _no_thumbnail(patch: pytest.MonkeyPatch) -> None:
    true = patches_module.tile_patches

    def tiles(*args: Any) -> Any:
        pixels, (count, rows, columns) = true(*args)
        kept = count - (count > 1)
        return pixels[: kept * rows * columns], (kept, rows, columns)

    patch.setattr(patches_module, "tile_patches", tiles)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "pixel shuffle with its axes swapped": (_columns_first, "vision.embeds"),
    "the thumbnail comes first": (_thumbnail_first, "processor.pixel_values"),
    "there is no thumbnail": (_no_thumbnail, "processor.token_ids"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_by_its_gate(
    name: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, gate = FAULTS[name]
    plant(monkeypatch)
    try:
        assert failed(validate_pair(bundle, ASKED[:1]))[0] == gate
    finally:
        vision_rows._one_tile.cache_clear()


@pytest.mark.parametrize("dropped", ["attn_scaled", "mlp_scaled"])
def test_dropped_layer_scale_is_caught(
    dropped: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = GraphBuilder.op

    def op(self: GraphBuilder, op_type: str, *inputs: Any, name: str = "", **options: Any) -> Any:
        return inputs[0] if name == dropped else true(self, op_type, *inputs, name=name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(GraphBuilder, "op", op)
        bundle = built(root, tmp_path)
    assert failed(validate_pair(bundle, ASKED[:1]))[0] == "vision.embeds"


def test_memory_counts_every_weight_of_the_tower(root: Path) -> None:
    spec = read_target(root / "target")
    visual = [ref for name, ref in spec.tensors.items() if name.startswith("visual.")]
    sizes = tower_of(spec).sizes(spec.require_vision())
    assert sizes.num_values == sum(torch.Size(ref.shape).numel() for ref in visual)
    assert sizes.patches_per_unit == 36
