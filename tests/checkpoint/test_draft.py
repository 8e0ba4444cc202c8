"""Every producer's files are recognised and mean what its training code computes; each field
says where it is from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.drafts import (
    Geometry,
    target_spec,
    write_angelslim_draft,
    write_generic_draft,
    write_modelopt_draft,
    write_safeailab_draft,
    write_specforge_draft,
    write_speculators_draft,
)
from tests.tiny import TARGET
from trt_eagle3.checkpoint.draft import describe_draft, read_draft
from trt_eagle3.checkpoint.manifest import (
    Eagle3Manifest,
    Source,
    manifest_to_dict,
)
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.drafts.registry import manifest_from_dict
from trt_eagle3.spec import RopeSpec

MROPE = {"rope_type": "mrope", "mrope_section": [4, 2, 2]}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Write = Callable[..., Any]

# What a draft of each kind is, beyond what they all share: writer, its options, and the fields that
# must come out.
KINDS: dict[str, tuple[Write, dict[str, Any], dict[str, Any]]] = {
    "specforge": (
        write_specforge_draft,
        {"aux": [1, 3, 4]},
        {"producer": "specforge", "positions": "temporal"},
    ),
    "specforge, old spelling": (
        write_specforge_draft,
        {"spelling": "old"},
        {"producer": "specforge"},
    ),
    "specforge, new spelling": (
        write_specforge_draft,
        {"spelling": "new"},
        {"producer": "specforge"},
    ),
    "specforge 3.1": (
        write_specforge_draft,
        {"fc_norm": True},
        {"fc_norm": True, "feedback": "pre_norm"},
    ),
    "specforge, embedding": (write_specforge_draft, {"embedding": True}, {"embedding": "own"}),
    "specforge mrope": (
        write_specforge_draft,
        {"rope": MROPE},
        {
            "rope": RopeSpec.plain(16, 5e6, "chunked", (4, 2, 2)),
            "positions": "3d",
            "position_shift": 1,
        },
    ),
    "specforge, sections beside default": (
        write_specforge_draft,
        {"rope": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        {"rope": RopeSpec.plain(16, 5e6), "positions": "temporal"},
    ),
    "specforge PR 431": (
        write_specforge_draft,
        {"rope": INTERLEAVED, "spelling": "old", "aux": [3, 4, 5]},
        {
            "rope": RopeSpec.plain(16, 1e4, "chunked", (4, 2, 2)),
            "aux_layers": (3, 4, 5),
            "positions": "3d",
        },
    ),
    "safeailab": (
        write_safeailab_draft,
        {},
        {
            "producer": "safeailab",
            "rope": RopeSpec.plain(8, 1e4),
            "embedding": "own",
            "head_dim": 8,
            "aux_pre_deepstack": False,
            "positions": "linear",
        },
    ),
    "safeailab, safetensors": (write_safeailab_draft, {"binary": False}, {"producer": "safeailab"}),
    "safeailab, rope_theta": (
        write_safeailab_draft,
        {"rope_theta": 1e6},
        {"rope": RopeSpec.plain(8, 1e6)},
    ),
    "angelslim": (
        write_angelslim_draft,
        {},
        {
            "producer": "angelslim",
            "rope": RopeSpec.plain(16, 1e4),
            "head": "own",
            "positions": "temporal",
        },
    ),
    "angelslim mrope": (
        write_angelslim_draft,
        {"rope": {"type": "default", **INTERLEAVED}},
        {
            "rope": RopeSpec.plain(16, 5e6, "interleaved", (4, 2, 2)),
            "positions": "3d",
            "position_shift": 0,
        },
    ),
    "angelslim mrope, new spelling": (
        write_angelslim_draft,
        {"rope": INTERLEAVED, "spelling": "new"},
        {"rope": RopeSpec.plain(16, 5e6, "interleaved", (4, 2, 2))},
    ),
    "angelslim ids": (
        write_angelslim_draft,
        {"aux_hidden_states_layer_ids": [0, 2, 6]},
        {"aux_layers": (0, 2, 6)},
    ),
    "speculators": (
        write_speculators_draft,
        {"aux": [2, 4, 5]},
        {
            "producer": "speculators",
            "residual": "normed",
            "position_shift": 1,
            "positions": "linear",
            "embedding": "own",
            "aux_pre_deepstack": False,
        },
    ),
    "speculators, null ids": (write_speculators_draft, {}, {"aux_layers": (1, 3, 4)}),
    "speculators, three qwen3 layers": (
        write_speculators_draft,
        {"layers": 3, "style": "qwen3"},
        {"num_layers": 3, "qk_norm": True},
    ),
    "speculators 3.1": (
        write_speculators_draft,
        {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
        {"fc_norm": True, "feedback": "post_norm", "residual": "hidden"},
    ),
    "speculators, norm before fc": (
        write_speculators_draft,
        {"norm_before_fc": True},
        {"norm_before_fc": True},
    ),
    "speculators, no norm_before_residual": (
        write_speculators_draft,
        {"norm_before_residual": "absent"},
        {"residual": "normed"},
    ),
    "speculators, biases": (
        write_speculators_draft,
        {"attention_bias": True},
        {"attention_bias": True},
    ),
    "speculators, full vocabulary": (
        write_speculators_draft,
        {"full_vocab": True},
        {"draft_vocab_size": 96},
    ),
    "modelopt": (
        write_modelopt_draft,
        {},
        {
            "producer": "modelopt",
            "rope": RopeSpec.plain(16, 5e6),
            "image_rows": "vision",
            "first_norm": "single",
            "positions": "linear",
        },
    ),
    "modelopt, two layers": (write_modelopt_draft, {"layers": 2}, {"num_layers": 2}),
    "modelopt, full vocabulary": (
        write_modelopt_draft,
        {"full_vocab": True},
        {"draft_vocab_size": 96},
    ),
    "modelopt, ids of states": (
        write_modelopt_draft,
        {"aux": [4, 6, 8]},
        {"aux_layers": (3, 5, 7)},
    ),
    "generic": (write_generic_draft, {}, {"producer": "generic", "rope": RopeSpec.plain(16, 5e6)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_means_what_its_producer_computes(kind: str, tmp_path: Path) -> None:
    write, options, expected = KINDS[kind]
    weights = write(tmp_path / "draft", **options)
    manifest = read_draft(tmp_path / "draft", target_spec(), cache=tmp_path / "cache")
    defaults = {
        "aux_layers": (1, 3, 4),
        "hidden_size": 32,
        "target_hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    for field, value in {**defaults, "vocab_size": 96, **expected}.items():
        assert getattr(manifest, field) == value, field
    used = {name: tensor for name, tensor in weights.items() if name != "t2d"}
    assert manifest.tensors.keys() == used.keys()
    assert all(
        torch.equal(read_tensor(manifest.tensors[name]), tensor) for name, tensor in used.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_says_where_it_is_from(kind: str, tmp_path: Path) -> None:
    write, options, _ = KINDS[kind]
    write(tmp_path / "draft", **options)
    manifest = read_draft(tmp_path / "draft", target_spec(), cache=tmp_path / "cache")
    stated = {f.name for f in fields(Eagle3Manifest)} - {"path", "tensors", "sources", "warnings"}
    assert manifest.sources.keys() == stated | {"d2t"}
    assert all(source.detail for source in manifest.sources.values())
    assert not any("\n" in warning for warning in manifest.warnings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_survives_json(kind: str, tmp_path: Path) -> None:
    write, options, _ = KINDS[kind]
    write(tmp_path / "draft", **options)
    manifest = read_draft(tmp_path / "draft", target_spec(), cache=tmp_path / "cache")
    copy = manifest_from_dict(json.loads(json.dumps(manifest_to_dict(manifest))))
    assert copy == replace(manifest, path=copy.path, tensors={})


@pytest.mark.parametrize("wrapper", ["model.", "module.model.", "draft_model."])
def test_a_wrapper_of_some_tensors_is_dropped_from_each(wrapper: str, tmp_path: Path) -> None:
    weights = write_specforge_draft(tmp_path)
    file = tmp_path / "model.safetensors"
    outside = ("lm_head.", "d2t", "t2d")
    stored = {n if n.startswith(outside) else wrapper + n: t for n, t in load_file(file).items()}
    save_file(stored, file)
    manifest = read_draft(tmp_path, target_spec())
    assert manifest.producer == "specforge"
    assert manifest.tensors.keys() == weights.keys() - {"t2d"}


@pytest.mark.parametrize("binary", [True, False])
def test_leftovers_of_training_beside_a_draft_are_not_read(binary: bool, tmp_path: Path) -> None:
    weights = write_safeailab_draft(tmp_path, binary=binary)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        save_file({"fc.weight": torch.zeros(1), "x.lora_A.weight": torch.zeros(1)}, tmp_path / name)
    manifest = read_draft(tmp_path, target_spec(), cache=tmp_path / "cache")
    assert torch.equal(read_tensor(manifest.tensors["fc.weight"]), weights["fc.weight"])
    assert [w for w in manifest.warnings if "adapter" in w] == [
        "adapter_model.safetensors is not read: draft and target are used without adapters"
    ]
    assert describe_draft(tmp_path).startswith("an EAGLE-3 draft")


def test_sources_name_tensors_keys_and_conventions(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    sources = read_draft(tmp_path, target_spec(), {"rms_norm_eps": 1e-5}).sources
    assert sources["hidden_size"] == Source("tensor", "fc.weight [32, 96]")
    assert sources["num_heads"] == Source("config", "num_attention_heads")
    assert sources["aux_layers"].detail.startswith(
        "eagle_config.eagle_aux_hidden_state_layer_ids [1, 3, 4]"
    )
    assert sources["residual"].kind == "convention"
    assert sources["rms_norm_eps"] == Source("override", "draft.overrides.rms_norm_eps")


def test_another_target_width_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    g = Geometry(target_hidden=40)
    write_specforge_draft(tmp_path, g, embedding=True)
    manifest = read_draft(tmp_path, target_spec(g))
    assert (manifest.hidden_size, manifest.target_hidden_size, manifest.embedding) == (
        32,
        40,
        "own",
    )


def test_two_aux_states_are_counted_from_the_ids(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path, Geometry(num_aux=2), aux=[1, 2])
    manifest = read_draft(tmp_path, target_spec())
    assert (manifest.aux_layers, manifest.target_hidden_size) == ((1, 2), 32)


def test_wrapped_and_older_names_are_read(tmp_path: Path) -> None:
    weights = write_specforge_draft(tmp_path, fc_norm=True)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    for new, name in old.items():
        tensors[f"{name}.weight"] = tensors.pop(f"{new}.weight")
    save_file(
        {f"model.{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    manifest = read_draft(tmp_path, target_spec())
    assert torch.equal(
        read_tensor(manifest.tensors["fc_norm.1.weight"]), weights["fc_norm.1.weight"]
    )


def test_a_new_part_of_a_pickled_draft_is_read_anew(tmp_path: Path) -> None:
    write_safeailab_draft(tmp_path)
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    (tmp_path / "pytorch_model.bin").unlink()
    last = {"norm.weight": state.pop("norm.weight")}
    torch.save(state, tmp_path / "pytorch_model-00001-of-00002.bin")
    for scale in (1, 2):
        torch.save(
            {"norm.weight": last["norm.weight"] * scale},
            tmp_path / "pytorch_model-00002-of-00002.bin",
        )
        norm = read_draft(tmp_path, target_spec(), cache=tmp_path / "cache").tensors["norm.weight"]
        assert torch.equal(read_tensor(norm), last["norm.weight"] * scale)


def test_a_head_that_is_its_own_embedding(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path, full_vocab=True, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    manifest = read_draft(tmp_path, target_spec())
    assert manifest.head == "own"
    assert manifest.tensors["lm_head.weight"] == manifest.tensors["embed_tokens.weight"]
    head = manifest.tensors["lm_head.weight"]
    shared = read_draft(tmp_path, target_spec(), {"embedding": "target"})
    assert (shared.embedding, shared.head) == ("target", "own")
    assert shared.tensors["lm_head.weight"] == head


def test_a_draft_without_a_head_uses_the_targets(tmp_path: Path) -> None:
    write_modelopt_draft(tmp_path, full_vocab=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    manifest = read_draft(tmp_path, target_spec())
    assert (manifest.head, manifest.draft_vocab_size, "lm_head.weight" in manifest.tensors) == (
        "target",
        96,
        False,
    )


WARNED = {
    "layers": (
        write_specforge_draft,
        {"num_hidden_layers": 36},
        "num_hidden_layers is 36 in config.json, 1 in the",
    ),
    "tie": (write_angelslim_draft, {}, "tie_word_embeddings is true beside"),
    "1-D base": (write_angelslim_draft, {}, "AngelSlim's 1-D rope is trained with 1e4"),
    "norm_output": (write_specforge_draft, {"fc_norm": True}, "feedback stays pre_norm"),
    "PR 431": (write_specforge_draft, {"rope": INTERLEAVED}, "PR 431 trained chunked"),
    "injected yarn": (write_modelopt_draft, {}, "ModelOpt's exporter writes over the plain rope"),
    "double norm": (write_modelopt_draft, {}, "draft.overrides.first_norm: double"),
    "ids of states": (write_modelopt_draft, {"aux": [4, 6, 8]}, "layer 8 does not exist"),
    "unshifted ids": (
        write_speculators_draft,
        {"aux": [1, 3, 4]},
        "copied unshifted by a converter",
    ),
    "unsorted ids": (write_specforge_draft, {"aux": [4, 1, 3]}, "not ascending"),
    "trained base": (write_safeailab_draft, {"rope_theta": 1e6}, "EAGLE's trainer ignores it"),
    "unread ids": (
        write_safeailab_draft,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
        "layer_ids [0, 3, 5]: safeailab's code does not read it; aux layers [1, 3, 4] are used",
    ),
    "unknown": (write_generic_draft, {}, "unknown producer"),
    "dynamic": (
        write_specforge_draft,
        {"rope": {"rope_type": "dynamic", "factor": 2.0}},
        "not applied",
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_a_user_should_know_is_said(case: str, tmp_path: Path) -> None:
    write, options, message = WARNED[case]
    write(tmp_path / "draft", **options)
    warnings = read_draft(tmp_path / "draft", target_spec(), cache=tmp_path / "cache").warnings
    assert any(message in warning for warning in warnings), warnings


def test_a_plain_draft_has_no_warnings(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    assert read_draft(tmp_path, target_spec()).warnings == ()


@pytest.mark.parametrize(
    ("writer", "aux", "out"),
    [
        (write_specforge_draft, [2, 4, 5], (2, 4, 5)),
        (write_modelopt_draft, [2, 4, 5], (2, 4, 5)),
        (write_speculators_draft, [2, 4, 5], (1, 3, 4)),
        (write_speculators_draft, [3, 5, 8], (2, 4, 7)),
        # the out(k) default, lifted by a converter
        (write_speculators_draft, [1, 3, 4], (1, 3, 4)),
        (write_specforge_draft, [4, 6, 8], (3, 5, 7)),  # layer 8 of 8 can only be a state
    ],
)
def test_aux_ids_are_converted_by_producer(
    writer: Write, aux: list[int], out: tuple[int, ...], tmp_path: Path
) -> None:
    writer(tmp_path, aux=aux)
    assert read_draft(tmp_path, target_spec()).aux_layers == out


def test_a_draft_can_be_read_without_its_target(tmp_path: Path) -> None:
    write_specforge_draft(tmp_path, aux=[1, 3, 4])
    assert read_draft(tmp_path, None).aux_layers == (1, 3, 4)


def test_reading_a_draft_runs_none_of_its_code(tmp_path: Path) -> None:
    write_speculators_draft(tmp_path)
    assert (tmp_path / "config.py").read_text().startswith("raise SystemExit")
    read_draft(tmp_path, target_spec())


DESCRIBED: dict[str, tuple[Write, dict[str, Any], str]] = {
    "specforge": (write_specforge_draft, {}, "an EAGLE-3 draft (specforge layout)"),
    "angelslim": (write_angelslim_draft, {}, "an EAGLE-3 draft (angelslim layout)"),
    "modelopt": (write_modelopt_draft, {}, "an EAGLE-3 draft (modelopt layout)"),
    "speculators": (write_speculators_draft, {}, "an EAGLE-3 draft (speculators layout)"),
    "generic": (write_generic_draft, {}, "an EAGLE-3 draft"),
    "safeailab": (write_safeailab_draft, {}, "an EAGLE-3 draft"),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_draft_is_described_without_its_target(name: str, tmp_path: Path) -> None:
    """Tensors in pickles are not looked at: they would have to be converted."""
    write, options, expected = DESCRIBED[name]
    write(tmp_path / "draft", **options)
    assert describe_draft(tmp_path / "draft") == expected


def test_what_is_no_draft_is_described_as_nothing(tmp_path: Path) -> None:
    assert describe_draft(tmp_path) == ""
    assert describe_draft(TARGET) == ""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "draft_vocab_size": 8}')
    assert describe_draft(tmp_path) == "", "it has no weights"
