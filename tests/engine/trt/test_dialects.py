"""What our code asks of TensorRT, against the signatures of each version."""

from __future__ import annotations

import ast
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trt_eagle3
from tests.engine.conftest import Install
from tests.engine.tensorrt_api import TAGS, Strict, members, spans
from tests.tiny import tiny_config
from trt_eagle3.config import TensorRTConfig
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.trt import folder as folder_module
from trt_eagle3.engine.trt.dialects import dialect as dialect_module
from trt_eagle3.engine.trt.dialects import registry
from trt_eagle3.engine.trt.dialects.dialect import Inspection
from trt_eagle3.engine.trt.dialects.registry import dialect_of, find_dialect
from trt_eagle3.engine.trt.dialects.v11 import TensorRT11
from trt_eagle3.engine.trt.folder import EngineFolder
from trt_eagle3.engine.trt.ports import Port, check_states, engine_ports
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.pipeline import build
from trt_eagle3.spec import StateSpec

ENGINE: dict[str, object] = {
    "backend": "tensorrt",
    "device": "cuda",
    "dtype": "float16",
    "residual": "float32",
}
PACKAGE = Path(trt_eagle3.__file__).parent
ROOM = PACKAGE / "engine" / "trt"
VERSIONS = [tag.removeprefix("v") for tag in TAGS]


# Outside the dialects: what every version has


def reached_for(source: str) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def named(source: str) -> set[str]:
    """Of what ``source`` says without a dot before it."""
    tree = ast.walk(ast.parse(source))
    return {getattr(node, "arg", None) or getattr(node, "id", "") for node in tree}


def not_in_every_version(source: str) -> set[str]:
    """Names that ``source`` reaches for, and that TensorRT has in some versions only."""
    known = {name for kind in spans().values() for name in kind}
    everywhere = [{name for kind in spans() for name in members(kind, tag)} for tag in TAGS]
    return {
        name
        for name in reached_for(source) & known
        if not all(name in names for names in everywhere)
    }


def called_otherwise(source: str) -> set[str]:
    """Methods that ``source`` reaches for, and that take no arguments the same way in every
    version.
    """
    found = set()
    for kind in spans():
        for name in reached_for(source):
            forms = [members(kind, tag).get(name) for tag in TAGS]
            if all(isinstance(form, list) for form in forms):
                same = [
                    form for form in forms[0] or () if all(form in (other or ()) for other in forms)
                ]
                found |= {f"{kind}.{name}"} if not same else set()
    return found


COMMON = [
    path
    for path in (*ROOM.glob("*.py"), ROOM / "dialects" / "dialect.py")
    if {"trt", "dialect", "_dialect"} & {*reached_for(path.read_text()), *named(path.read_text())}
]


@pytest.mark.parametrize("module", sorted(COMMON), ids=lambda path: path.name)
def test_only_dialects_use_what_versions_have_otherwise(module: Path) -> None:
    assert len(COMMON) > 6
    assert not_in_every_version(module.read_text()) == set()
    assert called_otherwise(module.read_text()) == set()


def knows_tensorrt(source: str) -> bool:
    """Whether ``source`` imports it or asks for its version's parts."""
    if not any(word in source for word in ("tensorrt", "major", "__version__")):
        return False  # nothing below can be in it, and parsing it takes longest
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    asked = {"major", "__version__"} & reached_for(source) and "torch.__version__" not in source
    return "tensorrt" in {name.partition(".")[0] for name in names} or bool(asked)


def test_tensorrt_and_its_version_are_known_to_dialects_only() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if ROOM / "dialects" not in file.parents]
    assert len(files) > 100
    found = {str(file.relative_to(PACKAGE)) for file in files if knows_tensorrt(file.read_text())}
    assert found <= {"parity/reference/processor.py"}  # the version of transformers
    assert knows_tensorrt("import tensorrt as trt")
    assert knows_tensorrt("x = dialect.trt.__version__ < y")


@pytest.mark.parametrize(
    ("file", "tags"),
    [
        ("v8_6.py", [tag for tag in TAGS if tag.startswith("v8.")]),
        ("v10.py", [tag for tag in TAGS if tag.startswith("v10.")]),
        ("v11.py", [tag for tag in TAGS if tag.startswith("v11.")]),
    ],
)
def test_dialect_reaches_for_what_all_its_versions_have(file: str, tags: list[str]) -> None:
    """Two names of v10 are asked of objects that may have neither (its ``device_bytes`` and
    ``give_memory``): none of them is an attribute in the source.
    """
    wanted = reached_for((ROOM / "dialects" / file).read_text())
    known = {name for kind in spans().values() for name in kind}
    for tag in tags:
        there = {name for kind in spans() for name in members(kind, tag)}
        assert (wanted & known) - there == set(), tag


def test_names_of_some_versions_are_found_out() -> None:
    source = "engine.device_memory_size; engine.num_io_tensors; flags.FP16; nothing.of_tensorrt"
    assert not_in_every_version(source) == {"device_memory_size", "FP16"}
    assert called_otherwise("engine.create_execution_context; engine.get_tensor_name") == {
        "ICudaEngine.create_execution_context"
    }


# In the dialects: as each version has it


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_builds_with_its_own_names(
    install: Install, tmp_path: Path, version: str
) -> None:
    trt = install(version)
    options = {"refit": True, "workspace_mib": 64, "strip_weights": version != "8.6.1"}
    engine = ENGINE | {"tensorrt": options}
    report = build(tiny_config(engine=engine, draft=None), output=tmp_path)
    assert report.engines is not None
    assert report.engines.built["target"].device_bytes == 4096
    aliases = hasattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03")
    assert trt.seen.settings.features.get("ALIASED_PLUGIN_IO_10_03", False) is aliases


@pytest.mark.parametrize("version", VERSIONS)
def test_contexts_use_the_memory_that_they_are_given(install: Install, version: str) -> None:
    trt = install(version)
    dialect, engine = find_dialect(), new_engine()
    assert dialect.device_bytes(engine) == 4096
    assert dialect.new_context(engine, 1 << 20, 8192, 1, 7) is not None
    context = trt.seen.contexts[-1]
    assert context.profile == (1, 7)
    if version == "8.6.1":
        assert (context.strategy, context.device_memory) == (None, 1 << 20)
    else:
        assert context.strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        given = context.device_memory if version == "10.0.1" else context.memory
        assert given == (1 << 20 if version == "10.0.1" else (1 << 20, 8192))


@pytest.mark.parametrize("version", VERSIONS)
def test_inputs_and_outputs_are_read_with_their_ranges(install: Install, version: str) -> None:
    trt = install(version)
    inputs, outputs = engine_ports(trt, new_engine())
    ranges = (((1, 4), (3, 4)),) * 2
    assert inputs == {"x": Port("x", torch.float16, (-1, 4), ranges)}
    assert outputs == {"y": Port("y", torch.float16, (-1, 4))}
    assert inputs["x"].fits((3, 4), 1)
    assert not inputs["x"].fits((4, 4), 1)


def test_caches_are_one_tensor_for_input_and_output() -> None:
    cache, other = torch.zeros(4), torch.zeros(4)
    states = [StateSpec("k_cache.0", "paged", (4,), "float32")]
    check_states(states, {"k_cache.0": cache, "k_cache_out.0": cache})
    for bound in (
        {},
        {"k_cache.0": cache},
        {"k_cache_out.0": cache},
        {"k_cache.0": cache, "k_cache_out.0": other},
    ):
        with pytest.raises(
            UserError, match=r"k_cache_out\.0: bind one tensor to it and to k_cache\.0"
        ):
            check_states(states, bound)


@pytest.mark.parametrize("version", ["8.6.1", "11.1"])
def test_refused_profile_is_no_context(install: Install, version: str) -> None:
    install(version, takes_profile=False)
    assert find_dialect().new_context(new_engine(), 1 << 20, 8192, 5, 7) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_creators_are_looked_up_as_the_registry_has_it(install: Install, version: str) -> None:
    install(version)
    assert find_dialect().find_creator("Linear", "2") == ("Linear", "2", "")


def test_interrupted_build_stops_at_once_and_leaves_nothing(
    install: Install, tmp_path: Path
) -> None:
    install("11.1", goes_on=False)
    told: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_config(engine=ENGINE, draft=None), output=tmp_path, show=told.append)
    assert signal.getsignal(signal.SIGINT) is before
    assert told[-1] == "target: building, 50 %"
    assert not list(tmp_path.glob("tiny*"))


def test_timing_cache_of_another_gpu_is_left_aside(install: Install, tmp_path: Path) -> None:
    (tmp_path / "timing.cache").write_bytes(b"other")
    install("10.14.1", takes_cache=False)
    build(tiny_config(engine=ENGINE, draft=None), output=tmp_path)
    assert (tmp_path / "timing.cache").read_bytes() == b"+"


@pytest.mark.parametrize("kind", ["Builder", "Runtime"])
def test_cuda_that_does_not_start_is_one_line(install: Install, kind: str) -> None:
    install("11.1", starts=False)
    with pytest.raises(
        EnvironmentMissingError, match=r"TensorRT 11\.1: cannot make a .*error: 35.*nvidia-smi"
    ):
        find_dialect().create(kind)


def new_engine() -> Any:
    return find_dialect().create("Runtime").deserialize_cuda_engine(b"plan")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("8.6.1", "TensorRT86"),
        ("9.3.0", "TensorRT86"),
        ("10.0.1", "TensorRT10"),
        ("10.16.2", "TensorRT10"),
        ("11.1.0", "TensorRT11"),
        ("12.0.0", "TensorRT11"),
    ],
)
def test_version_is_spoken_to_in_the_dialect_it_began_with(version: str, name: str) -> None:
    dialect = dialect_of("tensorrt", SimpleNamespace(__version__=version))
    assert type(dialect).__name__ == name


# One that builds for several GPUs on a machine without one, and times nothing


class Ahead(TensorRT11):
    prefetch_safe = False
    times_kernels = False

    def build_arch(self, config: TensorRTConfig) -> str:
        del config
        return "sm89+sm120"

    def runs_on(self, built: str, arch: str) -> bool:
        return arch in built.split("+")

    def inspect(self, file: Path) -> Inspection:
        del file
        return Inspection(["layers.0.mlp/SiluMul"], 17)


def test_dialect_that_needs_no_gpu_is_one_class(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = Ahead("tensorrt", install("11.1", timed=False))
    monkeypatch.setattr(registry, "load_dialect", lambda _: dialect)
    monkeypatch.setattr(dialect_module, "gpu_arch", lambda: None)
    report = build(tiny_config(engine=ENGINE, draft=None), output=tmp_path)
    assert report.engines is not None
    assert (report.engines.built["target"].num_plugins, report.engines.missing) == (1, None)
    assert read_bundle(report.path).engine.gpu_arch == "sm89+sm120"
    assert not (tmp_path / "timing.cache").exists()
    assert len(dialect.trt.seen.graphs) == 2  # none was built twice
    monkeypatch.setattr(folder_module, "gpu_arch", lambda: "sm120")
    EngineFolder(report.path / "target").check()
    monkeypatch.setattr(folder_module, "gpu_arch", lambda: "sm90")
    with pytest.raises(UserError, match=r"built for GPU architecture sm89\+sm120, .* has sm90"):
        EngineFolder(report.path / "target").check()


# The stand-in refuses what TensorRT would


def test_stand_in_has_no_more_than_the_version() -> None:
    engine = Strict(
        "ICudaEngine",
        "v11.1",
        SimpleNamespace(get_tensor_name=dict, device_memory_size=1, num_layers=2),
    )
    assert engine.get_tensor_name(index=3) == {"index": 3}
    for wrong in (
        engine.get_tensor_name,
        lambda: engine.get_tensor_name(name=3),
        lambda: engine.get_tensor_name(1, 2),
    ):
        with pytest.raises(TypeError, match=r"ICudaEngine\.get_tensor_name"):
            wrong()
    with pytest.raises(AttributeError, match=r"no device_memory_size in TensorRT v11\.1"):
        _ = engine.device_memory_size
    with pytest.raises(AttributeError, match="num_layers cannot be set"):
        engine.num_layers = 3


def test_table_knows_when_names_came_and_went() -> None:
    assert "device_memory_size" in members("ICudaEngine", "v10.16")
    assert "FP16" not in members("BuilderFlag", "v11.0")
    assert members("IOptimizationProfile", "v11.1")["set_shape"] == [["input", "min", "opt", "max"]]
    assert members("IBuilderConfig", "v10.0.1")["progress_monitor"] == "writable"
