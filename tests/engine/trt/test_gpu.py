"""TensorRT engines of the tiny pair against the torch session, on a GPU.

With xdist: ``-n 3 --dist loadgroup``.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from tasks import examples
from torch import Tensor

import trt_eagle3
from tests.graph.test_trt_export import GRAPHS, ROWS, graphs, inputs_of, written
from tests.tiny import ROOT, build_tiny, build_tiny_moe, tiny_config
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.engine.runtime.session import Session, open_session
from trt_eagle3.engine.trt.build import build_engine
from trt_eagle3.engine.trt.folder import ENGINE_FILE, EngineFolder, describe_engine
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.engine.trt.session import TensorRTSession
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.frames import patch_ranges
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.graph.states import encode_states, read_states
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.graph.word_states import with_word_states
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.record.engine import RecordingEngine

pytestmark = pytest.mark.trt

# Largest difference over largest value, against the torch session in float32 on the same inputs.
TOLERANCE = {"float32": 1e-5, "float16": 1e-2}
FAULT_FLOOR = {"float32": 20 * TOLERANCE["float32"], "float16": 10 * TOLERANCE["float16"]}
PROMPTS = 12
LIMITS = {"max_batch_size": 2}
TORCH = {"backend": "torch", "device": "cuda"}
RESIDUAL = {"float32": "compute", "float16": "float32"}


def engine_of(dtype: str, linear: str = "plugin", **tensorrt: object) -> dict[str, object]:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": dtype, "residual": RESIDUAL[dtype]}
    return engine | {"tensorrt": {"linear": linear, **tensorrt}}


def quick_engine(dtype: str, **engine: object) -> dict[str, object]:
    """With the first kernels that will do: timing those of the vision tower takes minutes."""
    return engine_of(dtype, "auto", optimization_level=0) | engine


class Bundles:
    """Bundles of the tiny pair, each built when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def get(self, name: str, **sections: dict[str, object]) -> Path:
        if name not in self._made:
            self._made[name] = build_tiny(self._folder / name, limits=LIMITS, **sections)
        return self._made[name]

    def torch(self) -> Path:
        return self.get("torch", engine=TORCH)

    def tensorrt(self, dtype: str, linear: str = "plugin") -> Path:
        return self.get(f"{dtype}_{linear}", engine=engine_of(dtype, linear))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pytest.importorskip("tensorrt")
    return Bundles(tmp_path_factory.mktemp("engines"))


def bound(
    session: Session, inputs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give ``session`` copies of the caches in ``inputs``; returns these and the other inputs."""
    caches = {state.name: inputs[state.name].cuda() for state in session.states}
    for state in session.states:
        session.bind(state.name, caches[state.name])
        session.bind(state.output_name, caches[state.name])
    return caches, {name: tensor for name, tensor in inputs.items() if name not in caches}


def outputs(session: Session, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All outputs, caches included, of the fourth run: by then the shapes are captured."""
    caches, rest = bound(session, inputs)
    for _ in range(4):
        found = session.run(rest)
    torch.cuda.synchronize()
    return {name: t.float().clone() for name, t in {**found, **caches}.items()}


@cache
def state_names() -> frozenset[str]:
    models = graphs("float32").values()
    return frozenset(state.name for model in models for state in read_states(model))


def real(name: str, value: Tensor) -> Tensor:
    """Without what padding leaves: page 0, and the fifth token of the second row."""
    if name in state_names():
        return value[16:]
    return value[:, : ROWS - 1] if name in {"aux_hidden_states", "features_out"} else value


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: relative_error(real(name, found[name]), real(name, expected[name]))
        for name in expected
    }


def reference(bundle: Path, graph: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {name: t.float() if t.is_floating_point() else t for name, t in inputs.items()}
    return outputs(
        open_session("torch", bundle / graph / "model.onnx", bundle, device="cuda"), wide
    )


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("dtype", "linear"),
    [
        # products are TensorRT's there
        pytest.param("float32", "plugin", marks=pytest.mark.xdist_group("float32")),
        pytest.param("float16", "plugin", marks=pytest.mark.xdist_group("float16")),
        pytest.param("float16", "tensorrt", marks=pytest.mark.xdist_group("products")),
    ],
)
def test_every_output_agrees_with_the_torch_session(
    bundles: Bundles, dtype: str, linear: str, graph: str
) -> None:
    inputs = inputs_of(graph, getattr(torch, dtype))
    session = open_session(
        "tensorrt", bundles.tensorrt(dtype, linear) / graph / "model.onnx", Path(), device="cuda"
    )
    found = errors(outputs(session, inputs), reference(bundles.torch(), graph, inputs))
    print(
        dtype,
        linear,
        graph,
        {name: f"{error:.1e}" for name, error in found.items() if name not in state_names()},
        max(found.values()),
    )
    assert max(found.values()) < TOLERANCE[dtype], found


@pytest.mark.parametrize(
    ("dtype", "linear", "expected"),
    [
        pytest.param("float32", "plugin", 0, marks=pytest.mark.xdist_group("float32")),
        pytest.param("float16", "plugin", 5, marks=pytest.mark.xdist_group("float16")),
        pytest.param("float16", "tensorrt", 0, marks=pytest.mark.xdist_group("products")),
    ],
)
def test_products_of_the_draft_are_whose_the_config_says(
    bundles: Bundles, dtype: str, linear: str, expected: int
) -> None:
    folder = bundles.tensorrt(dtype, linear) / "draft"
    inspection = json.loads((folder / "inspection.json").read_text())
    profiles, counts = len(inspection["profiles"]), inspection["plugins"]
    assert counts.get("Linear", 0) in {expected, expected * profiles}, counts
    assert counts["SiluMul"] in {1, profiles}, counts
    found, num_bytes = EngineFolder(folder), (folder / ENGINE_FILE).stat().st_size
    by_plugin = linear == "plugin" and dtype != "float32"
    assert found.facts == describe_engine(found.config.tensorrt, num_bytes, linear=by_plugin)


def answers(bundle: Path, *, speculation: bool) -> list[tuple[int, ...]]:
    found = []
    engine = trt_eagle3.load(bundle)
    for example in examples("heldout", 11, PROMPTS):
        videos = [list(example.frames)] if example.frames else []
        options = {"images": list(example.images), "videos": videos, "max_tokens": 64}
        found.append(engine.generate(example.prompt, speculation=speculation, **options).token_ids)
    return found


@pytest.mark.xdist_group("float32")
def test_float32_engines_give_the_torch_sessions_tokens(bundles: Bundles) -> None:
    plain = answers(bundles.torch(), speculation=False)
    assert answers(bundles.tensorrt("float32"), speculation=False) == plain
    assert answers(bundles.tensorrt("float32"), speculation=True) == plain


@pytest.mark.xdist_group("float16")
def test_float32_engines_of_a_block_draft_give_the_torch_sessions_tokens(tmp_path: Path) -> None:
    """Their graphs have windows, where a draft's layers slide."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pytest.importorskip("tensorrt")
    hybrid = ROOT / "examples/tiny_hybrid"
    sections = {"limits": LIMITS, "speculation": {"steps": 7}, "target": hybrid / "target"}
    block = sections | {"draft": hybrid / "dflash2"}
    plain = answers(build_tiny(tmp_path / "torch", engine=TORCH, **block), speculation=False)
    built = build_tiny(tmp_path / "trt", engine=quick_engine("float32"), **block)
    assert answers(built, speculation=True) == plain


def test_float16_speculation_differs_from_plain_at_most_in_ties(bundles: Bundles) -> None:
    pairs = zip(
        *(answers(bundles.tensorrt("float16"), speculation=s) for s in (False, True)), strict=True
    )
    assert sum(a != b for a, b in pairs) <= 1


@pytest.mark.xdist_group("float16")
def test_ten_thousand_steps_leave_the_memory_as_it_was(bundles: Bundles) -> None:
    bundle = bundles.tensorrt("float16")
    session = open_session("tensorrt", bundle / "target" / "model.onnx", Path(), device="cuda")
    _, rest = bound(session, inputs_of("target", torch.float16))
    steps = [
        {**rest, "past_lengths": torch.full((2,), past, dtype=torch.int32)} for past in range(8)
    ]

    def memory() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def gone_after(count: int) -> tuple[int, int]:
        free, resident = memory()
        for step in range(count):
            session.run(steps[step % 8])
        free_after, resident_after = memory()
        return free - free_after, resident_after - resident

    gone_after(100)
    # the count is of the whole device, and tests of other processes run on it: what leaks here,
    # leaks every time
    gone = [gone_after(10_000) for _ in range(3)]
    print("device bytes and host KiB gone", gone)
    assert min(device for device, _ in gone) <= 1 << 20
    assert max(host for _, host in gone) <= 1 << 14


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.xdist_group(d)) for d in ("float32", "float16")]
)
def test_engines_pass_validation(bundles: Bundles, dtype: str) -> None:
    report = trt_eagle3.validate(bundles.tensorrt(dtype))
    report.check()
    skipped = {check.name for check in report.checks if check.status == "skipped"}
    assert skipped == {"target.layer_steps", "target.layers"}, (
        "an engine shows nothing of its inside"
    )


@pytest.mark.parametrize(
    "weights", [pytest.param(w, marks=pytest.mark.xdist_group(w)) for w in ("fp8", "int8", "int4")]
)
def test_engines_with_weights_quantised_at_build_pass_validation(
    bundles: Bundles, weights: str
) -> None:
    bundle = bundles.get(weights, engine=quick_engine("float16", weights=weights))
    trt_eagle3.validate(bundle).check()
    inspection = json.loads((bundle / "target" / "inspection.json").read_text())
    assert inspection["packed_weights"] == {weights: 24}  # of down K is no multiple of 128
    pairs = zip(*(answers(bundle, speculation=s) for s in (False, True)), strict=True)
    assert sum(a != b for a, b in pairs) <= 1


FP8_KV = {"kv_dtype": "fp8"}


@pytest.mark.xdist_group("fp8-kv float32")
def test_engines_over_fp8_kv_give_the_torch_sessions_tokens(bundles: Bundles) -> None:
    plain = answers(bundles.get("torch_kv", engine=TORCH | FP8_KV), speculation=False)
    built = bundles.get("float32_kv", engine=quick_engine("float32", **FP8_KV))
    for speculation in (False, True):
        pairs = zip(answers(built, speculation=speculation), plain, strict=True)
        # sums in another order round a key the other way, now and then
        assert sum(a != b for a, b in pairs) <= 1


@pytest.mark.xdist_group("fp8-kv float16")
def test_engines_over_fp8_kv_pass_validation(bundles: Bundles) -> None:
    bundle = bundles.get("float16_kv", engine=quick_engine("float16", **FP8_KV))
    trt_eagle3.validate(bundle).check()
    states = EngineFolder(bundle / "target").states
    assert {(state.dtype, state.shape) for state in states} == {("int32", (2, 16))}
    assert {state.dtype for state in EngineFolder(bundle / "draft").states} == {"float16"}
    pairs = zip(*(answers(bundle, speculation=s) for s in (False, True)), strict=True)
    assert sum(a != b for a, b in pairs) <= 1


@pytest.mark.xdist_group("fp8-kv float16")
@pytest.mark.parametrize("fault", [False, True])
def test_planted_scales_of_fp8_kv_are_caught(bundles: Bundles, fault: bool, tmp_path: Path) -> None:
    """Values are stored by one scale, and read by another."""
    bundle = bundles.get("torch_kv", engine=TORCH | FP8_KV)
    config = tiny_config(engine=quick_engine("float16", **FP8_KV), draft=None, limits=LIMITS)
    spec = read_target(Path(config.target.checkpoint))
    model = with_word_states(build_graphs(spec, None, config.engine, reference_location)["target"])
    ready = trt_export(model, linear=True)
    scales = next(i for i in ready.model.graph.initializer if i.name == "kv_scales.0")
    if fault:
        scales.CopyFrom(numpy_helper.from_array(4 * numpy_helper.to_array(scales), scales.name))
    profiles = graph_profiles("target", model, config.engine, config.limits, TreeSizes(6, 1, 5))[:1]
    file, cache = written(ready, tmp_path), tmp_path.parent / "timing.cache"
    built = build_engine(file, tmp_path / ENGINE_FILE, profiles, config.engine, cache)
    write_config(tmp_path, config.engine, model, built.num_bytes)
    inputs = inputs_of("target", torch.float16)
    torch.manual_seed(0)
    caches = {
        name: torch.randint(0, 64, (*t.shape[:2], 64), dtype=torch.uint8)
        for name, t in inputs.items()
        if "cache" in name
    }
    words = {name: t.view(torch.int32) for name, t in caches.items()}
    found = outputs(TensorRTSession(file, tmp_path), inputs | words)
    expected = reference(bundle, "target", inputs | caches)
    error = relative_error(found["logits"], expected["logits"])
    print("fp8 kv", fault, f"{error:.1e}")
    assert (error > FAULT_FLOOR["float16"]) if fault else (error < FAULT_FLOOR["float16"] / 2)


def _set(node_type: str, attribute: str, value: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for a in node.attribute:
                if node.op_type == node_type and a.name == attribute:
                    a.CopyFrom(helper.make_attribute(attribute, value))

    return change


def _other_angles(model: onnx.ModelProto) -> None:
    """Every rope pair turns half as fast."""
    table = next(i for i in model.graph.initializer if i.name == "rope.inv_freq")
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) / 2, table.name))


def _other_rows(model: onnx.ModelProto) -> None:
    """The head's rows are each the next one."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, dtype=np.int32), "one_row"))
    index, node = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type == "PickRows")
    model.graph.node.insert(
        index, helper.make_node("Add", [node.input[1], "one_row"], ["next_rows"], name="next_rows")
    )
    node.input[1] = "next_rows"


def _exchanged_halves(model: onnx.ModelProto) -> None:
    """Gate and up change places."""
    index, node = next((i, n) for i, n in enumerate(model.graph.node) if n.op_type == "SiluMul")
    projection = next(n for n in model.graph.node if node.input[0] in n.output)
    both = next(i.dims[0] for i in model.graph.initializer if i.name == projection.input[1])
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([both // 2] * 2, dtype=np.int64), "halves")
    )
    parts = ["gate_half", "up_half"]
    cut = helper.make_node("Split", [node.input[0], "halves"], parts, name="halves/Split", axis=1)
    join = helper.make_node(
        "Concat", ["up_half", "gate_half"], ["up_gate"], name="halves/Concat", axis=1
    )
    model.graph.node.insert(index, join)
    model.graph.node.insert(index, cut)
    node.input[0] = "up_gate"


def _neighbour_seen(model: onnx.ModelProto) -> None:
    """Every frame's end, and the next one's start, is a block of patches late."""
    shift = np.array([0, 4, 0, 0], dtype=np.int32)
    model.graph.initializer.append(numpy_helper.from_array(shift, "late"))
    index, node = next(
        (i, n) for i, n in enumerate(model.graph.node) if n.op_type == "VisionAttention"
    )
    starts = node.input[4]
    model.graph.node.insert(
        index, helper.make_node("Add", [starts, "late"], ["late_starts"], name="late_starts")
    )
    for other in model.graph.node:
        if other.op_type == "VisionAttention":
            other.input[4] = "late_starts"


def _exchanged_axes(model: onnx.ModelProto) -> None:
    """What should turn by row turns by column, and the other way."""
    table = next(i for i in model.graph.initializer if i.name == "vision_pair_axis")
    table.CopyFrom(numpy_helper.from_array(1 - numpy_helper.to_array(table), table.name))


def _next_weight_rows(model: onnx.ModelProto) -> None:
    """Each output of the first product is what the next one should be."""
    weight = next(n.input[1] for n in model.graph.node if n.op_type == "Linear")
    proto = next(i for i in model.graph.initializer if i.name == weight)
    offset = next(entry for entry in proto.external_data if entry.key == "offset")
    offset.value = str(int(offset.value) + 2 * proto.dims[1])


FAULTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "none": lambda _: None,
    "AddRmsNorm epsilon": _set("AddRmsNorm", "epsilon", 0.5),
    "QKNormMRope angles": _other_angles,
    "TreeAttention scale": _set("TreeAttention", "scale", 0.25),
    "TreeAttention page size": _set("TreeAttention", "page_size", 8),
    "PickRows rows": _other_rows,
    "SiluMul gate and up exchanged": _exchanged_halves,
    "Linear weight rows": _next_weight_rows,
}
VISION_FAULTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "none": lambda _: None,
    "VisionAttention scale": _set("VisionAttention", "scale", 0.03),
    "VisionAttention frame_starts": _neighbour_seen,
    "VisionAttention rope axis": _exchanged_axes,
}


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [(fault, "float32") for fault in FAULTS if fault != "Linear weight rows"]
    + [(fault, "float16") for fault in ("none", "Linear weight rows")],
)
def test_planted_fault_in_a_plugin_is_caught(
    bundles: Bundles, fault: str, dtype: str, tmp_path: Path
) -> None:
    inputs = inputs_of("draft", getattr(torch, dtype))
    inputs["position_ids"] = torch.randint(0, 500, (3, 2, ROWS), dtype=torch.int32)
    session = spoilt("draft", dtype, FAULTS[fault], tmp_path)
    found = errors(outputs(session, inputs), reference(bundles.torch(), "draft", inputs))
    if fault == "none":
        assert max(found.values()) < TOLERANCE[dtype], found
    else:
        assert max(found.values()) > FAULT_FLOOR[dtype], found


@pytest.mark.xdist_group("faults")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("fault", VISION_FAULTS)
def test_planted_fault_in_the_vision_plugin_is_caught(
    bundles: Bundles, fault: str, dtype: str, tmp_path: Path
) -> None:
    inputs = inputs_of("vision", getattr(torch, dtype))
    session = spoilt("vision", dtype, VISION_FAULTS[fault], tmp_path)
    found = errors(outputs(session, inputs), reference(bundles.torch(), "vision", inputs))
    if fault == "none":
        assert max(found.values()) < TOLERANCE[dtype], found
    else:
        assert max(found.values()) > FAULT_FLOOR[dtype], found


def spoilt(
    graph: str, dtype: str, fault: Callable[[onnx.ModelProto], None], folder: Path
) -> Session:
    """An engine of a graph with a fault planted, for its first profile."""
    config = tiny_config(engine=engine_of(dtype), limits=LIMITS)
    model = graphs(dtype)[graph]
    ready = trt_export(model, linear=dtype == "float16" and graph != "vision")
    fault(ready.model)
    file = written(ready, folder)
    images = patch_ranges(4, config.limits.max_visual_tokens)  # a merge's patches
    profiles = graph_profiles(
        graph, model, config.engine, config.limits, TreeSizes(6, 1, 5), images
    )[:1]
    built = build_engine(
        file, folder / ENGINE_FILE, profiles, config.engine, folder.parent / "timing.cache"
    )
    write_config(folder, config.engine, model, built.num_bytes)
    return TensorRTSession(file, folder)


def write_config(
    folder: Path, engine: EngineConfig, model: onnx.ModelProto, num_bytes: int
) -> None:
    config = {
        "build_config": {"engine": engine.model_dump(mode="json")},
        "states": encode_states(read_states(model)),
        "engine": describe_engine(engine.tensorrt, num_bytes).model_dump(),
    }
    (folder / "config.json").write_text(json.dumps(config))


# Bad input: one line each, and the process lives.


@pytest.fixture
def draft(bundles: Bundles) -> Session:
    return open_session(
        "tensorrt", bundles.tensorrt("float32") / "draft" / "model.onnx", Path(), device="cuda"
    )


@pytest.mark.xdist_group("float32")
def test_shapes_outside_every_profile_are_refused(draft: Session) -> None:
    inputs = inputs_of("draft", torch.float32)
    _, rest = bound(draft, inputs)
    many = {**rest, "page_table": torch.ones(2, 65, dtype=torch.int32)}
    with pytest.raises(UserError, match=r"page_table: \[2, 65\] is outside .*\[2, 64\]"):
        draft.run(many)
    assert draft.run(rest)


@pytest.mark.xdist_group("float32")
def test_too_many_frames_or_patches_are_refused_and_the_next_images_are_seen(
    bundles: Bundles,
) -> None:
    session = open_session(
        "tensorrt", bundles.tensorrt("float32") / "vision" / "model.onnx", Path(), device="cuda"
    )
    inputs = inputs_of("vision", torch.float32)
    starts = inputs["frame_starts"]
    many = {**inputs, "frame_starts": torch.cat([starts, starts[-1:].expand(10_000)])}
    with pytest.raises(
        UserError, match=r"frame_starts: 10003 frames .* at once, .*limits\.max_visual_tokens"
    ):
        session.run(many)
    large = {
        name: torch.cat([t] * 1000, dim=0 if name == "patches" else -1)
        for name, t in inputs.items()
    }
    with pytest.raises(
        UserError, match=r"patches: \d+ patches at once, .*limits\.max_visual_tokens"
    ):
        session.run({**large, "frame_starts": starts})
    assert session.run(inputs)


@pytest.mark.xdist_group("float32")
def test_inputs_of_another_type_name_or_rank_are_refused(draft: Session) -> None:
    _, rest = bound(draft, inputs_of("draft", torch.float32))
    for name, value, reason in (
        ("features", rest["features"].half(), "expected torch.float32"),
        ("features", rest["features"][0], "expected torch.float32"),
        ("k_cache.0", torch.zeros(64, 2, 64), "has a static buffer"),
        ("nothing", rest["features"], "has no such input"),
    ):
        with pytest.raises(UserError, match=f"{name}: .*{reason}"):
            draft.run({**rest, name: value})
    with pytest.raises(UserError, match="features: input not given"):
        draft.run({name: value for name, value in rest.items() if name != "features"})


def copied(bundles: Bundles, folder: Path) -> Path:
    """The draft's folder of the float32 bundle, to be damaged."""
    shutil.copytree(bundles.tensorrt("float32") / "draft", folder / "draft")
    return folder / "draft"


def refused(folder: Path, **environment: str) -> str:
    """What a fresh process says when it opens the engine there; a crash has no such line."""
    code = (
        "import sys; from pathlib import Path; from trt_eagle3.engine.trt.session import "
        "TensorRTSession\nfrom trt_eagle3.errors import TrtEagle3Error\ntry: "
        "TensorRTSession(Path(sys.argv[1]) / 'model.onnx', Path())\nexcept TrtEagle3Error as e: "
        "print(f'refused {e.exit_code}: {e}')"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.xdist_group("float32")
def test_truncated_engine_is_refused_with_and_without_its_facts(
    bundles: Bundles, tmp_path: Path
) -> None:
    folder = copied(bundles, tmp_path)
    plan = (folder / ENGINE_FILE).read_bytes()
    (folder / ENGINE_FILE).write_bytes(plan[: len(plan) // 2])
    assert f"expected {len(plan)} bytes, got {len(plan) // 2}" in refused(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "engine": None}))
    said = refused(folder)
    assert said.startswith("refused 2:"), said
    assert "cannot load it: TensorRT:" in said
    (folder / ENGINE_FILE).write_bytes(b"")
    assert refused(folder).startswith("refused 2:")


@pytest.mark.xdist_group("float32")
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tensorrt", "10.14.1", "built for TensorRT 10.14.1, this process has"),
        ("gpu_arch", "sm80", "built for GPU architecture sm80, this process has sm"),
        ("plugins", "0", f"built for plugin version 0, this process has {PLUGIN_VERSION}"),
    ],
)
def test_engine_of_another_machine_is_refused(
    bundles: Bundles, tmp_path: Path, field: str, value: str, said: str
) -> None:
    folder = copied(bundles, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["engine"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{said}.*trt-eagle3 build"):
        TensorRTSession(folder / "model.onnx", Path())


@pytest.mark.xdist_group("float32")
def test_missing_or_broken_plugin_library_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    folder = copied(bundles, tmp_path)
    said = refused(folder, TRT_EAGLE3_PLUGINS=str(tmp_path / "none.so"))
    assert said.startswith("refused 3:")
    assert "make plugins" in said
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert refused(folder, TRT_EAGLE3_PLUGINS=str(tmp_path / "broken.so")).startswith("refused 3:")


@pytest.mark.xdist_group("float32")
@pytest.mark.usefixtures("bundles")
def test_graph_without_our_plugins_attributes_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config(engine=engine_of("float32"), limits=LIMITS)
    model = graphs("float32")["draft"]
    ready = trt_export(model)
    node = next(n for n in ready.model.graph.node if n.op_type == "TreeAttention")
    del node.attribute[:]
    profiles = graph_profiles("draft", model, config.engine, config.limits, TreeSizes())
    with pytest.raises(UserError, match="TensorRT cannot read the graph: node"):
        build_engine(
            written(ready, tmp_path),
            tmp_path / ENGINE_FILE,
            profiles,
            config.engine,
            tmp_path / "cache",
        )


@pytest.mark.xdist_group("float32")
@pytest.mark.usefixtures("bundles")
def test_missing_library_is_refused_at_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRT_EAGLE3_PLUGINS", str(tmp_path / "none.so"))
    with pytest.raises(EnvironmentMissingError, match="make plugins"):
        build_tiny(tmp_path, engine=engine_of("float32"))


@pytest.mark.xdist_group("experts")
@pytest.mark.usefixtures("bundles")
def test_router_logits_are_given_where_they_are_asked_for_and_change_no_answer(
    tmp_path: Path,
) -> None:
    """All layers write to one buffer where they are not, in captured graphs too."""
    bundle = build_tiny_moe(tmp_path, limits=LIMITS, engine=engine_of("float16"))
    routers = EngineFolder(bundle / "target").intermediates
    assert len(routers) > 1
    prompts = [example.prompt for example in examples("heldout", 11, 40) if example.kind == "text"]
    with trt_eagle3.load(bundle) as serving:
        expected = [serving.generate(prompt, max_tokens=24).token_ids for prompt in prompts]
    recorded = RecordingEngine(bundle)
    found = [recorded.generate(prompt, max_tokens=24).token_ids for prompt in prompts]
    forwards = [forward for forward in recorded.take() if forward.graph == "target"]
    recorded.close()
    assert found == expected
    for forward in forwards:
        rows = forward.inputs["inputs_embeds"].shape[:2].numel()
        logits = [forward.outputs[name] for name in routers]
        assert {len(x) for x in logits} == {rows}
        assert all(x.isfinite().all() for x in logits)
        assert not torch.equal(logits[0], logits[1])
