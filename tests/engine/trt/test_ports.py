"""Which profile of an engine takes a run, and what is said of a run that none takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.graph.test_trt_export import graphs
from tests.tiny import tiny_config
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.trt.ports import Port, choose_profile
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.errors import UserError
from trt_eagle3.families.frames import patch_ranges
from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows

FILE = Path("bundle/vision/rank0.engine")
# 384 patches of 2 x 2 blocks; 16 frames, the power of two above 384 / 64 + 8
MAX_VISUAL_TOKENS = 96
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def vision() -> dict[str, Port]:
    """The inputs of a vision engine, as its profile is."""
    config = tiny_config(limits={"max_visual_tokens": MAX_VISUAL_TOKENS})
    images = patch_ranges(4, config.limits.max_visual_tokens)
    (profile,) = graph_profiles(
        "vision", graphs()["vision"], config.engine, config.limits, TreeSizes(), images
    )
    return {
        name: Port(name, torch.float16, (-1,) * len(low), ((low, high),))
        for name, (low, _, high) in profile.shapes.items()
    }


def shapes_of(*grids: tuple[int, int, int]) -> Shapes:
    """Of the inputs for images of these grids, the patches last."""
    rows = vision_rows(torch.tensor(grids), 2, 8).inputs()
    shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
    return shapes | {"patches": (sum(t * h * w for t, h, w in grids), 1536)}


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 2, 2)],
        [(1, 16, 24)],
        [(14, 2, 2)],
        [(1, 2, 2)] * 16,
        [(6, 8, 8)],
        [(1, 180, 2), (6, 2, 2)],
    ],
)
def test_images_within_the_limits_are_taken(
    vision: dict[str, Port], grids: list[tuple[int, int, int]]
) -> None:
    assert choose_profile(vision, shapes_of(*grids), FILE) == 0


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        ([(1, 16, 26)], f"patches: 416 patches at once, {FILE} was built for up to 384. "),
        (
            [(1, 2, 2)] * 17,
            f"frame_starts: 17 frames (padding included) at once, {FILE} was built for up to 16. ",
        ),
        # too many frames as well
        ([(97, 2, 2)], f"patches: 388 patches at once, {FILE} was built for up to 384. "),
    ],
)
def test_images_beyond_a_limit_are_refused_by_its_name(
    vision: dict[str, Port], grids: list[tuple[int, int, int]], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        choose_profile(vision, shapes_of(*grids), FILE)
    assert str(caught.value) == (
        f"{said}Send fewer or smaller images or fewer frames, or rebuild with a larger "
        "limits.max_visual_tokens."
    )


def test_no_patches_are_refused_with_the_smallest_size(vision: dict[str, Port]) -> None:
    shapes = shapes_of((1, 2, 2)) | {"patches": (0, 1536)}
    with pytest.raises(
        UserError, match=r"patches: \[0, 1536\] is outside .*: \[4, 1536\] to \[384, 1536\]"
    ):
        choose_profile(vision, shapes, FILE)


def steps() -> dict[str, Port]:
    """Inputs of an engine with a profile for decode steps and one for prompts."""
    tokens = Port("inputs_embeds", torch.float16, (-1, -1), (((1, 1), (4, 6)), ((1, 1), (4, 512))))
    pages = Port("page_table", torch.int32, (-1, -1), (((1, 1), (4, 64)),) * 2)
    return {"inputs_embeds": tokens, "page_table": pages}


@pytest.mark.parametrize(("tokens", "profile"), [(6, 0), (7, 1), (512, 1)])
def test_first_profile_that_fits_takes_the_run(tokens: int, profile: int) -> None:
    assert (
        choose_profile(steps(), {"inputs_embeds": (2, tokens), "page_table": (2, 64)}, FILE)
        == profile
    )


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {"inputs_embeds": (2, 7), "page_table": (2, 65)},
            r"page_table: \[2, 65\] is outside .*\[4, 64\]",
        ),
        (
            {"inputs_embeds": (2, 513), "page_table": (2, 64)},
            r"inputs_embeds: \[2, 513\] is outside .*\[4, 512\]",
        ),
    ],
)
def test_input_that_no_profile_takes_is_named(shapes: Shapes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose_profile(steps(), shapes, FILE)
