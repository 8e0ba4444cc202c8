"""A converted draft means the same when read back, is bit-exact after a round trip, or is
refused by field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_angelslim_draft,
    write_modelopt_draft,
    write_safeailab_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from trt_eagle3.checkpoint.convert import DESTINATIONS, Layout, convert_draft
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.errors import UserError

SAME_BUT = {"producer", "path", "tensors", "sources", "warnings"}
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Write = Callable[..., Any]


def _meaning(manifest: Eagle3Manifest) -> dict[str, Any]:
    return {f.name: getattr(manifest, f.name) for f in fields(manifest) if f.name not in SAME_BUT}


def _bytes(manifest: Eagle3Manifest) -> dict[str, Any]:
    return {
        name: (ref.dtype, ref.shape, read_tensor(ref).numpy().tobytes())
        for name, ref in manifest.tensors.items()
    }


ALL = frozenset(LAYOUTS)
# Writer, its options, and the layouts that can express it.
SOURCES: dict[str, tuple[Write, dict[str, Any], frozenset[str]]] = {
    "specforge": (write_specforge_draft, {"aux": [1, 3, 4]}, ALL),
    "specforge 3.1": (write_specforge_draft, {"fc_norm": True}, ALL - {"modelopt"}),
    "specforge mrope": (
        write_specforge_draft,
        {"rope": {"rope_type": "mrope", "mrope_section": [4, 2, 2]}},
        frozenset({"specforge"}),
    ),
    "specforge linear": (
        write_specforge_draft,
        {"rope": {"rope_type": "linear", "factor": 2.0}},
        ALL,
    ),
    "specforge, other width": (
        write_specforge_draft,
        {"geometry": Geometry(target_hidden=40), "embedding": True},
        ALL - {"modelopt"},
    ),
    "safeailab": (write_safeailab_draft, {}, ALL - {"modelopt"}),
    "angelslim": (write_angelslim_draft, {}, ALL),
    "speculators": (write_speculators_draft, {"norm_before_residual": False}, ALL - {"modelopt"}),
    "speculators normed": (write_speculators_draft, {"aux": [2, 4, 5]}, frozenset({"speculators"})),
    "speculators qwen3": (
        write_speculators_draft,
        {"layers": 2, "style": "qwen3"},
        frozenset({"speculators"}),
    ),
    "speculators full": (
        write_speculators_draft,
        {"full_vocab": True, "norm_before_residual": False},
        ALL - {"modelopt"},
    ),
    "modelopt": (write_modelopt_draft, {}, ALL),
    "modelopt, two layers": (write_modelopt_draft, {"layers": 2}, ALL - {"specforge"}),
}
OWN = {"specforge": "specforge", "speculators": "speculators", "modelopt": "modelopt"}


def _read(source: str, folder: Path) -> tuple[Eagle3Manifest, Geometry]:
    write, options, _ = SOURCES[source]
    write(folder / "draft", **options)
    geometry = options.get("geometry", Geometry())
    return read_draft(folder / "draft", target_spec(geometry), cache=folder / "cache"), geometry


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_copy_means_the_same_or_is_refused(source: str, to: Layout, tmp_path: Path) -> None:
    manifest, geometry = _read(source, tmp_path)
    if to not in SOURCES[source][2]:
        with pytest.raises(UserError, match=f"the {to} layout cannot express") as caught:
            convert_draft(manifest, tmp_path / "copy", to)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "copy").exists()
        return
    notes = convert_draft(manifest, tmp_path / "copy", to)
    assert any("aux_pre_deepstack" in note for note in notes)
    copy = read_draft(tmp_path / "copy", target_spec(geometry))
    assert _meaning(copy) == _meaning(manifest)
    weights = _bytes(manifest)
    assert {name: part for name, part in _bytes(copy).items() if name in weights} == weights
    assert not [entry for entry in tmp_path.iterdir() if ".partial-" in entry.name]


@pytest.mark.parametrize(
    ("source", "via"),
    [("specforge", to) for to in ("speculators", "modelopt", "tensorrt-llm")]
    + [("specforge 3.1", "speculators"), ("modelopt, two layers", "speculators")],
)
def test_a_round_trip_is_bit_exact(source: str, via: Layout, tmp_path: Path) -> None:
    manifest, _ = _read(source, tmp_path)
    own: Any = OWN[manifest.producer]
    convert_draft(manifest, tmp_path / "there", via)
    convert_draft(read_draft(tmp_path / "there", target_spec()), tmp_path / "back", own)
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("draft", "back"))
    assert first.keys() == last.keys()
    assert all(first[n].dtype == last[n].dtype and (first[n] == last[n]).all() for n in first)


@pytest.mark.parametrize("to", LAYOUTS)
def test_a_whole_vocabulary_in_another_order_keeps_its_map(to: Layout, tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path / "draft", Geometry(draft_vocab=96))
    file = tmp_path / "draft" / "model.safetensors"
    moved = torch.arange(96).roll(1) - torch.arange(96)
    save_file(load_file(file) | {"d2t": moved}, file)
    convert_draft(read_draft(tmp_path / "draft", target_spec()), tmp_path / "copy", to)
    assert torch.equal(load_file(tmp_path / "copy" / "model.safetensors")["d2t"], moved)


@given(
    layers=st.integers(1, 3),
    qk=st.booleans(),
    post=st.booleans(),
    normed=st.booleans(),
    bias=st.booleans(),
)
def test_speculators_copies_of_speculators_drafts_are_equal(
    layers: int, qk: bool, post: bool, normed: bool, bias: bool
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_speculators_draft(
            folder / "draft",
            layers=layers,
            style="qwen3" if qk else "llama",
            attention_bias=bias,
            norm_output=post,
            norm_before_residual=normed,
            aux=[2, 5, 8],
        )
        manifest = read_draft(folder / "draft", target_spec())
        convert_draft(manifest, folder / "copy", "speculators")
        copy = read_draft(folder / "copy", target_spec())
        assert _meaning(copy) == _meaning(manifest)
        assert _bytes(copy) == _bytes(manifest)


def test_ids_and_norms_are_written_as_each_server_reads_them(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path / "draft", fc_norm=True, aux=[1, 3, 4])
    manifest = read_draft(tmp_path / "draft", target_spec())
    configs = {}
    for to in ("specforge", "speculators", "tensorrt-llm"):
        convert_draft(manifest, tmp_path / to, to)  # type: ignore[arg-type]
        configs[to] = json.loads((tmp_path / to / "config.json").read_text())
    assert configs["specforge"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert configs["speculators"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert "norm_output" not in configs["specforge"]  # sglang would feed back normed features
    assert configs["speculators"]["norm_output"] is False
    assert configs["tensorrt-llm"]["eagle_config"]["return_hidden_post_norm"] is False
    assert (
        "eagle3_layers_to_capture: [1, 3, 4]"
        in (tmp_path / "tensorrt-llm" / "speculative_config.yaml").read_text()
    )


REFUSED: dict[str, tuple[Write, dict[str, Any], dict[str, Any], Layout, str]] = {
    "residual": (write_speculators_draft, {}, {}, "tensorrt-llm", "residual 'normed'"),
    "double norm": (
        write_modelopt_draft,
        {},
        {"first_norm": "double"},
        "modelopt",
        "first_norm 'double'",
    ),
    "feedback": (
        write_specforge_draft,
        {},
        {"feedback": "post_norm"},
        "specforge",
        "feedback 'post_norm'",
    ),
    "qk_norm": (
        write_speculators_draft,
        {"style": "qwen3"},
        {"residual": "hidden"},
        "modelopt",
        "qk_norm True",
    ),
    "layers": (write_modelopt_draft, {"layers": 2}, {}, "specforge", "num_layers 2"),
    "interleaved": (
        write_angelslim_draft,
        {"rope": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
        {},
        "specforge",
        "rope.layout 'interleaved'",
    ),
    "three states only": (
        write_modelopt_draft,
        {"geometry": Geometry(num_aux=2), "aux": [1, 2]},
        {},
        "specforge",
        "2 aux layers",
    ),
    "an injected yarn": (
        write_modelopt_draft,
        {},
        {"rope": {"kind": "yarn"}},
        "modelopt",
        "rope RopeSpec.*read back",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_cannot_say_is_refused(case: str, tmp_path: Path) -> None:
    write, options, overrides, to, message = REFUSED[case]
    write(tmp_path / "draft", **options)
    manifest = read_draft(tmp_path / "draft", target_spec(), overrides)
    with pytest.raises(UserError, match=f"the {to} layout cannot express {message}") as caught:
        convert_draft(manifest, tmp_path / "copy", to)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    with pytest.raises(UserError, match=r"exists\. Name a new folder"):
        convert_draft(read_draft(tmp_path, target_spec()), tmp_path, "specforge")


def _verifier(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    verifier: dict[str, Any] = found["speculators_config"]["verifier"]
    return verifier


def test_speculators_layout_names_the_target_that_is_given(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path / "draft", aux=[1, 3, 4])
    manifest = read_draft(tmp_path / "draft", target_spec())
    architecture = "Qwen3_5ForConditionalGeneration"
    notes = convert_draft(manifest, tmp_path / "new", "speculators", architecture)
    assert _verifier(tmp_path / "new") == {"architectures": [architecture], "name_or_path": None}
    assert not [note for note in notes if note.startswith("verifier")]


def test_speculators_layout_names_the_target_of_a_speculators_draft(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path / "draft", aux=[2, 5, 8])
    file = tmp_path / "draft/config.json"
    config = json.loads(file.read_text())
    named = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}
    config["speculators_config"]["verifier"] = named
    file.write_text(json.dumps(config))
    convert_draft(read_draft(tmp_path / "draft", target_spec()), tmp_path / "new", "speculators")
    assert _verifier(tmp_path / "new") == named


def test_speculators_layout_of_an_unknown_target_names_none_and_says_so(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path / "draft", aux=[1, 3, 4])
    manifest = read_draft(tmp_path / "draft", target_spec())
    *_, note = convert_draft(manifest, tmp_path / "new", "speculators")
    assert _verifier(tmp_path / "new")["architectures"] == []
    assert note.startswith("verifier: the draft's config names no target")


def test_the_folder_one_stands_in_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_specforge_draft(tmp_path / "draft", aux=[1, 3, 4])
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    convert_draft(read_draft(tmp_path / "draft", None), Path(), "specforge")
    assert read_draft(tmp_path / "new", None).producer == "specforge"


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path)
    with pytest.raises(UserError, match="layout 'sglang': expected one of specforge, speculators"):
        convert_draft(read_draft(tmp_path, target_spec()), tmp_path / "copy", "sglang")


def test_every_layout_is_offered() -> None:
    assert tuple(DESTINATIONS) == LAYOUTS
