"""What may be ambiguous, and interpretations as changes to a manifest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.probe.conftest import Asked
from trt_eagle3.checkpoint.rope_schedule import make_rope
from trt_eagle3.probe.interpretation import Interpretation, alternatives, candidate_layers
from trt_eagle3.spec import RopeSpec


def values(asked: Asked, factor: str, **fields: Any) -> list[dict[str, Any]]:
    """The values of a factor other than the manifest's own."""
    manifest = replace(asked.manifest, **fields)
    changes = alternatives(manifest, asked.bundle.spec).get(factor, [])
    return [
        dict(r.changes)
        for change in changes
        if (r := Interpretation().changed(change, manifest)).changes
    ]


def test_aux_layers_out_of_range_are_no_readings(tiny: Asked) -> None:
    assert {v["aux_layers"] for v in values(tiny, "aux offset", aux_layers=(0, 3, 7))} == {
        (1, 3, 4),
        (2, 4, 5),
    }


def test_layers_to_tap_are_those_of_every_reading(tiny: Asked) -> None:
    assert candidate_layers(tiny.manifest, tiny.bundle.spec) == (0, 1, 2, 3, 4, 5)


def test_deepstack_is_no_question_where_no_reading_takes_such_a_layer(tiny: Asked) -> None:
    spec = tiny.bundle.spec
    spec = replace(spec, layers=tuple(replace(x, visual_level=None) for x in spec.layers))
    assert "deepstack" not in alternatives(tiny.manifest, spec)


def test_vision_rows_need_a_draft_as_wide_as_its_target(tiny: Asked) -> None:
    assert len(values(tiny, "image rows")) == 2
    assert values(tiny, "image rows", hidden_size=128) == []


def test_layouts_need_sections_that_fit_the_head(tiny: Asked) -> None:
    assert [v["rope.layout"] for v in values(tiny, "rope layout")] == ["chunked", "interleaved"]
    assert values(tiny, "rope layout", head_dim=32) == []


def test_another_base_makes_a_plain_schedule_and_keeps_the_layout(tiny: Asked) -> None:
    rope = make_rope(
        "yarn", 1e4, 64, layout="chunked", sections=(12, 10, 10),
        parameters={"factor": 32, "original_max_position_embeddings": 2048},
    )  # fmt: skip
    manifest = replace(tiny.manifest, rope=rope)
    read = (
        Interpretation()
        .changed({"rope.kind": "default", "rope.base": 5e6}, manifest)
        .apply(manifest)
    )
    assert read.rope == RopeSpec.plain(64, 5e6, "chunked", (12, 10, 10))


def test_another_layout_keeps_the_frequencies(tiny: Asked) -> None:
    change = {"rope.layout": "chunked", "rope.sections": (12, 10, 10)}
    read = Interpretation().changed(change, tiny.manifest).apply(tiny.manifest)
    assert read.rope.inv_freq == tiny.manifest.rope.inv_freq
    assert read.rope.layout == "chunked"


def test_a_change_back_leaves_no_change(tiny: Asked) -> None:
    there = Interpretation().changed(
        {"image_rows": "vision", "image_rows_rotated": False}, tiny.manifest
    )
    assert there.changed({"image_rows": "pad"}, tiny.manifest) == Interpretation()


def test_changes_are_the_same_in_any_order(tiny: Asked) -> None:
    a, b = {"residual": "normed"}, {"feedback": "post_norm"}
    one = Interpretation().changed(a, tiny.manifest).changed(b, tiny.manifest)
    assert one == Interpretation().changed(b, tiny.manifest).changed(a, tiny.manifest)


@pytest.mark.parametrize("positions", ["3d", "temporal", "linear"])
def test_positions_always_have_another_reading(positions: str, tiny: Asked) -> None:
    assert len(values(tiny, "positions", positions=positions)) == 1
