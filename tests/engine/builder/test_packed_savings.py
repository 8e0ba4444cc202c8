"""What packed weights save: the rules against what each backend does with a weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.text_pairs import quantise
from tests.moe import save_qwen3_moe, with_layout
from tests.quantised import PACKERS, save_quantised
from tests.tiny import build_tiny, tiny_config
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle, _memory_need
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.packed_savings import packed_savings
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.onnxruntime.packed_products import _packed
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.engine.runtime.memory import memory_need
from trt_eagle3.engine.runtime.weights import integer_rows
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.weights import WeightExpr, part_of

NAMES = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight")  # K of 256 and 448
CUDA = {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, TargetCheckpoint]:
    root = tmp_path_factory.mktemp("quantised")
    return {name: read_target(save_quantised(root / name, name)) for name in PACKERS}


def keeps(engine: Mapping[str, Any], ref: QuantisedRef) -> bool:
    config = EngineConfig.model_validate(engine)
    return backend_named(config.backend).keeps_packed(config, ref)


@pytest.mark.parametrize("name", PACKERS)
def test_kept_packed_is_what_backends_pack(
    name: str, targets: Mapping[str, TargetCheckpoint]
) -> None:
    for weight in NAMES:
        ref = targets[name].tensors[weight]
        assert isinstance(ref, QuantisedRef)
        expr = WeightExpr(
            (part_of(ref, lambda r: r.file.name),), dtype_named("bfloat16"), ref.format
        )
        root = ref.file.parent
        on_cuda = pack(expr, root, torch.device("cpu")) is not None
        assert keeps(CUDA, ref) == on_cuda, weight
        assert not keeps({"backend": "torch"}, ref)
        assert not keeps({**CUDA, "dtype": "float32"}, ref)
        by_ort = _packed(expr, partial(integer_rows, root=root)) is not None
        assert keeps({"activations": "int8"}, ref) == by_ort, weight
        assert not keeps({}, ref)


def test_zero_points_are_kept_packed_by_our_plugin_and_not_by_rtx(
    targets: Mapping[str, TargetCheckpoint],
) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    tensorrt, rtx = ({**engine, "tensorrt": t} for t in ({"linear": "plugin"}, {"runtime": "rtx"}))
    found = {}
    for name in ("w4a16", "w4a16-asymmetric", "int8"):
        ref = targets[name].tensors[NAMES[0]]
        assert isinstance(ref, QuantisedRef)
        found[name] = (keeps(tensorrt, ref), keeps(rtx, ref))
        assert keeps(engine, ref)  # plugins, where nothing else is asked for
        assert not keeps({**engine, "tensorrt": {"linear": "tensorrt"}}, ref)
    expected = {"w4a16": (True, True), "w4a16-asymmetric": (True, False), "int8": (True, True)}
    assert found == expected


def test_savings_are_the_difference_to_16_bits_of_the_weights_that_stay_packed(
    targets: Mapping[str, TargetCheckpoint],
) -> None:
    spec, engine = targets["w4a16"], EngineConfig.model_validate(CUDA)
    packed = [ref for ref in spec.tensors.values() if isinstance(ref, QuantisedRef)]
    packed = [ref for ref in packed if ref.shape[1] % 128 == 0]
    values = sum(ref.shape[0] * ref.shape[1] for ref in packed)
    assert packed_savings(spec, engine) == pytest.approx(values * (2 - 4.25 / 8), rel=1e-3)
    limits = tiny_config().limits
    dense, less = (
        memory_need(spec, None, limits, engine, packed_savings=saved).weights
        for saved in (0, packed_savings(spec, engine))
    )
    assert dense - less == packed_savings(spec, engine)
    assert packed_savings(targets["w4a16"], EngineConfig.model_validate({"backend": "torch"})) == 0


@pytest.mark.parametrize(
    ("kind", "by_kernels", "by_rtx"),
    [("fp8", True, True), ("w4a16", True, True), ("int8", False, False)],
)
def test_experts_are_kept_packed_by_our_kernels_alone(
    kind: str, by_kernels: bool, by_rtx: bool, tmp_path: Path
) -> None:
    """INT8 experts are dequantised everywhere."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 32}
    with_layout(tmp_path, save_qwen3_moe(tmp_path, **sizes), "single")
    (expert, *_) = (
        read_target(quantise(tmp_path, kind)).tensors["layers.0.mlp.experts.down_proj"].parts
    )
    engines = {
        "torch": (CUDA, by_kernels),
        "plugin": ({"backend": "tensorrt"}, by_kernels),
        "rtx": ({"backend": "tensorrt", "tensorrt": {"runtime": "rtx"}}, by_rtx),
        "cpu": ({"activations": "int8"}, False),
    }
    for name, (engine, kept) in engines.items():
        config = EngineConfig.model_validate(engine)
        found = backend_named(config.backend).keeps_packed(config, expert, experts=True)
        assert found == kept, name


def test_bundle_records_what_its_load_saves(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path, engine={"weights": "int4", "activations": "int8"})
    saved = read_bundle(bundle).packed_savings
    assert saved > 1e6
    loaded = LoadedBundle.open(bundle)
    at_load = _memory_need(loaded.record, loaded.spec, loaded.manifest, loaded.limits, size=1)
    dense = memory_need(loaded.spec, loaded.manifest, loaded.limits, loaded.record.config.engine)
    assert at_load.weights == dense.weights - saved
