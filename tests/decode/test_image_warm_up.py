"""Images before the first request: one of every size that patches are padded to, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.families.internvl.random_pair import save_internvl
from tests.families.random_pairs import config_of
from tests.tiny import build_tiny
from trt_eagle3 import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.request.vision_encoder import PatchBuckets
from trt_eagle3.decode.warm_up import image_grid, run_images
from trt_eagle3.engine.runtime.buckets import CAPTURED_AT_RUN
from trt_eagle3.engine.torch.capture.whole import Shapes, shapes_of
from trt_eagle3.pipeline import build


class Towers:
    """Bundles whose vision towers say which shapes they run."""

    def __init__(self) -> None:
        self.runs = Counter[Shapes]()
        self.max_patches = 1 << 20

    def open(self, bundle: LoadedBundle, graph: str, intermediates: Any) -> Any:
        session = open_graph_of(bundle, graph, intermediates)
        if graph == "vision":
            run = session.run

            def counted(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
                if len(inputs["patches"]) > self.max_patches:
                    raise torch.OutOfMemoryError
                self.runs[shapes_of(inputs)] += 1
                return run(inputs)

            session.run = counted  # type: ignore[method-assign]
        return session

    def bundle(self, path: Path) -> LoadedBundle:
        return replace(LoadedBundle.open(path, sessions=self.open), fixed_shapes=True)


def tiny(folder: Path) -> Path:
    return build_tiny(folder, limits={"max_visual_tokens": 100})


def tiles(folder: Path) -> Path:
    save_internvl(folder / "target")
    limits = {"max_visual_tokens": 60, "max_seq_len": 512}
    return build(config_of(folder / "target", None, folder, limits=limits)).path


@pytest.mark.parametrize("make", [tiny, tiles])
def test_images_of_requests_find_their_shapes_captured(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    towers = Towers()
    bundle = towers.bundle(make(tmp_path))
    buckets = bundle.patch_buckets
    assert buckets is not None
    with torch.inference_mode():
        assert run_images(bundle) == len(buckets.sizes) > 1
    ahead = dict(towers.runs)
    assert set(ahead.values()) == {CAPTURED_AT_RUN}
    draw = np.random.default_rng(0)
    with LLM(bundle, prefix_cache=False) as engine:
        for _ in range(12):
            image = Image.new("RGB", tuple(draw.integers(20, 200, 2).tolist()))
            engine.generate("What?", images=[image], max_tokens=1)
    assert sum(towers.runs.values()) >= CAPTURED_AT_RUN * len(ahead) + 12
    assert set(towers.runs) == set(ahead), "a request's image has another shape"
    assert any(towers.runs[shapes] > count for shapes, count in ahead.items())


def test_image_that_memory_does_not_hold_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    towers = Towers()
    bundle = towers.bundle(tiny(tmp_path))
    towers.max_patches = 200
    with torch.inference_mode():
        done = run_images(bundle)
    assert bundle.patch_buckets is not None
    assert done == sum(size <= 200 for size in bundle.patch_buckets.sizes) > 0
    assert "an image of" in caplog.text


def test_no_image_runs_where_no_shape_is_captured(tmp_path: Path) -> None:
    bundle = LoadedBundle.open(tiny(tmp_path))
    assert run_images(bundle) == 0


@pytest.mark.parametrize(("merge", "unit"), [(2, 4), (1, 1), (2, 64)])
def test_every_padded_size_has_an_image(merge: int, unit: int) -> None:
    """So has a limit that is no size others are padded to."""
    for limit in range(unit, 1200, unit):
        buckets = PatchBuckets(limit, unit, lambda rows, _: dict(rows))
        for size in buckets.sizes:
            frames, rows, columns = image_grid(buckets, size, merge)
            assert rows % merge == columns % merge == 0
            assert buckets.size_of(frames * rows * columns) == size
