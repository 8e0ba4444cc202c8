"""A random Qwen2.5-VL pair through the whole program, against transformers, and what its gates
catch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.families.gates import failed, questions, validate_pair
from tests.families.qwen2_5_vl.random_pair import save_qwen25, save_qwen25_draft
from tests.families.random_pairs import config_of
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.families.qwen2_5_vl import prompt, vision_rows
from trt_eagle3.families.registry import read_target
from trt_eagle3.pipeline import build
from trt_eagle3.spec import RopeSpec

ANSWER = SamplingParams(max_tokens=12)
ASKED = questions(24)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and drafts of two producers."""
    folder = tmp_path_factory.mktemp("qwen25")
    model = save_qwen25(folder / "target")
    for producer in ("specforge", "speculators"):
        save_qwen25_draft(folder / producer, model, producer)
    return folder


def built(root: Path, output: Path, draft: str = "specforge", **engine: Any) -> Path:
    sections = {"engine": {"prefill_chunk": 64, **engine}}
    return build(config_of(root / "target", root / draft, output, **sections)).path


@pytest.fixture(scope="module")
def bundle(root: Path) -> Path:
    return built(root, root / "engines")


@torch.no_grad()
def transformers_tokens(root: Path, inputs: Any, grids: dict[str, Tensor]) -> tuple[int, ...]:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(root / "target").eval()
    ids = inputs.token_ids[None]
    kinds = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
    seconds = inputs.grid_seconds[inputs.grid_seconds > 0]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=kinds.int(),
        second_per_grid_ts=seconds if len(seconds) else None,
        max_new_tokens=12,
        do_sample=False,
        **grids,
    )
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("draft", ["specforge", "speculators"])
def test_speculative_equals_autoregressive_equals_transformers(
    backend: str, draft: str, root: Path, tmp_path: Path
) -> None:
    with LLM(built(root, tmp_path, draft, backend=backend)) as engine:
        q = ASKED[1]
        media = {"images": q.images, "videos": q.videos}
        plain = engine.generate(q.prompt, sampling=ANSWER, speculation=False, **media)
        drafted = engine.generate(q.prompt, sampling=ANSWER, **media)
        inputs = engine.prepare(q.prompt, **media)
    assert drafted.token_ids == plain.token_ids
    image = int(inputs.grid_thw[0].prod())
    grids = {
        "pixel_values": inputs.patches[:image],
        "image_grid_thw": inputs.grid_thw[:1],
        "pixel_values_videos": inputs.patches[image:],
        "video_grid_thw": inputs.grid_thw[1:],
    }
    assert plain.token_ids == transformers_tokens(root, inputs, grids)


def test_inspect_names_family_and_rope(root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), str(root / "specforge")])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Qwen2.5-VL, 5 layers" in words
    assert "chunked" in words
    assert "by specforge" in words.lower()


def test_every_gate_holds(bundle: Path) -> None:
    found = validate_pair(bundle, ASKED)
    assert failed(found) == []
    names = ("processor.pixel_values", "processor.position_ids", "vision.embeds", "tokens.plain")
    assert all(found.recorder[name].worst is not None for name in names)


def _windows_not_undone(patch: pytest.MonkeyPatch) -> None:
    true = vision_rows.window_rows

    def rows(*args: Any) -> dict[str, Tensor]:
        made = true(*args)
        return made | {"token_rows": torch.arange(len(made["token_rows"]), dtype=torch.int32)}

    patch.setattr(vision_rows, "window_rows", rows)


def _whole_frames(patch: pytest.MonkeyPatch) -> None:
    true = vision_rows.window_rows

    def rows(*args: Any) -> dict[str, Tensor]:
        made = true(*args)
        return made | {"window_starts": made["frame_starts"]}

    patch.setattr(vision_rows, "window_rows", rows)


def _time_of(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    true = prompt.rope_index

    def index(rows: Tensor, grids: Tensor, steps: Tensor, merge: int) -> tuple[Tensor, int]:
        return true(rows, grids, change(steps), merge)

    patch.setattr(prompt, "rope_index", index)


def _time_rounded(patch: pytest.MonkeyPatch) -> None:
    _time_of(patch, torch.round)


def _time_forgotten(patch: pytest.MonkeyPatch) -> None:
    _time_of(patch, torch.zeros_like)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the order of windows is not undone": (_windows_not_undone, "vision.embeds"),
    "windows see the whole frame": (_whole_frames, "vision.embeds"),
    "the time of a patch is rounded": (_time_rounded, "processor.position_ids"),
    "every frame stands at one time": (_time_forgotten, "processor.position_ids"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_by_its_gate(
    name: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, gate = FAULTS[name]
    plant(monkeypatch)
    assert failed(validate_pair(bundle, ASKED[1:]))[0] == gate


def test_interleaved_sections_are_caught(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL's way of dealing pairs to axes, in graphs that say Qwen2.5-VL's."""
    with monkeypatch.context() as patch:
        interleaved = RopeSpec.plain(16, 1e6, "interleaved", (2, 3, 3)).axis_of_pair
        patch.setattr(RopeSpec, "axis_of_pair", property(lambda _: interleaved))
        bundle = built(root, tmp_path)
    assert failed(validate_pair(bundle, ASKED[1:]))[0] == "target.layer_steps"


def test_memory_counts_every_weight_of_the_tower(root: Path) -> None:
    from trt_eagle3.families.registry import tower_of

    spec = read_target(root / "target")
    visual = [ref for name, ref in spec.tensors.items() if name.startswith("visual.")]
    sizes = tower_of(spec).sizes(spec.require_vision())
    assert sizes.num_values == sum(torch.Size(ref.shape).numel() for ref in visual)
