"""TensorRT bundles without TensorRT: what is built, what is left to run, and what a build asks
of the builder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from tests.engine import fake_tensorrt as fake
from tests.engine.conftest import Install
from tests.engine.fake_tensorrt import fake_tensorrt
from tests.graph.test_trt_export import graphs
from tests.tiny import build_tiny, tiny_config
from trt_eagle3.cli import cli
from trt_eagle3.commands.doctor import Ability, Diagnosis
from trt_eagle3.commands.report import build as report_json
from trt_eagle3.config import BuildConfig, load_config
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.bundle.read import BUILD_SCRIPT, read_bundle
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.engine.trt import bundle as tensorrt_bundle
from trt_eagle3.engine.trt import plugins as tensorrt_plugins
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.folder import EngineFolder
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.frames import patch_ranges
from trt_eagle3.graph.ops import OPS
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.pipeline import STAGES, build

GRAPHS = ("target", "vision", "fuse", "draft")
ENGINE: dict[str, object] = {
    "backend": "tensorrt",
    "device": "cuda",
    "dtype": "float16",
    "residual": "float32",
}


# Without TensorRT


@pytest.mark.usefixtures("no_tensorrt")
def test_build_without_tensorrt_has_all_but_the_engines(tmp_path: Path) -> None:
    seen: list[str] = []
    config = tiny_config(engine=ENGINE)
    report = build(config, output=tmp_path, progress=seen.append)
    assert seen == [stage for stage in STAGES if stage not in {"calibration", "quantisation"}]
    printed = report_json(report)["engines"]
    assert printed == {
        "built": {},
        "missing": "TensorRT: not here.",
        "script": str(report.path / BUILD_SCRIPT),
    }
    for graph in GRAPHS:
        assert (report.path / graph / "onnx" / "model.onnx").is_file()
        assert (report.path / graph / "onnx" / "weights.bin").is_file()
        assert (report.path / graph / "config.json").is_file()
    assert (report.path / BUILD_SCRIPT).stat().st_mode & 0o111
    record = read_bundle(report.path)
    assert record.embedding.location == "embedding.safetensors"
    assert record.engine.gpu_arch is None
    assert not (report.path / "weights").exists()


@pytest.mark.usefixtures("no_tensorrt")
def test_unbuilt_bundle_says_which_command_builds_its_engines(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, engine=ENGINE)
    with pytest.raises(UserError, match=rf"its engine is not built yet.*{bundle}/{BUILD_SCRIPT}"):
        open_session("tensorrt", bundle / "target" / "model.onnx", bundle, device="cuda")


@pytest.mark.usefixtures("no_tensorrt")
def test_script_builds_every_graph_with_the_shapes_of_its_profiles(tmp_path: Path) -> None:
    engine = ENGINE | {"tensorrt": {"workspace_mib": 512, "optimization_level": 4}}
    bundle = build_tiny(tmp_path, engine=engine, limits={"max_batch_size": 3})
    script = (bundle / BUILD_SCRIPT).read_text()
    subprocess.run(["bash", "-n", str(bundle / BUILD_SCRIPT)], check=True)
    for graph in GRAPHS:
        assert f"--onnx={graph}/onnx/model.onnx --saveEngine={graph}/rank0.engine.partial" in script
    assert '--staticPlugins="$plugins" --stronglyTyped' in script
    assert "--builderOptimizationLevel=4 --memPoolSize=workspace:512 \\\n" in script
    draft = script[script.index("--onnx=draft") :]
    assert "--profile=0" in draft
    assert "--maxShapes=inputs_embeds:3x6x256" in draft
    assert "--maxShapes=inputs_embeds:3x512x256" in draft
    assert f"k_cache.0:{16 * (3 * 64 + 1)}x2x64" in draft


@pytest.mark.usefixtures("no_tensorrt")
@pytest.mark.parametrize(
    ("features", "told"),
    # from 10.3 on; before
    [("aliasedPluginIO1003", ["--preview=+aliasedPluginIO1003"]), ("profileSharing0806", [])],
)
def test_script_runs_trtexec_once_a_graph_and_names_what_is_missing(
    tmp_path: Path, features: str, told: list[str]
) -> None:
    bundle = build_tiny(tmp_path, engine=ENGINE)
    script, log = bundle / BUILD_SCRIPT, tmp_path / "log"
    trtexec = tmp_path / "trtexec"
    trtexec.write_text(
        f"#!/bin/bash\nif [ $1 = --help ]; then echo '  flag ::= {features}'; exit; fi\n"
        f'echo "$@" >> {log}\nfor a; do case $a in --saveEngine=*) : > "${{a#*=}}";; esac; done\n'
    )
    trtexec.chmod(0o755)

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        base = {"PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [script],
            env=base | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    plugins = str(log.with_name("plugins.so"))
    assert "export TRT_EAGLE3_PLUGINS" in run(TRTEXEC=str(trtexec)).stderr
    assert run(TRTEXEC=str(trtexec), TRT_EAGLE3_PLUGINS=plugins).returncode == 3
    Path(plugins).touch()
    assert run(TRTEXEC="/nowhere/trtexec", TRT_EAGLE3_PLUGINS=plugins).returncode == 3
    # as the caller, who stands elsewhere, names them
    assert run(TRTEXEC="./trtexec", TRT_EAGLE3_PLUGINS="plugins.so").returncode == 0
    runs = log.read_text().splitlines()
    assert len(runs) == len(GRAPHS)
    assert all([o for o in line.split() if o.startswith("--preview")] == told for line in runs)
    assert all((bundle / graph / "rank0.engine").is_file() for graph in GRAPHS)


def test_weights_by_reference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--weights reference: a TensorRT engine holds its weights"):
        build(tiny_config(engine=ENGINE), output=tmp_path, reference_weights=True)


# Config


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"backend": "tensorrt", "device": "cpu"}, "tensorrt runs on device: cuda, got cpu"),
        ({"backend": "torch", "residual": "float32"}, "residual: float32 is for backend: tensorrt"),
        (
            {"backend": "tensorrt", "tensorrt": {"optimization_level": 6}},
            "optimization_level: expected 5 or less, got 6",
        ),
        (
            {"backend": "tensorrt", "tensorrt": {"linear": "cublas"}},
            "linear: .*'auto', 'plugin' or 'tensorrt'",
        ),
    ],
)
def test_bad_engine_sections_are_refused(
    tmp_path: Path, engine: dict[str, object], said: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"name": "x", "target": {"checkpoint": "x"}, "engine": engine}))
    with pytest.raises(UserError, match=said):
        load_config(file)


@pytest.mark.parametrize(
    ("said", "dtype", "residual"),
    [
        ({}, "float16", "float32"),
        ({"dtype": "float16"}, "float16", "float32"),
        ({"residual": "compute"}, "float16", "compute"),
        ({"dtype": "bfloat16"}, "bfloat16", "compute"),
        ({"dtype": "float32"}, "float32", "compute"),
    ],
)
def test_tensorrt_means_cuda_and_float16_with_a_float32_residual_where_nothing_is_said(
    said: dict[str, str], dtype: str, residual: str
) -> None:
    raw = {"name": "x", "target": {"checkpoint": "x"}, "engine": {"backend": "tensorrt", **said}}
    engine = BuildConfig.model_validate(raw).engine
    assert (engine.device, engine.dtype, engine.residual) == ("cuda", dtype, residual)


# Profiles


@pytest.mark.parametrize("graph", GRAPHS)
def test_profiles_are_in_order_and_cover_the_limits(graph: str) -> None:
    config = tiny_config(engine=ENGINE, limits={"max_batch_size": 4, "max_kv_tokens": 2048})
    model = graphs()[graph]
    images = patch_ranges(4, config.limits.max_visual_tokens)
    for profile in graph_profiles(
        graph, model, config.engine, config.limits, TreeSizes(12, 4, 20), images
    ):
        assert profile.shapes.keys() == {i.name for i in model.graph.input}
        for name, (low, best, high) in profile.shapes.items():
            assert all(lo <= opt <= hi for lo, opt, hi in zip(low, best, high, strict=True)), (
                profile.name,
                name,
            )


def test_decode_steps_have_a_profile_of_their_own_before_prompts() -> None:
    config = tiny_config(engine=ENGINE, limits={"max_batch_size": 4, "max_kv_tokens": 2048})
    generation, context = graph_profiles(
        "draft", graphs()["draft"], config.engine, config.limits, TreeSizes(12, 4, 20)
    )
    assert generation.shapes["inputs_embeds"][2] == (4, 12, 256)
    assert generation.shapes["tree_mask"][2] == (4, 12, 40)
    assert context.shapes["inputs_embeds"][2] == (4, 512, 256)
    assert context.shapes["k_cache.0"][2] == (2048 + 16, 2, 64)


def test_vision_profile_takes_all_patches_in_one_frame_or_in_many() -> None:
    config = tiny_config(engine=ENGINE, limits={"max_visual_tokens": 512})
    images = patch_ranges(4, config.limits.max_visual_tokens)
    (profile,) = graph_profiles(
        "vision", graphs()["vision"], config.engine, config.limits, TreeSizes(), images
    )
    assert profile.shapes["patches"][2] == (2048, 1536)
    assert profile.shapes["frame_starts"] == ((2,), (2,), (64 + 1,))


# The builder


@pytest.mark.parametrize(
    ("version", "strong"), [("8.6.1", False), ("10.14.1", True), ("11.1.0", True)]
)
def test_build_asks_each_version_for_its_kind_of_typing(
    install: Install, tmp_path: Path, version: str, strong: bool
) -> None:
    trt = install(version)
    told: list[str] = []
    report = build(tiny_config(engine=ENGINE, draft=None), output=tmp_path, show=told.append)
    flags = trt.NetworkDefinitionCreationFlag
    assert trt.seen.network == 1 << (flags.STRONGLY_TYPED if strong else flags.EXPLICIT_BATCH)
    assert ("FP16" in trt.seen.settings.flags) is not strong
    assert "TF32" in trt.seen.settings.cleared
    assert trt.seen.settings.features == {
        "ALIASED_PLUGIN_IO_10_03" if strong else "PROFILE_SHARING_0806": True
    }
    steps = [f"target: building, {percent} %" for percent in (25, 50, 75, 100)]
    assert [line for line in told if "target: building" in line] == (steps if strong else [])
    assert report.engines is not None
    assert report.engines.built["target"].num_plugins == 1


def test_only_float32_nodes_are_held_to_float32_on_8_6(install: Install, tmp_path: Path) -> None:
    trt = install("8.6.0")
    config = tiny_config(engine=ENGINE)
    model = graphs(residual="float32")["target"]
    profiles = {
        "target": graph_profiles("target", model, config.engine, config.limits, TreeSizes(6, 1, 5))
    }
    folder = made_folder(tmp_path / "bundle", config)
    tensorrt_bundle.write_engines(
        folder, {"target": model}, profiles, config.engine, tmp_path / "cache"
    )
    precisions = {layer.name: layer.precision for layer in trt.seen.layers}
    assert precisions == {"embeds_stream/Mul": "float32", "layers.0.mlp.gate_up/Gemm": None}
    assert "OBEY_PRECISION_CONSTRAINTS" in trt.seen.settings.flags


def made_folder(folder: Path, config: BuildConfig) -> Path:
    (folder / "target").mkdir(parents=True)
    text = json.dumps({"build_config": {"engine": config.engine.model_dump(mode="json")}})
    (folder / "target" / "config.json").write_text(text)
    return folder


def test_built_bundle_holds_engines_facts_and_inspection_and_no_graphs(
    install: Install, tmp_path: Path
) -> None:
    install("10.14.1")
    path = build(tiny_config(engine=ENGINE), output=tmp_path).path
    for graph in GRAPHS:
        folder = EngineFolder(path / graph)
        assert folder.facts is not None
        assert (folder.facts.tensorrt, folder.facts.gpu_arch, folder.facts.num_bytes) == (
            "10.14.1",
            "sm90",
            4,
        )
        inspection = json.loads((path / graph / "inspection.json").read_text())
        assert inspection["plugins"] == {"AddRmsNorm": 1}
        assert not (path / graph / "onnx").exists()
    assert read_bundle(path).engine.versions["tensorrt"] == "10.14.1"
    assert (tmp_path / "timing.cache").read_bytes().endswith(b"+")


@pytest.mark.parametrize(
    ("version", "dtype", "linear", "expected"),
    [
        ("8.6.0", "float16", "auto", "plugin"),
        ("10.14.1", "float16", "auto", "tensorrt"),
        ("11.0.0", "bfloat16", "auto", "tensorrt"),
        ("8.6.0", "float16", "tensorrt", "tensorrt"),
        ("10.14.1", "bfloat16", "plugin", "plugin"),
        ("8.6.0", "float32", "plugin", "tensorrt"),  # the plugin is for 16 bits
    ],
)
def test_products_are_the_plugins_or_tensorrts_and_the_bundle_says_which(
    install: Install, tmp_path: Path, version: str, dtype: str, linear: str, expected: str
) -> None:
    trt = install(version)
    engine = {
        "backend": "tensorrt",
        "device": "cuda",
        "dtype": dtype,
        "tensorrt": {"linear": linear},
    }
    path = build(tiny_config(engine=engine, draft=None), output=tmp_path).path
    ops = {
        node.op_type
        for graph in trt.seen.graphs
        for node in onnx.load_from_string(graph).graph.node
    }
    assert ("Linear" in ops) is (expected == "plugin")
    facts = EngineFolder(path / "target").facts
    assert facts is not None
    assert facts.linear == expected


@pytest.mark.parametrize("plugin", ["Linear", "LinearFp8", "LinearInt8"])
@pytest.mark.parametrize(("copied", "refused"), [("weight", True), ("x", False), (None, False)])
def test_engine_that_copies_a_weight_of_linear_is_refused(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copied: str | None,
    refused: bool,
    plugin: str,
) -> None:
    tensors = [{"Name": "x"}, {"Name": "codes"}, {"Name": "weight"}]
    copy = {"Name": "copy", "LayerType": "Reformat", "Inputs": [], "Outputs": [{"Name": copied}]}
    product = {
        "Name": f"layers.0.mlp.gate_up/{plugin}",
        "LayerType": "PluginV2",
        "Inputs": tensors,
        "Outputs": [],
    }
    monkeypatch.setattr(fake, "LAYERS", [copy, product])
    install("8.6.0")
    if not refused:
        path = build(tiny_config(engine=ENGINE, draft=None), output=tmp_path).path
        inspection = json.loads((path / "target" / "inspection.json").read_text())
        assert inspection["plugins"] == {plugin: 1}
        return
    with pytest.raises(
        UserError, match=r"copies weight at every step.*Set engine\.tensorrt\.linear: tensorrt"
    ):
        build(tiny_config(engine=ENGINE, draft=None), output=tmp_path)


@pytest.mark.parametrize(
    ("copied", "early"),
    [("past_lengths", [1, None]), ("k_cache", [1, None]), ("q", [1]), (None, [1])],
)
def test_attention_reads_early_unless_the_engine_copies_what_it_would_read(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copied: str | None,
    early: list[int | None],
) -> None:
    copy = {"Name": "copy", "LayerType": "Reformat", "Inputs": [], "Outputs": [{"Name": copied}]}
    inputs = [{"Name": name} for name in OPS["TreeAttention"].inputs[""]]
    attention = {
        "Name": "layers.0/TreeAttention",
        "LayerType": "PluginV2",
        "Inputs": inputs,
        "Outputs": [],
    }
    monkeypatch.setattr(fake, "LAYERS", [copy, attention])
    trt = install("8.6.0")
    build(tiny_config(engine=ENGINE, draft=None), output=tmp_path)
    targets = [
        graph
        for graph in map(onnx.load_from_string, trt.seen.graphs)
        if graph.graph.name == "target"
    ]
    nodes = [next(n for n in graph.graph.node if n.op_type == "TreeAttention") for graph in targets]
    assert [
        next((a.i for a in node.attribute if a.name == "prefetch_safe"), None) for node in nodes
    ] == early


def test_objects_of_one_attempt_are_gone_before_the_next(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds the weights of a graph."""
    name = OPS["TreeAttention"].inputs[""][3]
    copy = {"Name": "copy", "LayerType": "Reformat", "Inputs": [], "Outputs": [{"Name": name}]}
    attention = {
        "Name": "layers.0/TreeAttention",
        "LayerType": "PluginV2",
        "Inputs": [{"Name": name} for name in OPS["TreeAttention"].inputs[""]],
        "Outputs": [],
    }
    monkeypatch.setattr(fake, "LAYERS", [copy, attention])
    trt = install("8.6.0")
    build(tiny_config(engine=ENGINE, draft=None), output=tmp_path)
    assert len(trt.seen.builders) > 2  # the target twice
    assert trt.seen.most_builders == 1


@pytest.mark.usefixtures("no_tensorrt")
@pytest.mark.parametrize(("linear", "expected"), [("auto", False), ("plugin", True)])
def test_graphs_left_to_trtexec_have_tensorrts_products_unless_told(
    tmp_path: Path, linear: str, expected: bool
) -> None:
    path = build(
        tiny_config(engine=ENGINE | {"tensorrt": {"linear": linear}}, draft=None), output=tmp_path
    ).path
    model = onnx.load(path / "target" / "onnx" / "model.onnx", load_external_data=False)
    assert ("Linear" in {node.op_type for node in model.graph.node}) is expected


def test_facts_of_an_older_bundle_are_refused_by_their_plugin_version(
    install: Install, tmp_path: Path
) -> None:
    install("10.14.1")
    folder = build(tiny_config(engine=ENGINE, draft=None), output=tmp_path).path / "target"
    config = json.loads((folder / "config.json").read_text())
    old = {name: value for name, value in config["engine"].items() if name != "linear"} | {
        "plugins": "1"
    }
    (folder / "config.json").write_text(json.dumps(config | {"engine": old}))
    with pytest.raises(
        UserError,
        match=rf"built for plugin version 1, this process has {PLUGIN_VERSION}\. Rebuild here",
    ):
        EngineFolder(folder).check()


def test_stripped_engines_keep_their_graphs_and_need_tensorrt_10(
    install: Install, tmp_path: Path
) -> None:
    engine = ENGINE | {"tensorrt": {"strip_weights": True, "refit": True, "workspace_mib": 64}}
    trt = install("10.14.1")
    path = build(tiny_config(engine=engine, draft=None), output=tmp_path).path
    assert {"STRIP_PLAN", "REFIT"} <= trt.seen.settings.flags
    assert trt.seen.settings.pools == {"WORKSPACE": 64 << 20}
    assert (path / "target" / "onnx" / "weights.bin").is_file()
    install("8.6.0")
    with pytest.raises(UserError, match="strip_weights needs TensorRT 10"):
        build(tiny_config(engine=engine, draft=None), output=tmp_path)


def test_bfloat16_needs_tensorrt_10(install: Install, tmp_path: Path) -> None:
    install("8.6.1")
    with pytest.raises(UserError, match=r"bfloat16 needs TensorRT 10 or later, this is 8\.6\.1"):
        build(
            tiny_config(engine={**ENGINE, "dtype": "bfloat16", "residual": "compute"}),
            output=tmp_path,
        )
    assert not list(tmp_path.glob("tiny*"))


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"parses": False}, "TensorRT cannot read the graph: node 3: no importer for Foo"),
        ({"builds": False}, "cannot build an engine: TensorRT: 4: no kernel fits"),
        ({"takes_shapes": False}, "profile generation: TensorRT: it gave no reason"),
    ],
)
def test_tensorrts_refusals_are_one_line(
    install: Install, tmp_path: Path, behaviour: dict[str, bool], said: str
) -> None:
    install("8.6.0", **behaviour)
    with pytest.raises(UserError, match=said) as caught:
        build(tiny_config(engine=ENGINE), output=tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("tiny*"))


# Facts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tensorrt": "8.6.0"},
            "built for TensorRT 8.6.0, this process has 10.14.1. Rebuild here: trt-eagle3 build",
        ),
        ({"gpu_arch": "sm80"}, "built for GPU architecture sm80, this process has sm90"),
        ({"plugins": "0"}, f"built for plugin version 0, this process has {PLUGIN_VERSION}"),
        ({"num_bytes": 5}, "expected 5 bytes, got 4"),
    ],
)
def test_engine_for_something_else_is_refused(
    install: Install, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    install("10.14.1")
    folder = build(tiny_config(engine=ENGINE, draft=None), output=tmp_path).path / "target"
    EngineFolder(folder).check()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"engine": config["engine"] | change}))
    with pytest.raises(UserError, match=said):
        EngineFolder(folder).check()


def test_doctor_says_what_a_bundle_was_built_for(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.14.1")
    path = build(tiny_config(engine=ENGINE), output=tmp_path).path
    works = Diagnosis((), tuple(Ability(name, ()) for name in ("onnxruntime", "tensorrt")))
    monkeypatch.setattr("trt_eagle3.commands.doctor.diagnose", lambda _: works)
    runner = CliRunner()
    assert runner.invoke(cli, ["doctor", str(path)], catch_exceptions=False).exit_code == 0
    install("10.3.0")
    with pytest.raises(
        UserError, match=r"built for TensorRT 10\.14\.1, this process has 10\.3\.0\. Rebuild here"
    ):
        runner.invoke(cli, ["doctor", str(path)], catch_exceptions=False)
    install("10.14.1")
    (path / "draft" / "rank0.engine").unlink()
    with pytest.raises(UserError, match="draft: its engine is not built yet"):
        runner.invoke(cli, ["doctor", str(path)], catch_exceptions=False)


def test_engine_gives_the_tensors_that_it_was_built_with_and_an_older_one_none(
    tmp_path: Path,
) -> None:
    folder = made_folder(tmp_path, tiny_config(engine=ENGINE)) / "target"
    backend = backend_named("tensorrt")
    assert backend.intermediates(folder) == frozenset()
    raw = json.loads((folder / "config.json").read_text())
    routers = ["layers.0.mlp.router_logits"]
    (folder / "config.json").write_text(json.dumps({**raw, "intermediates": routers}))
    assert backend.intermediates(folder) == frozenset(routers)


def test_damaged_engine_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        EngineFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="unreadable"):
        EngineFolder(tmp_path)


def test_old_tensorrt_and_missing_plugins_are_exit_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt("8.5.3"))
    registry.load_dialect.cache_clear()
    with pytest.raises(
        EnvironmentMissingError, match=r"TensorRT 8.5.3: too old.*8.6, 10.x or 11.x"
    ):
        registry.find_dialect()
    monkeypatch.setenv("TRT_EAGLE3_PLUGINS", str(tmp_path / "none.so"))
    dialect = registry.dialect_of("tensorrt", fake_tensorrt("8.6.1"))
    monkeypatch.setattr(registry, "load_dialect", lambda _: dialect)
    with pytest.raises(
        EnvironmentMissingError, match=r"cannot load the plugin library.*make plugins"
    ):
        tensorrt_plugins.load_plugins()
