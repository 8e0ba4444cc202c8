"""TensorRT for RTX by its bindings' signatures: what is asked of its builder, its runtime and this
machine. ``test_rtx_builder.py`` has its real builder.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto
from pydantic import ValidationError

from tests.engine.conftest import Install
from tests.engine.fake_tensorrt import RTX_LAYERS
from tests.engine.tensorrt_api import rtx_table, spans
from tests.engine.trt.test_dialects import COMMON, ROOM, reached_for
from tests.tiny import tiny_config
from trt_eagle3.cli import cli
from trt_eagle3.commands.doctor import Ability, Diagnosis
from trt_eagle3.config import TensorRTConfig, config_from_dict
from trt_eagle3.engine.builder.weight_quantiser import made_location
from trt_eagle3.engine.bundle.read import BUNDLE_KIND, read_bundle
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.engine.torch.capture.whole import CapturedGraphs
from trt_eagle3.engine.trt import folder as folder_module
from trt_eagle3.engine.trt import host_memory, plugins
from trt_eagle3.engine.trt.dialects import dialect as dialect_module
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.dialects import rtx as rtx_module
from trt_eagle3.engine.trt.dialects.registry import dialect_of, find_dialect, package_of
from trt_eagle3.engine.trt.dialects.rtx_log import read_build_log
from trt_eagle3.engine.trt.folder import EngineFolder
from trt_eagle3.engine.trt.ports import engine_ports
from trt_eagle3.engine.trt.session import TensorRTSession
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.pipeline import build

VERSION = "1.7.1.116"


def rtx_engine(**tensorrt: object) -> dict[str, object]:
    options = {"runtime": "rtx", "chips": ["sm89", "sm120"], **tensorrt}
    return {"backend": "tensorrt", "device": "cuda", "dtype": "float16", "tensorrt": options}


def rtx_config(**tensorrt: object) -> Any:
    return tiny_config(engine=rtx_engine(**tensorrt), draft=None)


@pytest.fixture
def rtx(install: Install, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for it, on a machine without a GPU."""
    trt = install(VERSION, timed=False)
    set_gpu(monkeypatch, None)
    return trt


def set_gpu(monkeypatch: pytest.MonkeyPatch, arch: str | None) -> None:
    for module in (dialect_module, folder_module, rtx_module):
        monkeypatch.setattr(module, "gpu_arch", lambda: arch)


# The config


@pytest.mark.parametrize(
    ("tensorrt", "said"),
    [
        ({"chips": ["sm89"]}, "chips: TensorRT builds only for this machine's GPU"),
        ({"runtime": "rtx", "chips": ["sm90"]}, "chips.0: .*'sm80', 'sm86', 'sm89', 'sm120'"),
        ({"runtime": "rtx", "chips": ["sm75"]}, "chips.0: "),
        ({"runtime": "rtx", "chips": ["sm89", "sm89"]}, "chips: expected each once, got"),
        ({"runtime": "trt"}, "runtime: .*'tensorrt' or 'rtx'"),
    ],
)
def test_config_with_wrong_chips_is_refused(tensorrt: dict[str, object], said: str) -> None:
    raw = {
        "name": "x",
        "target": {"checkpoint": "x"},
        "engine": {"backend": "tensorrt", "tensorrt": tensorrt},
    }
    with pytest.raises(UserError, match=said):
        config_from_dict(raw, "c.yaml")


def test_runtime_key_chooses_the_package() -> None:
    assert package_of(rtx_config().engine.tensorrt) == "tensorrt_rtx"
    assert package_of(TensorRTConfig()) == "tensorrt"


# Which version


@pytest.mark.parametrize(
    ("package", "version", "name"),
    [
        ("tensorrt_rtx", "1.7.1.116", "TensorRTForRTX"),
        ("tensorrt", "10.7.1", "TensorRT10"),
        ("tensorrt", "11.4.0", "TensorRT11"),
    ],
)
def test_dialect_follows_package_and_version(package: str, version: str, name: str) -> None:
    assert type(dialect_of(package, SimpleNamespace(__version__=version))).__name__ == name


@pytest.mark.parametrize(("version", "said"), [("1.6.0.1", "too old"), ("1.8.0.3", "too new")])
def test_other_minor_version_is_refused(version: str, said: str) -> None:
    with pytest.raises(
        EnvironmentMissingError,
        match=rf"TensorRT for RTX {version}: {said}.*pip install 'trt-eagle3\[rtx\]'",
    ):
        dialect_of("tensorrt_rtx", SimpleNamespace(__version__=version))


def test_missing_package_is_an_error_and_leaves_nothing_to_trtexec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry.load_dialect.cache_clear()
    monkeypatch.setitem(registry.__dict__, "import_module", missing_module)
    with pytest.raises(
        EnvironmentMissingError,
        match=r"TensorRT for RTX: no such module\. Install it: pip install 'trt-eagle3\[rtx\]'",
    ):
        build(rtx_config(), output=tmp_path)
    assert not list(tmp_path.glob("tiny*"))


def missing_module(_: str) -> None:
    raise ImportError("no such module")


@pytest.mark.parametrize(
    "module",
    [*COMMON, *(ROOM / "dialects" / name for name in ("v10.py", "v11.py", "rtx.py"))],
    ids=lambda path: path.name,
)
def test_what_is_reached_for_is_there(module: Path) -> None:
    """v10 asks for the size of memory under two names, of which only one is here."""
    there = {name for kind in rtx_table().values() for name in kind}
    known = there | {name for kind in spans().values() for name in kind}
    missing = (reached_for(module.read_text()) & known) - there - {"__init__"}
    assert missing <= (
        {"device_memory_size", "device_memory"} if module.name == "v10.py" else set()
    )


# Building


def test_build_names_the_chips_and_needs_no_gpu(rtx: Any, tmp_path: Path) -> None:
    told: list[str] = []
    report = build(rtx_config(), output=tmp_path, show=told.append)
    settings = rtx.seen.settings
    assert settings.chips == {0: "SM89", 1: "SM120"}
    assert rtx.seen.network == 1 << rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert settings.features == {"ALIASED_PLUGIN_IO_10_03": True}
    assert "TF32" in settings.cleared
    assert "REQUIRE_USER_ALLOCATION" in settings.flags
    assert settings.cache is None
    assert not list(tmp_path.rglob("timing.cache"))
    record = read_bundle(report.path).engine
    assert (record.gpu_arch, record.versions["tensorrt_rtx"]) == ("sm89+sm120", VERSION)
    assert "tensorrt" not in record.versions


def test_each_graph_is_built_once_and_never_prefetch_safe(rtx: Any, tmp_path: Path) -> None:
    build(rtx_config(), output=tmp_path)
    assert len(rtx.seen.graphs) == 2  # target and vision
    assert not any(b"prefetch_safe" in graph for graph in rtx.seen.graphs)


def test_facts_and_inspection_say_what_the_builder_logged(rtx: Any, tmp_path: Path) -> None:
    del rtx
    folder = build(rtx_config(), output=tmp_path).path / "target"
    facts = EngineFolder(folder).facts
    assert facts is not None
    assert (facts.package, facts.tensorrt, facts.gpu_arch) == (
        "tensorrt_rtx",
        VERSION,
        "sm89+sm120",
    )
    inspection = json.loads((folder / "inspection.json").read_text())
    assert inspection["tensorrt_rtx"] == VERSION
    assert inspection["plugins"] == {"AddRmsNorm": 1, "TreeAttention": 1}
    assert inspection["device_memory_bytes"] == 4096  # of the larger profile
    assert inspection["copied_inputs"] == []  # a copy that does nothing is none
    assert inspection["layers"][2] == {
        "Name": "layers.0.out/TreeAttention",
        "LayerType": "PluginV3",
        "Inputs": [{"Name": "k_cache.0"}],
        "Outputs": [{"Name": "k_cache_out.0"}],
        "Operators": [],
        "ScratchBytes": 2304,
    }


@pytest.mark.parametrize("profile", ["", " [profile 1]"])
def test_engine_that_copies_a_cache_is_refused(rtx: Any, tmp_path: Path, profile: str) -> None:
    copy = ("copy", "Reformat", f"k_cache.0{profile}", f"copied{profile}", "")
    rtx.seen.layers_logged = (*RTX_LAYERS, copy)
    with pytest.raises(UserError, match=r"copies k_cache\.0 at every step instead of updating"):
        build(rtx_config(), output=tmp_path)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [("int4", TensorProto.INT4), ("int8", TensorProto.INT8), ("fp8", TensorProto.FLOAT8E4M3FN)],
)
def test_weights_quantised_at_build_stay_so_in_the_engine(
    rtx: Any, tmp_path: Path, weights: str, kind: int
) -> None:
    engine = rtx_engine() | {"dtype": "bfloat16", "residual": "compute", "weights": weights}
    bundle = build(tiny_config(engine=engine, draft=None), output=tmp_path).path
    target = next(
        model
        for model in map(onnx.load_from_string, rtx.seen.graphs)
        if model.graph.name == "target"
    )
    ops = [node.op_type for node in target.graph.node]
    assert ops.count("DequantizeLinear") == 8 * 4
    assert sum(proto.data_type == kind for proto in target.graph.initializer) == 8 * 4
    assert (bundle / made_location(weights)).is_file()  # what ``validate`` reads


def test_weights_that_its_engines_or_chips_do_not_hold_are_refused() -> None:
    old = rtx_engine(chips=["sm86", "sm120"])
    with pytest.raises(ValidationError, match=r"weights: fp8 and tensorrt\.chips: sm86 has no FP8"):
        tiny_config(engine=old | {"weights": "fp8"})
    plugin = rtx_engine(chips=["sm86"], linear="plugin")
    assert tiny_config(engine=plugin | {"weights": "fp8"}).engine.weights == "fp8"


def test_engine_that_is_refused_leaves_no_file(rtx: Any, tmp_path: Path) -> None:
    del rtx
    builder = SimpleNamespace(build_serialized_network_to_stream=lambda *_: False)
    assert find_dialect().write_engine(builder, None, None, tmp_path / "rank0.engine") is False
    assert not list(tmp_path.iterdir())


def test_full_disk_is_told_though_the_bindings_lose_it(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rtx

    def write(_: bytes) -> int:
        raise OSError(28, "No space left on device")

    def build_to(network: Any, config: Any, writer: Any) -> bool:
        del network, config
        return writer.write(b"half") == 4

    full = nullcontext(SimpleNamespace(write=write))
    monkeypatch.setattr(rtx_module, "atomic_file", lambda _: full)
    builder = SimpleNamespace(build_serialized_network_to_stream=build_to)
    with pytest.raises(OSError, match="No space left"):
        find_dialect().write_engine(builder, None, None, tmp_path / "rank0.engine")


def test_log_of_an_earlier_build_is_not_read_again(rtx: Any, tmp_path: Path) -> None:
    build(rtx_config(), output=tmp_path)
    rtx.seen.layers_logged = RTX_LAYERS[:1]
    report = build(rtx_config(), output=tmp_path)
    assert report.engines is not None
    assert report.engines.built["target"].num_layers == 1


def test_log_without_layers_is_an_engine_of_none() -> None:
    assert read_build_log(["Total Activation Memory: 7 bytes"]).layers == []


def test_build_without_gpu_and_chips_asks_for_chips(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"chips: this machine has no GPU.*sm80, sm86, sm89, sm120"):
        build(rtx_config(chips=[]), output=tmp_path)
    set_gpu(monkeypatch, "sm89")
    build(rtx_config(chips=[]), output=tmp_path)
    assert rtx.seen.settings.chips == {0: "SM89"}
    set_gpu(monkeypatch, "sm90")
    with pytest.raises(UserError, match=r"got this machine's sm90\. Name one of these"):
        build(rtx_config(chips=[]), output=tmp_path)


@pytest.mark.parametrize("key", ["refit", "strip_weights"])
def test_exchangeable_weights_need_a_driver(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    with pytest.raises(UserError, match=rf"tensorrt\.{key}: TensorRT for RTX needs a GPU"):
        build(rtx_config(**{key: True}), output=tmp_path)
    set_gpu(monkeypatch, "sm89")
    build(rtx_config(**{key: True}), output=tmp_path)
    assert {"REFIT", "STRIP_PLAN"} & rtx.seen.settings.flags


def test_memory_that_a_build_takes_is_said_before_it_begins(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_MIN_REPORTED", 0)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 1 << 20)
    told: list[str] = []
    build(rtx_config(), output=tmp_path, show=told.append)
    before = told[: told.index("target: reading the graph")]
    assert "target: takes up to 0.0 GB of memory" in before
    assert "target: its build takes up to 0.0 GB of memory, 0.0 GB are free" in caplog.text
    assert find_dialect().host_bytes(1000) == 2300
    assert rtx.seen.graphs


def test_free_memory_is_what_the_control_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4096 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.free_host_bytes() == 4096 << 10
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, free in (("max", 4096 << 10), ("3000", 2000), ("10", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert host_memory.free_host_bytes() == free


# The name that the parser asks for


def test_parser_without_the_librarys_name_is_refused_before_it_parses(
    rtx: Any, tmp_path: Path
) -> None:
    rtx.__file__ = str(tmp_path / "tensorrt_rtx" / "__init__.py")
    companion = tmp_path / "rtx" / "libtensorrt_rtx.so"
    with pytest.raises(EnvironmentMissingError, match=rf"{companion}: not found.*make plugins"):
        find_dialect().prepare_parser(companion)


def test_companion_lies_beside_the_plugins_or_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libtrt_eagle3_plugins.so"
    assert plugins.companion_path("tensorrt", library) is None
    assert plugins.companion_path("tensorrt_rtx", library) == tmp_path / "rtx/libtensorrt_rtx.so"
    monkeypatch.setenv("TRT_EAGLE3_PARSER_NAME", "/other/name.so")
    assert plugins.companion_path("tensorrt_rtx", library) == Path("/other/name.so")


def test_deployed_model_gets_the_companion_too(tmp_path: Path) -> None:
    config = rtx_config(plugin_library=str(tmp_path / "libtrt_eagle3_plugins.so")).engine
    (tmp_path / "rtx").mkdir()
    (tmp_path / "rtx" / "libtensorrt_rtx.so").touch()
    found = {
        library.variable: library.path for library in backend_named("tensorrt").libraries(config)
    }
    assert found["TRT_EAGLE3_PARSER_NAME"] == tmp_path / "rtx" / "libtensorrt_rtx.so"


# The bundle


def test_bundle_runs_on_each_of_its_chips_and_no_other(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rtx
    folder = EngineFolder(build(rtx_config(), output=tmp_path).path / "target")
    for arch in ("sm89", "sm120"):
        set_gpu(monkeypatch, arch)
        folder.check()
    for arch in ("sm90", "sm12", "sm8"):
        set_gpu(monkeypatch, arch)
        with pytest.raises(UserError, match=rf"GPU architecture sm89\+sm120, .* has {arch}\. "):
            folder.check()


def test_bundle_of_another_patch_is_refused(
    rtx: Any, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rtx
    folder = EngineFolder(build(rtx_config(), output=tmp_path).path / "target")
    install("1.7.2.9")
    set_gpu(monkeypatch, "sm89")
    with pytest.raises(
        UserError, match=r"built for TensorRT for RTX 1\.7\.1\.116, this process has 1\.7\.2\.9"
    ):
        folder.check()


def test_doctor_says_what_the_bundle_is(
    rtx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rtx
    path = build(rtx_config(), output=tmp_path).path
    works = Diagnosis((), (Ability("tensorrt-rtx", ()),))
    monkeypatch.setattr("trt_eagle3.commands.doctor.diagnose", lambda _: works)
    set_gpu(monkeypatch, "sm120")
    done = CliRunner().invoke(cli, ["doctor", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "built by TensorRT for RTX 1.7.1.116 for sm89, sm120" in done.output


def test_what_a_bundle_needs_is_the_other_package() -> None:
    backend, config = backend_named("tensorrt"), rtx_config().engine
    names = [need.name for need in backend.requirements()[backend.requirement(config)]]
    assert names == ["torch", "GPU", "TensorRT for RTX", "plugin library"]
    ahead = [need.name for need in backend.requirements()["engines for rtx"]]
    assert "GPU" not in ahead


def test_kernels_compiled_at_load_do_not_make_a_bundle_foreign() -> None:
    assert re.fullmatch(BUNDLE_KIND.additions, "target/runtime.cache")
    assert not re.fullmatch(BUNDLE_KIND.additions, "other/runtime.cache")


# Running


def test_contexts_share_a_configuration_and_a_cache(rtx: Any, tmp_path: Path) -> None:
    dialect, file = find_dialect(), tmp_path / "runtime.cache"
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    options = dialect.runtime_options(engine, file)
    strategies = rtx.DynamicShapesKernelSpecializationStrategy
    for captured, strategy in ((False, strategies.LAZY), (True, strategies.EAGER)):
        assert dialect.new_context(engine, 1 << 20, 8192, 1, 7, options, captured=captured)
        context = rtx.seen.contexts[-1]
        config = context.strategy._made  # the one argument of the stand-in: here a configuration
        assert config.dynamic_shapes_kernel_specialization_strategy == strategy
        assert (config.allocation, context.memory) == ("USER_MANAGED", (1 << 20, 8192))
        assert config.cache._made is rtx.seen.caches[0]
    assert len(rtx.seen.caches) == 1


def test_compiled_kernels_are_kept_beside_the_engine(rtx: Any, tmp_path: Path) -> None:
    dialect, file = find_dialect(), tmp_path / "runtime.cache"
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    dialect.keep_compiled(dialect.runtime_options(engine, file))
    assert file.read_bytes() == b"mine"
    options = dialect.runtime_options(engine, file)
    assert rtx.seen.caches[-1].kernels == [b"mine"]
    written = file.stat().st_mtime_ns
    dialect.keep_compiled(options)  # nothing new
    assert file.stat().st_mtime_ns == written
    rtx.seen.caches[-1].kernels.append(b"+1")
    dialect.keep_compiled(options)
    assert file.read_bytes() == b"mine+1"


def test_cache_of_another_driver_begins_anew(rtx: Any, tmp_path: Path) -> None:
    dialect, file = find_dialect(), tmp_path / "runtime.cache"
    file.write_bytes(b"othr")
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    dialect.keep_compiled(dialect.runtime_options(engine, file))
    assert file.read_bytes() == b"mine"
    assert rtx.seen.caches


def test_cache_that_cannot_be_written_stops_nothing(rtx: Any, tmp_path: Path) -> None:
    del rtx
    dialect = find_dialect()
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    dialect.keep_compiled(
        dialect.runtime_options(engine, tmp_path / "gone" / "x" / "runtime.cache")
    )


@pytest.mark.parametrize("captures", [True, False])
def test_context_is_asked_whether_it_can_be_captured(install: Install, captures: bool) -> None:
    install(VERSION, captures=captures)
    dialect = find_dialect()
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    options = dialect.runtime_options(engine, Path("/nowhere/runtime.cache"))
    context = dialect.new_context(engine, 1 << 20, 8192, 0, 7, options, captured=True)
    assert dialect.is_capturable(context, 7) is captures


@pytest.fixture
def session(rtx: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TensorRTSession:
    """One over the stand-in's engine, with the CPU for a GPU: what it enqueues adds one."""
    del rtx
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **_: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    dialect = find_dialect()
    engine = dialect.create("Runtime").deserialize_cuda_engine(b"plan")
    made = TensorRTSession.__new__(TensorRTSession)
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    inputs, outputs = engine_ports(dialect.trt, engine)
    made.__dict__.update(
        {
            "_file": tmp_path / "rank0.engine",
            "_dialect": dialect,
            "_engine": engine,
            "_inputs": inputs,
            "_outputs": outputs,
            "_states": (),
            "_bound": {},
            "_captured": CapturedGraphs(),
            "_captures": True,
            "_options": dialect.runtime_options(engine, tmp_path / "runtime.cache"),
            "_contexts": {},
            "_stream": stream,
            "_memory": torch.empty(4096, dtype=torch.uint8),
            "_enqueue": lambda _, given: {"y": given["x"] + 1},
        }
    )
    return made


def test_session_runs_on_where_nothing_can_be_captured(
    session: TensorRTSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session._dialect, "is_capturable", lambda *_: False)
    for step in range(5):
        x = torch.full((2, 4), step, dtype=torch.float16)
        assert torch.equal(session.run({"x": x})["y"], x + 1)
    assert caplog.text.count("cannot be captured in CUDA graphs") == 1
    trt = session._dialect.trt
    assert len(trt.seen.contexts) == 2  # one of the profile, and one for the capture that was not
    assert (session._file.parent / "runtime.cache").read_bytes() == b"mine"


def test_session_captures_with_kernels_that_are_compiled_before(
    session: TensorRTSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    make = session._new_context

    def note(profile: int, *, captured: bool = False) -> Any:
        asked.append(captured)
        return make(profile, captured=captured)

    def graph() -> None:
        raise RuntimeError("captured now")

    monkeypatch.setattr(session, "_new_context", note)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    x = torch.zeros(2, 4, dtype=torch.float16)
    session.run({"x": x})
    session.run({"x": x})
    with pytest.raises(RuntimeError, match="captured now"):
        session.run({"x": x})
    assert asked == [False, True]
