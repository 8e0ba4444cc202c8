"""What TensorRT's vision towers are checked with sees the faults that it is there for, and takes
sound towers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.drawn_weights import write_drawn
from benchmarks.lowering import lowered
from benchmarks.vision_tower import ImageBatch, Tower, tower_flops
from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from tests.graph.test_trt_export import run
from tests.reference.compare import FLOAT32_TOLERANCE
from tests.tiny import TARGET
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.trt_export import WEIGHTS_FILE, trt_export
from trt_eagle3.spec import StateSpec

IMAGES = ImageBatch(3, 64)  # 16 patches each


class Exported(Session):
    """The exported graph in the torch session: stands in for an engine."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._model = model
        self._folder = folder

    states: tuple[StateSpec, ...] = ()

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        raise AssertionError(name, tensor)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return run(self._model, self._folder, self._folder, inputs)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    made = Tower(read_target(TARGET), tmp_path_factory.mktemp("tower"), "cpu")
    made.expect([IMAGES])
    return made


class Standard(Exported):
    """An exported graph of standard operators in ONNX Runtime."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (self._folder / "standard.onnx").write_bytes(self._model.SerializeToString())
        session = ort.InferenceSession(
            self._folder / "standard.onnx", providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        found = session.run(
            names, {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in inputs.items()}
        )
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}


def exported(tower: Tower, folder: Path, dtype: str = "float16") -> onnx.ModelProto:
    """The graph, its weights written as an engine's are."""
    ready = trt_export(tower.graph(dtype))
    write_drawn(ready, folder / WEIGHTS_FILE, "cpu")
    return ready.model


def exchange_axes(model: onnx.ModelProto) -> None:
    table = next(i for i in model.graph.initializer if i.name == "vision_pair_axis")
    table.CopyFrom(numpy_helper.from_array(1 - numpy_helper.to_array(table), table.name))


def show_neighbours(model: onnx.ModelProto) -> None:
    """Four patches of each image are the one's before it."""
    late = numpy_helper.from_array(np.array([0, 4, 4, 0], dtype=np.int32), "late")
    model.graph.initializer.append(late)
    nodes = [node for node in model.graph.node if node.op_type == "VisionAttention"]
    index = list(model.graph.node).index(nodes[0])
    model.graph.node.insert(
        index, helper.make_node("Add", [nodes[0].input[4], "late"], ["late_starts"])
    )
    for node in model.graph.node:
        if node.op_type == "VisionAttention":
            node.input[4] = "late_starts"


def exchange_weights(model: onnx.ModelProto) -> None:
    """One layer has the next one's weights."""
    first, second = [n for n in model.graph.node if n.op_type == "Gemm" and "attn" in n.name][:3:2]
    first.input[1] = second.input[1]


def test_exported_tower_with_written_weights_is_the_reference(tower: Tower, tmp_path: Path) -> None:
    assert tower.error(Exported(exported(tower, tmp_path), tmp_path), IMAGES, torch.float16) < 3e-3


def test_lowered_tower_is_the_reference(tower: Tower, tmp_path: Path) -> None:
    standard = lowered(exported(tower, tmp_path, "float32"), TensorProto.FLOAT)
    assert not any(node.domain for node in standard.graph.node)
    assert tower.error(Standard(standard, tmp_path), IMAGES, torch.float32) < FLOAT32_TOLERANCE


def test_lowered_float16_tower_is_sound_onnx(tower: Tower, tmp_path: Path) -> None:
    standard = lowered(exported(tower, tmp_path), TensorProto.FLOAT16)
    (tmp_path / "standard.onnx").write_bytes(standard.SerializeToString())
    # types are among what it checks
    onnx.checker.check_model(str(tmp_path / "standard.onnx"), full_check=True)


@pytest.mark.parametrize("fault", [exchange_axes, show_neighbours, exchange_weights])
def test_tower_with_a_planted_fault_is_far_from_the_reference(
    tower: Tower, fault: Callable[[onnx.ModelProto], None], tmp_path: Path
) -> None:
    model = exported(tower, tmp_path)
    fault(model)
    assert tower.error(Exported(model, tmp_path), IMAGES, torch.float16) > 0.1


def test_not_a_number_is_no_match(tower: Tower) -> None:
    class Spoilt(Session):
        states: tuple[StateSpec, ...] = ()

        def bind(self, name: str, tensor: torch.Tensor) -> None:
            raise AssertionError(name, tensor)

        def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            found = tower.session("float32").run(inputs)
            return {name: tensor / (tensor != tensor.max()) for name, tensor in found.items()}

    assert tower.error(Spoilt(), IMAGES, torch.float32) == float("inf")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_flops_are_those_that_torch_counts(family: str, tower: Tower, tmp_path: Path) -> None:
    if family != "qwen3_vl":
        {"qwen2_5_vl": save_qwen25, "internvl": save_internvl}[family](tmp_path / "target")
        tower = Tower(read_target(tmp_path / "target"), tmp_path, "cpu")
    session, inputs = tower.session("float32"), tower.inputs(IMAGES, torch.float32)
    # which counts no fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        session.run(inputs)
    assert tower_flops(tower.spec, IMAGES.grids(tower.spec)) == pytest.approx(
        counter.get_total_flops(), rel=1e-6
    )
