"""What the user says goes before what the files say; what cannot be said is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_angelslim_draft,
    write_modelopt_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.resolved_fields import EXTENSION
from trt_eagle3.checkpoint.rope_schedule import make_rope
from trt_eagle3.errors import UserError
from trt_eagle3.spec import RopeSpec

FIELDS: dict[str, Any] = {
    "aux_layers": (2, 4, 6),
    "aux_pre_deepstack": False,
    "residual": "normed",
    "first_norm": "double",
    "feedback": "post_norm",
    "rms_norm_eps": 1e-5,
    "image_rows": "vision",
    "image_rows_rotated": False,
    "positions": "linear",
    "position_shift": 1,
    "max_position_embeddings": 77,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_overridden(field: str, tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    plain = read_draft(tmp_path, target_spec())
    changed = read_draft(tmp_path, target_spec(), {field: FIELDS[field]})
    assert getattr(changed, field) == FIELDS[field] != getattr(plain, field)
    assert changed.sources[field].kind == "override"
    assert all(
        getattr(changed, other) == getattr(plain, other) for other in FIELDS if other != field
    )


def test_heads_are_overridden_together(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    manifest = read_draft(
        tmp_path, target_spec(), {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
    )
    assert (
        manifest.num_heads,
        manifest.num_kv_heads,
        manifest.head_dim,
        len(manifest.rope.inv_freq),
    ) == (8, 4, 8, 4)


def test_the_embedding_of_the_target_is_taken(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path)
    manifest = read_draft(tmp_path, target_spec(), {"embedding": "target"})
    assert (manifest.embedding, "embed_tokens.weight" in manifest.tensors) == ("target", False)


def test_the_head_of_the_target_goes_before_a_tie_flag(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path, full_vocab=True, tie_word_embeddings=True)
    manifest = read_draft(tmp_path, target_spec(), {"head": "target"})
    assert (manifest.head, "lm_head.weight" in manifest.tensors) == ("target", False)
    assert manifest.sources["head"].kind == "override"


def test_vision_rows_need_the_targets_width(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, Geometry(hidden=48), embedding=True)
    assert read_draft(tmp_path, target_spec(), {"producer": "modelopt"}).image_rows == "pad"
    with pytest.raises(
        UserError,
        match=r"vision rows are 32 wide, .* is 48\. Set draft\.overrides\.image_rows: pad",
    ):
        read_draft(tmp_path, target_spec(), {"image_rows": "vision"})


def test_the_producer_is_overridden(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    manifest = read_draft(tmp_path, target_spec(), {"producer": "modelopt"})
    assert (manifest.producer, manifest.image_rows) == ("modelopt", "vision")
    write_speculators_draft(tmp_path)
    assert read_draft(tmp_path, target_spec(), {"producer": "modelopt"}).num_heads == 4
    with pytest.raises(UserError, match=r"one of speculators, angelslim, .*'nobody'"):
        read_draft(tmp_path, target_spec(), {"producer": "nobody"})


ROPES: list[tuple[dict[str, Any], RopeSpec]] = [
    ({"base": "5e5"}, RopeSpec.plain(16, 5e5)),  # YAML reads 5e5 as a text
    (
        {"layout": "interleaved", "base": 1e4, "sections": [4, 2, 2]},
        RopeSpec.plain(16, 1e4, "interleaved", (4, 2, 2)),
    ),
    ({"layout": "chunked"}, RopeSpec.plain(16, 5e6, "chunked", (4, 2, 2))),  # the target's sections
    ({"kind": "linear", "factor": 2}, make_rope("linear", 5e6, 16, parameters={"factor": 2.0})),
]


@pytest.mark.parametrize(("rope", "expected"), ROPES)
def test_parts_of_a_rope_are_overridden(
    rope: dict[str, Any], expected: RopeSpec, tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path)
    manifest = read_draft(tmp_path, target_spec(), {"rope": rope})
    assert manifest.rope == expected
    assert manifest.sources["rope"].kind == "override"
    assert manifest.positions == ("temporal" if expected.layout == "1d" else "3d")


def test_rope_of_another_kind_takes_no_number_of_the_configs_own(tmp_path: Path) -> None:
    """A factor means another thing of every kind."""
    write_specforge_draft(tmp_path, rope={"rope_type": "linear", "factor": 8.0})
    assert read_draft(tmp_path, target_spec(), {"rope": {"base": 1e4}}).rope.parameters == {
        "factor": 8.0
    }
    with pytest.raises(UserError, match="needs factor"):
        read_draft(tmp_path, target_spec(), {"rope": {"kind": "dynamic"}})
    found = read_draft(tmp_path, target_spec(), {"rope": {"kind": "dynamic", "factor": 2.0}})
    assert found.rope.parameters == {"factor": 2.0}


def test_a_1d_rope_over_an_mrope_has_no_sections(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    write_angelslim_draft(tmp_path, rope=rope)
    assert read_draft(tmp_path, target_spec(), {"rope": {"layout": "1d"}}).rope == RopeSpec.plain(
        16, 5e6
    )


def test_the_yarn_of_modelopts_exporter_can_be_meant(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path)
    rope = read_draft(tmp_path, target_spec(), {"rope": {"kind": "yarn"}}).rope
    assert (rope.kind, rope.base, rope.parameters["factor"]) == ("yarn", 5e6, 32)


def test_a_whole_rope_overrides_a_config_that_contradicts_itself(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, rope_theta=1e4)
    whole = {"layout": "1d", "kind": "default", "base": 1e6}
    assert read_draft(tmp_path, target_spec(), {"rope": whole}).rope == RopeSpec.plain(16, 1e6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"aux_layer": [1, 3, 4]},
            "draft.overrides.aux_layer: unknown key; nearest known key: aux_layers",
        ),
        ({"rope": {"theta": 1e4}}, "draft.overrides.rope.theta: unknown key; nearest known key: "),
        ({"rope": {"bass": 1e4}}, "nearest known key: base"),
        ({"rope": 1e4}, "expected a mapping of layout, base"),
        ({"rope": {"layout": "2d"}}, "draft.overrides.rope.layout"),
        (
            {"rope": {"sections": [1, 2, 3], "layout": "chunked"}},
            "sum to half of the channels that turn, 8",
        ),
        ({"rope": {"kind": "yarn"}}, "needs factor"),
        ({"aux_layers": [4, 1, 3]}, "expected ascending layer numbers, got [4, 1, 3]"),
        ({"aux_layers": [1, 1, 3]}, "expected ascending"),
        ({"aux_layers": "1,3,4"}, "draft.overrides.aux_layers"),
        ({"aux_layers": [1, 3]}, "fc.weight [32, 96] takes 2 aux states"),
        ({"aux_layers": [1, 3, 9]}, "aux layer 9"),
        (
            {"residual": "norm"},
            "draft.overrides.residual: expected one of 'hidden' or 'normed', got 'norm'",
        ),
        ({"num_layers": 2}, "the tensors decide it"),
        ({"fc_norm": True}, "the tensors decide it"),
        ({"path": "/"}, "the tensors decide it"),
        ({"d2t": "relative"}, "expected one of offset, absolute"),
        ({"embedding": "own"}, "embed_tokens.weight missing"),
        ({"head": "target"}, "draft.overrides.head: target: 24 draft ids need a head of their own"),
        ({"num_heads": 0}, "draft.overrides.num_heads: expected a positive whole number, got 0"),
        ({"position_shift": 2}, "draft.overrides.position_shift: expected 0 or 1, got 2"),
        ({"rms_norm_eps": float("nan")}, "draft.overrides.rms_norm_eps: expected a number from 0"),
        ({"max_position_embeddings": -1}, "draft.overrides.max_position_embeddings: expected 0"),
        ({"rope": {"base": float("nan")}}, "expected a base above 1"),
        ({"rope": {"base": float("inf")}}, "expected a base above 1"),
        ({"rope": {1: 2}}, "draft.overrides.rope.1: unknown key"),
        ({"rope": {"sections": [4, 2, 2]}}, "draft.overrides.rope.sections: a 1d layout has none"),
        (
            {"rope": {"factor": 2}},
            "draft.overrides.rope.factor: rope_type default has no such number",
        ),
    ],
)
def test_an_override_that_does_not_fit_is_refused(
    overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    with pytest.raises(UserError) as caught:
        read_draft(tmp_path, target_spec(), overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_config_keeps_for_us_goes_before_conventions_but_after_the_user(
    tmp_path: Path,
) -> None:
    write_specforge_draft(tmp_path, **{EXTENSION: {"positions": "linear", "position_shift": 0}})
    manifest = read_draft(tmp_path, target_spec(), {"position_shift": 1})
    assert (manifest.positions, manifest.position_shift) == ("linear", 1)
    assert (manifest.sources["positions"].kind, manifest.sources["position_shift"].kind) == (
        "config",
        "override",
    )
    assert json.loads((tmp_path / "config.json").read_text())[EXTENSION]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            {"position": "linear"},
            r"config\.json: trt_eagle3\.position: unknown key; nearest known key: positions",
        ),
        ({"rope": {"base": 1e4}}, r"config\.json: trt_eagle3\.rope: not kept here"),
        ({"positions": "2d"}, r"config\.json: trt_eagle3\.positions: expected one of"),
    ],
)
def test_what_a_config_keeps_for_us_is_checked(
    kept: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_specforge_draft(tmp_path, **{EXTENSION: kept})
    with pytest.raises(UserError, match=message):
        read_draft(tmp_path, target_spec())
