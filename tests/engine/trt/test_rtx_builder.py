"""The real builder of TensorRT for RTX, and a real registry of TensorRT 11, with our plugins.

Neither needs a GPU or a driver. The library is compiled here against ``plugins/tensorrt/interface``
with kernels that do nothing, so this also proves that file; ``rtx_builds.py`` runs the builder.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.trt.plugin_library import REGISTRY_CASE, WHEELS, compile_plugins, lacking
from tests.engine.trt.rtx_builds import CHIPS, DTYPES, LAYERS
from tests.families.drawn_pairs import PAIRS
from tests.tiny import ROOT
from trt_eagle3.engine.trt.dialects.registry import PACKAGES
from trt_eagle3.families.registry import FAMILIES
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION

pytestmark = pytest.mark.skipif(lacking() is not None, reason=str(lacking()))

PLUGIN_NODES = {
    "target": {
        "AddRmsNorm": 2 * LAYERS + 1,
        **dict.fromkeys(("QKNormMRope", "TreeAttention", "SiluMul"), LAYERS),
        "PickRows": 1,
    },
    "vision": {"VisionAttention": 6},
    "fuse": {},
    "draft": {"AddRmsNorm": 4, "QKNormMRope": 1, "TreeAttention": 1, "SiluMul": 1, "PickRows": 1},
}
BLOCK_NODES = {
    "context": {"AddRmsNorm": 1, "QKNormMRope": 3, "TreeAttention": 3},
    "block": {
        "AddRmsNorm": 7,
        **dict.fromkeys(("QKNormMRope", "TreeAttention", "SiluMul"), 3),
        "PickRows": 1,
    },
}
TEXT_FAMILIES = {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"}
OTHER_WEIGHTS = 1_300_000
"""Bytes of a mixture's engine without its experts, at most."""
PRODUCTS = LAYERS * (256 * 512 + 256 * 256 + 3 * 256 * 448)
"""Weights of the layers' products: of q, k and v, of o, of gate, up and down."""
CHIP_BITS = {"sm89": 8, "sm120": 16}
MASK = slice(32, 36)  # in an engine file, as observed: the chips that it is for


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_plugins(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def found(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``rtx_builds`` prints."""
    command = [sys.executable, "-m", "tests.engine.trt.rtx_builds", str(library)]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("builds"))],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read(bundle: str, graph: str, name: str) -> Any:
    return json.loads((Path(bundle) / graph / name).read_text())


@pytest.mark.parametrize("graph", PLUGIN_NODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_becomes_an_engine_with_our_plugins(found: Any, dtype: str, graph: str) -> None:
    inspection = read(found[dtype], graph, "inspection.json")
    assert inspection["plugins"] == PLUGIN_NODES[graph]
    assert inspection["copied_inputs"] == []
    assert inspection["device_memory_bytes"] > 0
    facts = read(found[dtype], graph, "config.json")["engine"]
    assert (facts["package"], facts["gpu_arch"]) == ("tensorrt_rtx", "+".join(CHIPS))
    engine = Path(found[dtype], graph, "rank0.engine").read_bytes()
    assert len(engine) == facts["num_bytes"]
    bits = sum(CHIP_BITS[chip] for chip in CHIPS)
    assert int.from_bytes(engine[MASK], "little") == bits


@pytest.mark.parametrize("graph", BLOCK_NODES)
def test_graphs_of_a_block_draft_become_engines_with_our_plugins(found: Any, graph: str) -> None:
    inspection = read(found["block draft"], graph, "inspection.json")
    assert inspection["plugins"] == BLOCK_NODES[graph]
    assert inspection["copied_inputs"] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_given_the_caches_themselves(found: Any, dtype: str) -> None:
    layers = read(found[dtype], "target", "inspection.json")["layers"]
    attentions = [layer for layer in layers if layer["LayerType"] == "PluginV3"]
    assert len(attentions) == PLUGIN_NODES["target"]["TreeAttention"]
    for i, layer in enumerate(attentions):
        names = [tensor["Name"] for tensor in (*layer["Inputs"], *layer["Outputs"])]
        assert {f"{cache}.{i}" for cache in ("k_cache", "v_cache")} < set(names)
        assert {f"{cache}_out.{i}" for cache in ("k_cache", "v_cache")} < set(names)


def test_attentions_scratch_is_planned_without_a_gpu(found: Any) -> None:
    layers = read(found["float16"], "target", "inspection.json")["layers"]
    scratch = {layer.get("ScratchBytes", 0) for layer in layers if layer["LayerType"] == "PluginV3"}
    planned = 192 << 14  # multiprocessors of the widest chip, planning_stub.cpp
    assert all(planned < found < planned + (1 << 16) for found in scratch)


def test_bundle_holds_no_timing_cache_and_no_graphs(found: Any) -> None:
    folder = Path(found["float16"])
    assert not list(folder.parent.rglob("timing.cache"))
    assert not list(folder.rglob("*.onnx"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("attribute", "TreeAttention: num_heads: must be a multiple of num_kv_heads = 2, got 3"),
        ("no attribute", "TreeAttention: page_size: missing"),
        ("version", "node 0: .*Plugin not found, are the plugin name, version"),
        ("shape", "TreeAttention: v_cache: axis 2: expected k_cache's = 64, got 32"),
        ("no aliases", "kALIASED_PLUGIN_IO_10_03 not enabled"),
    ],
)
def test_builder_refuses_what_is_wrong_in_our_words(found: Any, wrong: str, said: str) -> None:
    assert found["refusals"]["right"] == found["refusals"]["window"] == ""
    reason = found["refusals"][wrong]
    assert "\n" not in reason
    assert re.search(said, reason), reason


def test_parser_is_not_asked_before_it_finds_its_library(found: Any) -> None:
    assert "nothing.so: not found" in found["no companion"]
    assert "ends the process" in found["no companion"]


def test_stand_in_has_the_signatures_of_the_bindings(found: Any) -> None:
    assert found["api"] is True


@pytest.mark.parametrize(("kind", "refused"), [("int4", set()), ("int8", set()), ("fp8", {"sm86"})])
def test_quantised_weights_build_for_the_chips_that_have_them(
    found: Any, kind: str, refused: set[str]
) -> None:
    by_chip = found["quantised"][kind]
    assert {chip for chip, made in by_chip.items() if isinstance(made, str)} == refused
    weight = 512 * 256 // (2 if kind == "int4" else 1)
    assert all(weight < made < 1.3 * weight for made in by_chip.values() if isinstance(made, int))
    for chip in refused:
        assert f"target(s) {chip}, because the model contains HW-specific" in by_chip[chip]


def test_int4_checkpoint_stays_so_in_its_engine(found: Any) -> None:
    """Of its layers' products; the head, the token table and the norms are float16."""
    facts, dense = (
        read(found[name], "target", "config.json")["engine"] for name in ("w4a16 auto", "float16")
    )
    assert dense["num_bytes"] - facts["num_bytes"] > 0.8 * PRODUCTS * (16 - 4) / 8
    inspection = read(found["w4a16 auto"], "target", "inspection.json")
    assert inspection["plugins"] == PLUGIN_NODES["target"]
    assert inspection["packed_weights"] == {"int4": LAYERS * 4}


def test_fp8_checkpoint_stays_so_and_is_dequantised_within_its_products(found: Any) -> None:
    inspection = read(found["fp8-channel auto"], "target", "inspection.json")
    assert inspection["packed_weights"] == {"fp8": LAYERS * 4}
    dense = read(found["float16"], "target", "inspection.json")
    assert dense["engine_bytes"] - inspection["engine_bytes"] > 0.8 * PRODUCTS * (16 - 8) / 8
    ops = [layer["Operators"] for layer in inspection["layers"]]
    dequantising = [names for names in ops if any("/DequantizeLinear" in name for name in names)]
    assert len(dequantising) >= LAYERS * 4
    assert all(any(name.endswith("/Gemm") for name in names) for names in dequantising)


@pytest.mark.parametrize(
    ("build", "plugin"),
    [("fp8 plugin", "LinearFp8"), ("w4a16-asymmetric plugin", "LinearInt4")],
)
def test_plugins_of_packed_products_are_built(found: Any, build: str, plugin: str) -> None:
    """Of down K is no multiple of 128: its product, and the head's, are of 16-bit weights."""
    inspection = read(found[build], "target", "inspection.json")
    expected = {**PLUGIN_NODES["target"], plugin: LAYERS * 3, "Linear": LAYERS + 1}
    assert inspection["plugins"] == expected
    assert inspection["packed_weights"] == {plugin.removeprefix("Linear").lower(): LAYERS * 3}
    dense = read(found["float16"], "target", "inspection.json")
    assert inspection["engine_bytes"] < 0.8 * dense["engine_bytes"]


def test_attention_over_fp8_caches_is_built_and_is_given_the_caches_themselves(found: Any) -> None:
    """Four FP8 numbers in an int32; the scales are a constant of the engine."""
    layers = read(found["fp8 plugin"], "target", "inspection.json")["layers"]
    attentions = [layer for layer in layers if layer["LayerType"] == "PluginV3"]
    for i, layer in enumerate(attentions):
        names = [tensor["Name"] for tensor in layer["Inputs"]]
        assert names[3:5] == [f"k_cache.{i}", f"v_cache.{i}"]
        assert "Constant" in names[9]
    states = read(found["fp8 plugin"], "target", "config.json")["states"]
    assert {(state["dtype"], *state["shape"]) for state in states} == {("int32", 2, 16)}
    assert len(attentions) == len(states) / 2 == LAYERS


def test_experts_are_built_as_a_plugin(found: Any) -> None:
    inspection = read(found["experts"], "target", "inspection.json")
    assert inspection["plugins"]["FusedMoe"] == 3
    assert inspection["copied_inputs"] == []


def test_router_logits_that_are_outputs_too_are_read_where_the_product_wrote_them(
    found: Any,
) -> None:
    """So they cost no launch."""
    routers = read(found["experts"], "target", "config.json")["intermediates"]
    assert routers == [f"layers.{k}.mlp.router_logits" for k in range(3)]
    layers = read(found["experts"], "target", "inspection.json")["layers"]
    for router in routers:
        (product,) = (x for x in layers if router in (t["Name"] for t in x["Outputs"]))
        assert product["LayerType"] == "gemm"
        assert "Gemm" in product["Name"]
        readers = [x["Name"] for x in layers if router in (t["Name"] for t in x["Inputs"])]
        assert [name for name in readers if "FusedMoe" not in name] == []
        assert len(readers) == 1


@pytest.mark.parametrize(
    ("kind", "plugin"), [("fp8", "FusedMoeFp8"), ("w4a16-asymmetric", "FusedMoeInt4")]
)
def test_experts_stay_packed_behind_plugins(found: Any, kind: str, plugin: str) -> None:
    """In the type that is stored; RTX dequantises blocks and zero points of its own products."""
    inspection = read(found[f"experts {kind}"], "target", "inspection.json")
    assert inspection["plugins"][plugin] == 2
    assert "FusedMoe" not in inspection["plugins"]
    type_name = plugin.removeprefix("FusedMoe").lower()
    assert inspection["packed_weights"][type_name] >= 4
    assert inspection["copied_inputs"] == []
    bits = {"fp8": 8, "int4": 4}[type_name]
    experts = 2 * 4 * 3 * 256 * 128
    assert inspection["engine_bytes"] < experts * bits / 8 + OTHER_WEIGHTS


@pytest.mark.parametrize("family", PAIRS)
def test_every_graph_of_a_family_becomes_an_engine_with_our_plugins(
    found: Any, family: str
) -> None:
    kinds = found[f"family {family}"]
    assert kinds["eagle3"]["graphs"].keys() >= {"target", "fuse", "draft"}
    for pair in kinds.values():
        for graph, nodes in pair["graphs"].items():
            inspection = read(pair["folder"], graph, "inspection.json")
            assert inspection["plugins"] == nodes, graph
            assert inspection["copied_inputs"] == [], graph


def test_every_family_and_kind_of_draft_is_built(found: Any) -> None:
    built = {family: found[f"family {family}"] for family in PAIRS}
    twins = {f"{family}_text" for family in ("qwen3_5", "qwen3_5_moe")}
    assert built.keys() == FAMILIES.keys() - twins
    towers = {family for family, pair in built.items() if "vision" in pair["eagle3"]["graphs"]}
    assert towers == FAMILIES.keys() - TEXT_FAMILIES - twins
    assert built["qwen3_next"].keys() == {"eagle3", "mtp"}
    for family in ("qwen3_5", "qwen3_5_moe"):
        assert built[family].keys() == {"eagle3", "mtp", "block"}
        assert built[family]["mtp"]["graphs"].keys() == {"fuse", "draft"}
        assert built[family]["block"]["graphs"].keys() == {"context", "block"}


def test_linear_attention_is_built_and_is_given_its_states_themselves(found: Any) -> None:
    folder = found["family qwen3_5"]["eagle3"]["folder"]
    inspection = read(folder, "target", "inspection.json")
    layers, states = inspection["layers"], read(folder, "target", "config.json")["states"]
    windows = [state["name"] for state in states if state["kind"] == "window"]
    assert inspection["plugins"]["GatedDelta"] == len(windows) == 2
    assert inspection["copied_inputs"] == []
    rules = [x for x in layers if "GatedDelta" in x["Name"] and x["LayerType"] == "PluginV3"]
    for layer, window in zip(rules, windows, strict=True):
        inputs, outputs = ([t["Name"] for t in layer[side]] for side in ("Inputs", "Outputs"))
        matrices = window.replace("conv", "delta")
        assert inputs[6:8] == [window, matrices]
        assert outputs[1:3] == [n.replace("state", "state_out") for n in (window, matrices)]


# TensorRT 11, of which there are wheels without a builder


def test_registry_of_tensorrt_11_takes_and_makes_our_plugins(library: Path) -> None:
    lean = WHEELS / "tensorrt_lean_libs" / "libnvinfer_lean.so.11"
    command = [library.parent / REGISTRY_CASE, lean, library]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "version 110400",
        "status ''",
        "left to register 0",
        f"PickRows: PickRows version {PLUGIN_VERSION}, 1 output, PLUGIN_V3ONE_BUILD 2",
        f"Linear: Linear version {PLUGIN_VERSION}, 1 output, PLUGIN_V3ONE_BUILD 2",
        f"LinearFp8: LinearFp8 version {PLUGIN_VERSION}, 1 output, PLUGIN_V3ONE_BUILD 2",
        f"LinearInt8: LinearInt8 version {PLUGIN_VERSION}, 1 output, PLUGIN_V3ONE_BUILD 2",
        f"LinearInt4: LinearInt4 version {PLUGIN_VERSION}, 1 output, PLUGIN_V3ONE_BUILD 2",
        "TreeAttention: refused",
        "Abacus: no creator",
    ]
    assert "trt_eagle3: TreeAttention: num_heads: missing" in done.stdout + done.stderr


def test_lock_has_the_version_that_the_extra_pins() -> None:
    pins = (ROOT / "requirements-tensorrt.lock").read_text()
    extra = "tensorrt_rtx_cu13==1.7.1.116"
    assert f'rtx = ["{extra}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"\n{extra.replace('_', '-')} \\\n" in pins
    assert PACKAGES["tensorrt_rtx"].oldest == (1, 7)
