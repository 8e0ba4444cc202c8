"""Every producer's block drafts mean what its code computes; contradictions are refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.drafts.block.files import CONFIGS, Geometry, target_spec, write
from tests.tiny import TARGET
from trt_eagle3.checkpoint.manifest import Source, manifest_to_dict
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.commands.report import inspection_lines
from trt_eagle3.drafts.block.manifest import (
    BlockLayer,
    BlockManifest,
    ConfidenceHead,
    MarkovHead,
)
from trt_eagle3.drafts.block.reader import read_block
from trt_eagle3.drafts.registry import describe_draft, find_draft, kind_named, manifest_from_dict
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.spec import RopeSpec

FULL = BlockLayer(causal=False, window=0)
VANILLA = MarkovHead(form="vanilla", rank=8, state_from_anchor=False)
JOINED = ConfidenceHead(with_markov=True, temperatures=())
SLIDING = ["sliding_attention", "full_attention"]
WINDOW = {"layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": True}

DFLASH: dict[str, Any] = {
    "method": "dflash",
    "aux_layers": (1, 5, 9),
    "mask_token_id": 90,
    "mask_embedding": "token",
    "shift": "own",
    "anchor_row": False,
    "layers": (FULL, FULL),
    "window_rule": "row",
    "embedding": "target",
    "head": "target",
    "rope": RopeSpec.plain(16, 1e6),
    "aux_pre_deepstack": True,
    "markov": None,
    "confidence": None,
    "conv_kernel": 0,
    "selector_rank": 0,
    "embedding_scale": 1.0,
    "logit_multiplier": 1.0,
    "logit_softcap": 0.0,
}
NEXT = {"shift": "next", "anchor_row": True}
DSPARK = {**DFLASH, **NEXT, "method": "dspark", "markov": VANILLA, "confidence": JOINED}
DFLASH2 = {
    **DFLASH,
    "method": "dflash2",
    "block_size": 8,
    "conv_kernel": 2,
    "conv_group": 8,
    "selector_rank": 8,
    "selector_top_k": 4,
}
SPECULATORS = {
    "producer": "speculators",
    "block_size": 8,
    "window_rule": "anchor",
    "aux_pre_deepstack": False,
    "embedding": "own",
    "head": "own",
}
OWN = {"embedding": "own", "head": "own"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "z-lab": {**DFLASH, "producer": "z-lab", "block_size": 16},
    "z-lab dflash2": {
        **DFLASH2,
        "producer": "z-lab",
        "layers": (BlockLayer(causal=False, window=64),) * 2,
    },
    "deepspec": {**DSPARK, **OWN, "producer": "deepspec", "block_size": 7},
    "deepspec rank 0": {**DFLASH, **NEXT, **OWN, "producer": "deepspec", "block_size": 7},
    "specforge dspark": {**DSPARK, "producer": "specforge", "block_size": 16},
    "speculators": {**DFLASH, **SPECULATORS},
    "speculators dflash2": {**DFLASH2, **SPECULATORS},
    "speculators dspark": {**DSPARK, **SPECULATORS},
    "modelopt": {**DFLASH, "producer": "modelopt", "block_size": 16},
    "modelopt dspark": {**DSPARK, "producer": "modelopt", "block_size": 16},
    "angelslim": {**DFLASH, "producer": "angelslim", "block_size": 16},
}


def read(folder: Path, **overrides: Any) -> BlockManifest:
    return read_block(folder, target_spec(), overrides, folder.parent / "cache")


def differing(manifest: BlockManifest, expected: dict[str, Any]) -> dict[str, Any]:
    found = {name: getattr(manifest, name) for name in expected}
    return {name: value for name, value in found.items() if value != expected[name]}


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, **overrides)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 600
    return message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_a_producer_is_read_as_its_code_computes(layout: str, tmp_path: Path) -> None:
    weights = write(tmp_path / "draft", layout)
    manifest = read(tmp_path / "draft")
    assert differing(manifest, LAYOUTS[layout]) == {}
    assert manifest.tensors.keys() == weights.keys()
    assert all(torch.equal(read_tensor(manifest.tensors[n]), t) for n, t in weights.items())


def test_every_layout_is_tested() -> None:
    assert CONFIGS.keys() == LAYOUTS.keys() | {"radixark"}


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_field_has_a_source(layout: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    manifest = read(tmp_path)
    stated = {f.name for f in fields(BlockManifest)} - {"path", "tensors", "sources", "warnings"}
    assert stated - manifest.sources.keys() == set()
    copy = manifest_from_dict(manifest_to_dict(manifest))
    assert copy == replace(manifest, path=Path(), tensors={})


def test_yarn_of_radixark_is_the_drafts_own(tmp_path: Path) -> None:
    write(tmp_path, "radixark")
    manifest = read(tmp_path)
    assert (manifest.rope.kind, manifest.rope.base) == ("yarn", 1e7)
    assert manifest.rope.parameters["factor"] == 32
    assert manifest.rope.parameters["original_max_position_embeddings"] == 8192
    assert differing(manifest, {**DSPARK, "block_size": 7, "rope": manifest.rope}) == {}


# layout, options of its writer, fields that must come out
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "prefix model.": ("z-lab", {"names": "model."}, {}),
    "codebooks with .weight": ("z-lab dflash2", {"names": ".weight"}, {"selector_rank": 8}),
    "nested under logit_head.": ("specforge dspark", {"names": "logit_head."}, {"markov": VANILLA}),
    "block size in dflash_config": (
        "z-lab",
        {"block_size": "absent", "nested": {"block_size": 12}},
        {"block_size": 12},
    ),
    "block size at both places": ("z-lab", {"nested": {"block_size": 16}}, {"block_size": 16}),
    "no block size": ("z-lab", {"block_size": "absent"}, {"block_size": 16}),
    "no layer ids": (
        "z-lab",
        {"nested": {"target_layer_ids": "absent"}, "geometry": Geometry(num_aux=2)},
        {"aux_layers": (1, 9)},
    ),
    "half is rounded to even": (
        "z-lab",
        {
            "nested": {"target_layer_ids": "absent"},
            "geometry": Geometry(layers=3, target_layers=11),
        },
        {"aux_layers": (1, 4, 8)},
    ),
    "one layer": (
        "z-lab",
        {"nested": {"target_layer_ids": "absent"}, "geometry": Geometry(layers=1, num_aux=1)},
        {"aux_layers": (6,)},
    ),
    "no layer ids of speculators": (
        "speculators",
        {"aux_hidden_state_layer_ids": None},
        {"aux_layers": (1, 5, 8)},
    ),
    "sliding layers are causal": (
        "z-lab",
        WINDOW,
        {"layers": (BlockLayer(causal=True, window=64), FULL)},
    ),
    "is_causal covers all layers": (
        "z-lab",
        {**WINDOW, "is_causal": False},
        {"layers": (BlockLayer(causal=False, window=64), FULL)},
    ),
    "causal heads": (
        "modelopt",
        {"nested": {"causal": True}},
        {"layers": (BlockLayer(causal=True, window=0),) * 2},
    ),
    "full layers of speculators are never causal": (
        "speculators",
        {"layer": WINDOW, "sliding_window_non_causal": False},
        {"layers": (BlockLayer(causal=True, window=64), FULL)},
    ),
    "bidirectional windows of speculators": (
        "speculators",
        {"layer": WINDOW, "sliding_window_non_causal": True},
        {"layers": (BlockLayer(causal=False, window=64), FULL)},
    ),
    "ModelOpt's windows beside full types": (
        "modelopt",
        {"nested": {"use_swa": True, "swa_window_size": 64}, "sliding_window": 64},
        {"layers": (BlockLayer(causal=False, window=64),) * 2},
    ),
    "no layer types": (
        "z-lab",
        {"layer_types": "absent", "sliding_window": 64, "use_sliding_window": True}
        | {"max_window_layers": 1},
        {"layers": (FULL, BlockLayer(causal=True, window=64))},
    ),
    "partial rotation copied from the target": (
        "z-lab",
        {"partial_rotary_factor": 0.25, "rope_theta": 1e7},
        {"rope": RopeSpec.plain(16, 1e7)},
    ),
    "M-RoPE copied from the target": (
        "z-lab",
        {"model_type": "qwen3_vl_text", "rope_theta": 5e6}
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        {"rope": RopeSpec.plain(16, 5e6)},
    ),
    "no theta": ("z-lab", {"rope_theta": "absent"}, {"rope": RopeSpec.plain(16, 1e4)}),
    "ModelOpt's export scaling": (
        "modelopt",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"rope": RopeSpec.plain(16, 1e6)},
    ),
    "factors": (
        "z-lab",
        {"nested": {"input_embedding_scale": 2.0, "output_multiplier": 0.5}}
        | {"final_logit_softcapping": 30.0},
        {"embedding_scale": 2.0, "logit_multiplier": 0.5, "logit_softcap": 30.0},
    ),
    "own mask embedding": (
        "z-lab",
        {"add": {"mask_embedding": torch.ones(32)}},
        {"mask_embedding": "own"},
    ),
    "biases": (
        "z-lab",
        {"weights": {"bias": True}, "attention_bias": True},
        {"attention_bias": True},
    ),
    "a vocabulary of its own": (
        "speculators dspark",
        {"geometry": Geometry(draft_vocab=24)},
        {"draft_vocab_size": 24, "vocab_size": 96, "head": "own"},
    ),
    "RedHatAI's files have DeepSpec's architecture": (
        "speculators dspark",
        {"architectures": ["Qwen3DSparkModel"], "layer": WINDOW},
        {
            "producer": "speculators",
            "aux_layers": (1, 5, 9),
            "layers": (BlockLayer(causal=True, window=64), FULL),
            **NEXT,
        },
    ),
    "speculators' other architecture": (
        "speculators dspark",
        {"architectures": ["DSparkSpeculator"]},
        {"producer": "speculators", "markov": VANILLA},
    ),
    "anchor row of a DFlash draft": ("speculators", {"sample_from_anchor": True}, NEXT),
    "no anchor row of a DSpark draft": (
        "speculators dspark",
        {"sample_from_anchor": False},
        {"shift": "own", "anchor_row": False, "block_size": 8},
    ),
    "gated": (
        "deepspec",
        {"weights": {"markov": "gated"}, "markov_head_type": "gated"},
        {"markov": MarkovHead(form="gated", rank=8, state_from_anchor=False)},
    ),
    "rnn": (
        "speculators dspark",
        {"weights": {"markov": "rnn"}, "markov_head_type": "rnn"},
        {"markov": MarkovHead(form="rnn", rank=8, state_from_anchor=True)},
    ),
    "flat gated": (
        "modelopt dspark",
        {"weights": {"markov": "gated"}, "nested": {"markov_head_type": "gated"}},
        {"markov": MarkovHead(form="gated", rank=8, state_from_anchor=False)},
    ),
    "flat rnn": (
        "modelopt dspark",
        {"weights": {"markov": "rnn"}, "nested": {"markov_head_type": "rnn"}},
        {"markov": MarkovHead(form="rnn", rank=8, state_from_anchor=True)},
    ),
    "no confidence head": (
        "deepspec",
        {"weights": {"confidence": ""}, "enable_confidence_head": False},
        {"markov": VANILLA, "confidence": None},
    ),
    "confidence of the hidden state alone": (
        "deepspec",
        {"weights": {"confidence": "hidden"}, "confidence_head_with_markov": False},
        {"confidence": ConfidenceHead(with_markov=False, temperatures=())},
    ),
    "confidence head, not named": (
        "deepspec",
        {"enable_confidence_head": None},
        {"confidence": JOINED},
    ),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_variant_is_read(case: str, tmp_path: Path) -> None:
    layout, options, expected = VARIANTS[case]
    geometry = options.get("geometry", Geometry())
    write(tmp_path, layout, **options)
    manifest = read_block(tmp_path, target_spec(geometry))
    assert differing(manifest, expected) == {}


# layout, options of its writer, overrides, message
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # at two places with two values
    "block sizes": ("z-lab", {"nested": {"block_size": 8}}, {}, "block_size: .* has 8.* has 16"),
    "mask tokens": ("z-lab", {"mask_token_id": 7}, {}, "mask_token_id: .* has 90.* has 7"),
    "layer ids": ("z-lab", {"target_layer_ids": [2, 5, 9]}, {}, "aux_layers: .*"),
    "causal": (
        "modelopt",
        {"is_causal": True},
        {},
        "layers: is_causal has True, .*causal has False",
    ),
    "shifts": (
        "modelopt dspark",
        {"nested": {"sample_from_anchor": False}},
        {},
        "shift: .*sample_from_anchor has False, .*shift_label has True",
    ),
    "windows": (
        "modelopt",
        {"nested": {"use_swa": True, "swa_window_size": 64}, "sliding_window": 32},
        {},
        "swa_window_size has 64, sliding_window has 32",
    ),
    # against the tensors
    "a dspark file read as dflash": (
        "specforge dspark",
        {"architectures": ["DFlashDraftModel"], "nested": {"projector_type": None}},
        {},
        "confidence_head.proj.bias is a tensor of dspark, but config.json names dflash",
    ),
    "a dflash2 file read as dflash": (
        "z-lab dflash2",
        {"architectures": ["DFlashDraftModel"]},
        {},
        "is a tensor of dflash2, but config.json names dflash",
    ),
    "dflash2 without its tensors": (
        "z-lab",
        {"architectures": ["DFlash2DraftModel"]},
        {},
        "hidden_projection.weight .* missing, but config.json names dflash2",
    ),
    "no markov head": ("deepspec", {"drop": ("markov_head",)}, {}, "markov_w1.weight is missing"),
    "markov rank": ("deepspec", {"markov_rank": 16}, {}, "markov_rank: 16 in .* has 8 columns"),
    "markov form": ("deepspec", {"markov_head_type": "rnn"}, {}, "those of a vanilla markov head"),
    "no confidence head": (
        "deepspec",
        {"drop": ("confidence_head",)},
        {},
        "enable_confidence_head is True .* is absent",
    ),
    "confidence head without markov": (
        "deepspec",
        {"confidence_head_with_markov": False},
        {},
        "confidence_head_with_markov is False .* 40 columns",
    ),
    "selector rank": (
        "z-lab dflash2",
        {"nested": {"selector_rank": 16}},
        {},
        "selector_rank: candidate_selector.predecessor_codebook has 8, .*selector_rank has 16",
    ),
    "codebooks of two ranks": (
        "z-lab dflash2",
        {"add": {"candidate_selector.successor_codebook": torch.ones(96, 4)}},
        {},
        "selector_rank: .*predecessor_codebook has 8, .*successor_codebook has 4",
    ),
    "codebook of another vocabulary": (
        "z-lab dflash2",
        {"add": {"candidate_selector.predecessor_codebook": torch.ones(64, 8)}},
        {},
        r"predecessor_codebook: expected shape \[96, 8\]",
    ),
    "taps": ("z-lab dflash2", {"nested": {"conv_kernel_size": 3}}, {}, "conv_kernel: .* 2, .* 3"),
    "groups": ("z-lab dflash2", {"nested": {"conv_group_size": 16}}, {}, "conv_group: .* 8, .* 16"),
    "one layer without convolution": (
        "z-lab dflash2",
        {"drop": ("layers.1.mlp_conv",)},
        {},
        "layers.1.mlp_conv.base_kernel.* missing",
    ),
    "bias": ("z-lab", {"attention_bias": True}, {}, "attention_bias is True .* is absent"),
    "a key of attention sinks": (
        "z-lab",
        {"nested": {"attention_sink_bias": True}},
        {},
        "dflash_config.attention_sink_bias: attention sinks: not supported",
    ),
    "a tensor of attention sinks": (
        "z-lab",
        {"add": {"layers.1.self_attn.attention_sink_bias": torch.ones(4)}},
        {},
        "layers.1.self_attn.attention_sink_bias: attention sinks: not supported",
    ),
    "layers": ("z-lab", {"num_hidden_layers": 5}, {}, "num_hidden_layers: 5 in .*, 2 in"),
    "layer types": (
        "z-lab",
        {"layer_types": ["full_attention"]},
        {},
        "layer_types: expected 2, got 1",
    ),
    "a window that is off": (
        "z-lab",
        {**WINDOW, "use_sliding_window": False},
        {},
        "layer_types has sliding_attention, but use_sliding_window is false",
    ),
    "no window": ("z-lab", {**WINDOW, "sliding_window": None}, {}, "there is no sliding_window"),
    "linear attention": (
        "z-lab",
        {"layer_types": ["linear_attention"] * 2},
        {},
        "expected full_attention or sliding_attention",
    ),
    "a missing tensor": ("z-lab", {"drop": ("layers.1.mlp.up",)}, {}, "mlp.up_proj.weight missing"),
    "a surplus tensor": (
        "z-lab",
        {"add": {"extra.weight": torch.ones(1)}},
        {},
        "extra.weight surplus",
    ),
    "no fc": ("z-lab", {"drop": ("fc.",)}, {}, "not a block draft: fc.weight missing"),
    "two names": (
        "specforge dspark",
        {"add": {"markov_w1.weight": torch.ones(96, 8)}},
        {},
        "are the same weight under two names",
    ),
    # bad numbers
    "block of no rows": (
        "z-lab",
        {"block_size": 0},
        {},
        "block_size: expected 2 to 64 rows, got 0",
    ),
    "block of 65 rows": ("z-lab", {"block_size": 65}, {}, "expected 2 to 64 rows, got 65"),
    "block of the anchor alone": ("z-lab", {"block_size": 1}, {}, "expected 2 to 64 rows, got 1"),
    "overridden block": ("z-lab", {}, {"block_size": 65}, "expected a whole number from 1 to 64"),
    "no mask token": (
        "z-lab",
        {"nested": {"mask_token_id": None}},
        {},
        "mask_token_id: not in config.json",
    ),
    "mask outside": (
        "z-lab",
        {"nested": {"mask_token_id": 96}},
        {},
        "mask_token_id: 96 is outside the vocabulary of 96",
    ),
    "mask is an end token": (
        "z-lab",
        {"nested": {"mask_token_id": 9}},
        {},
        "mask_token_id: 9 is an end token",
    ),
    "layer beyond the target": (
        "z-lab",
        {"nested": {"target_layer_ids": [1, 5, 43]}},
        {},
        "43 is beyond the target's 12 layers",
    ),
    "state beyond the target": (
        "speculators",
        {"aux_hidden_state_layer_ids": [2, 6, 13]},
        {},
        "13 is beyond the target's 12 layers",
    ),
    "last layer": (
        "deepspec",
        {"target_layer_ids": [1, 5, 11]},
        {},
        "11 is the last layer, whose state deepspec takes after the target's final norm",
    ),
    "embedding": ("deepspec", {"target_layer_ids": [-1, 5, 9]}, {}, "-1 is the embedding"),
    "state 0": (
        "speculators",
        {"aux_hidden_state_layer_ids": [0, 6, 10]},
        {},
        "0 is the embedding",
    ),
    "descending ids": (
        "z-lab",
        {"nested": {"target_layer_ids": [9, 5, 1]}},
        {},
        "expected ascending ids, each once",
    ),
    "too few ids": (
        "z-lab",
        {"nested": {"target_layer_ids": [1, 5]}},
        {},
        "a draft for hidden size 48 .* takes 2 aux",
    ),
    "no top_k": (
        "z-lab dflash2",
        {"nested": {"selector_top_k": None}},
        {},
        "selector_top_k: expected 1 to 96 candidates, got None",
    ),
    "negative scale": ("z-lab", {"nested": {"output_multiplier": -1.0}}, {}, "expected a positive"),
    # another target
    "another depth": (
        "z-lab",
        {"num_target_layers": 36},
        {},
        "a draft for 36 layers, the target has 12",
    ),
    "a Qwen3 draft on a Qwen3.5 target": (
        "z-lab",
        {"geometry": Geometry(vocab=80, draft_vocab=80), "nested": {"mask_token_id": 70}},
        {},
        "a draft for a vocabulary of 80 .*, the target's is 96",
    ),
    # drafters that are not supported
    "Domino": ("z-lab", {"nested": {"projector_type": "domino"}}, {}, "Domino .*domino"),
    "Domino by tensor": (
        "z-lab",
        {"add": {"prefix_gru.weight_ih_l0": torch.ones(1)}},
        {},
        "Domino",
    ),
    "DFlare": ("z-lab", {"architectures": ["DFlareDraftModel"]}, {}, "DFlare"),
    "DFlare by tensor": (
        "z-lab",
        {"add": {"layers.0.self_attn.k_proj_target.weight": torch.ones(1)}},
        {},
        "DFlare",
    ),
    "JetSpec": ("z-lab", {"architectures": ["JetSpecDFlashModel"]}, {}, "JetSpec"),
    "LiLiCorr": ("z-lab", {"nested": {"projector_type": "lilicorr"}}, {}, "LiLiCorr"),
    "XPress": ("z-lab", {"architectures": ["XPressDFlashModel"]}, {}, "XPress"),
    "EAGLE-4": ("z-lab", {"architectures": ["Eagle4DFlashModel"]}, {}, "EAGLE-4"),
    "Gemma": (
        "deepspec",
        {"architectures": ["Gemma4DSparkModel"]},
        {},
        "Gemma4DSparkModel.*not supp",
    ),
    "another speculator": (
        "speculators",
        {"speculators_model_type": "dsv4_dspark"},
        {},
        "expected one of dflash, dflash2, dspark",
    ),
    "names that contradict each other": (
        "specforge dspark",
        {"nested": {"projector_type": "dflash"}},
        {},
        "architecture DSparkDraftModel, but dflash_config.projector_type 'dflash'",
    ),
    "unknown key": (
        "speculators dspark",
        {"draft_adapter_rank": 16},
        {},
        r"an unknown layout \(draft_adapter_rank 16\)",
    ),
    "quantised": (
        "modelopt",
        {"quantization_config": {"quant_algo": "FP8"}},
        {},
        "a quantised draft",
    ),
    "another activation": ("z-lab", {"hidden_act": "gelu"}, {}, "hidden_act: expected silu"),
    # overrides
    "decided by tensors": ("z-lab", {}, {"method": "dspark"}, "the tensors decide it"),
    "unknown producer": (
        "z-lab",
        {},
        {"producer": "me"},
        "producer: expected one of speculators, ",
    ),
    "an anchor row that predicts itself": (
        "z-lab",
        {},
        {"anchor_row": True},
        "anchor_row: with shift own",
    ),
    "too few layers": (
        "z-lab",
        {},
        {"layers": [{"causal": True, "window": 0}]},
        "layers: expected 2 layers, got 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradiction_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    layout, options, overrides, message = REFUSED[case]
    write(tmp_path, layout, **options)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, **overrides)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "z-lab")
    torch.save(torch.ones(32), tmp_path / "mask_embedding.pt")
    assert "mask_embedding.pt is not read. Add its values" in refusal(tmp_path)


def test_override_beats_what_the_file_says(tmp_path: Path) -> None:
    write(tmp_path, "z-lab", nested={"block_size": 8})
    layer = {"causal": True, "window": 32}
    manifest = read(
        tmp_path,
        block_size=4,
        shift="next",
        aux_layers=[2, 6, 10],
        layers=[layer, layer],
        window_rule="anchor",
        aux_pre_deepstack=False,
        rope={"base": 1e7},
    )
    expected = {
        "block_size": 4,
        "shift": "next",
        "anchor_row": True,
        "aux_layers": (2, 6, 10),
        "layers": (BlockLayer(causal=True, window=32),) * 2,
        "window_rule": "anchor",
        "aux_pre_deepstack": False,
        "rope": RopeSpec.plain(16, 1e7),
    }
    assert differing(manifest, expected) == {}
    assert manifest.sources["block_size"] == Source("override", "draft.overrides.block_size")


def test_temperatures_are_given_by_override(tmp_path: Path) -> None:
    write(tmp_path, "deepspec")
    head = {"with_markov": True, "temperatures": [1.5, 2.0, *[1.0] * 5]}
    assert read(tmp_path, confidence=head).confidence == ConfidenceHead(
        with_markov=True, temperatures=(1.5, 2.0, *[1.0] * 5)
    )
    assert "temperatures: expected 7, one per draft, got 2" in refusal(
        tmp_path, confidence={**head, "temperatures": [1.5, 2.0]}
    )
    assert "confidence_head.proj.weight: expected shape" in refusal(
        tmp_path, confidence={**head, "with_markov": False}
    )


def test_embedding_and_head_of_the_target_replace_copies(tmp_path: Path) -> None:
    write(tmp_path, "deepspec")
    manifest = read(tmp_path, embedding="target", head="target")
    assert {"embed_tokens.weight", "lm_head.weight"} & manifest.tensors.keys() == set()


@pytest.mark.parametrize(
    ("layout", "options", "warning"),
    [
        ("z-lab", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 is ignored"),
        ("modelopt", {}, "base 1e+06 is the target's"),
        ("z-lab", {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, "mrope"),
        ("speculators dspark", {"sample_from_anchor": None}, "vLLM's reader uses false"),
    ],
)
def test_doubtful_reading_is_warned_of(
    layout: str, options: dict[str, Any], warning: str, tmp_path: Path
) -> None:
    write(tmp_path, layout, **options)
    (found,) = read(tmp_path).warnings
    assert warning in found


def test_sources_name_the_key_and_how_ids_were_counted(tmp_path: Path) -> None:
    write(tmp_path / "a", "z-lab", block_size="absent", nested={"block_size": 8})
    write(tmp_path / "b", "speculators", layer=WINDOW)
    a, b = (read(tmp_path / name).sources for name in "ab")
    assert a["block_size"] == Source("config", "dflash_config.block_size")
    assert a["aux_layers"].detail == (
        "dflash_config.target_layer_ids [1, 5, 9], outputs of layer i"
    )
    assert b["aux_layers"].detail == (
        "aux_hidden_state_layer_ids [2, 6, 10], states after j layers"
    )
    assert "sliding_window_non_causal False" in b["layers"].detail
    assert b["layers"].detail.startswith("layer_types: 1 of 2 slide")


def test_inspect_shows_layers_and_heads_in_words(tmp_path: Path) -> None:
    write(tmp_path, "deepspec")
    manifest = read(tmp_path, embedding="target")
    console = Console(width=200, file=StringIO(), record=True)
    console.print(*inspection_lines(read_target(TARGET), manifest), sep="\n")
    shown = console.export_text()
    for line in (
        r"layers +2 x bidirectional",
        r"markov +vanilla, rank 8",
        r"confidence +hidden and markov embedding, temperatures 1",
    ):
        assert re.search(line, shown), line


def test_kind_claims_drafts_by_their_config(tmp_path: Path) -> None:
    kind = kind_named("block")
    for layout in CONFIGS:
        write(tmp_path / layout, layout)
        assert kind.claims("a/b", tmp_path / layout)
        assert describe_draft(tmp_path / layout) == "a block draft"
    assert not kind.claims("a/b", tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert not kind.claims("a/b", tmp_path)


def test_draft_without_a_head_gets_the_targets(tmp_path: Path) -> None:
    target = read_target(TARGET)
    n, vocab = target.num_layers, target.vocab_size
    geometry = Geometry(target.hidden_size, vocab=vocab, draft_vocab=vocab, target_layers=n)
    write(tmp_path, "z-lab", geometry, nested={"target_layer_ids": [0, 1, 2]})
    manifest = find_draft(str(tmp_path), target, {})
    assert isinstance(manifest, BlockManifest)
    assert manifest.tensors["lm_head.weight"] == target.tensors["lm_head.weight"]
    lines = [line for line in inspection_lines(target, manifest) if isinstance(line, str)]
    assert (
        f"draft {tmp_path}: block draft by z-lab, 2 layers, hidden {geometry.hidden}, 4/2"
        in "\n".join(lines)
    )


def test_shapes_and_tables_name_the_tensors(tmp_path: Path) -> None:
    kind = kind_named("block")
    weights = write(tmp_path, "deepspec")
    manifest = read(tmp_path)
    assert dict(kind.shapes(manifest)) == {n: tuple(t.shape) for n, t in weights.items()}
    assert set(kind.tables(manifest)) == {
        *(f"markov_head.markov_w{i}.weight" for i in (1, 2)),
        *(f"confidence_head.proj.{p}" for p in ("weight", "bias")),
    }
