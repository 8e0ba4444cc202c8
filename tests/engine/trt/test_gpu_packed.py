"""TensorRT engines whose weights stay quantised against the torch session in float32, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from tests.engine.trt.test_gpu import (
    FAULT_FLOOR,
    LIMITS,
    TOLERANCE,
    TORCH,
    engine_of,
    errors,
    outputs,
    reference,
    write_config,
)
from tests.graph.test_trt_export import inputs_of, written
from tests.quantised import save_quantised
from tests.tiny import build_tiny, tiny_config
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.trt.build import build_engine
from trt_eagle3.engine.trt.folder import ENGINE_FILE
from trt_eagle3.engine.trt.packed_products import keep_packed_products
from trt_eagle3.engine.trt.profiles import graph_profiles
from trt_eagle3.engine.trt.session import TensorRTSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.trt_export import trt_export

pytestmark = pytest.mark.trt

KINDS = {
    "fp8": "LinearFp8",
    "fp8-channel": "LinearFp8",
    "int8": "LinearInt8",
    "w4a16": "LinearInt4",
    "w4a16-asymmetric": "LinearInt4",
}
TOKENS = 80  # of a prompt: more than our kernels multiply at once
PROMPT_SLOTS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pytest.importorskip("tensorrt")
    return tmp_path_factory.mktemp("packed")


def prompt_inputs() -> dict[str, Tensor]:
    """One prompt of ``TOKENS`` at the beginning of its cache."""
    torch.manual_seed(1)
    caches = {
        f"{side}_cache.{i}": torch.zeros(PROMPT_SLOTS, 2, 64, dtype=torch.float16)
        for side in "kv"
        for i in range(8)
    }
    return {
        "inputs_embeds": torch.randn(1, TOKENS, 256, dtype=torch.float16),
        "deepstack_embeds": torch.randn(3, 1, TOKENS, 256, dtype=torch.float16),
        **caches,
        "position_ids": torch.arange(TOKENS, dtype=torch.int32).expand(3, 1, -1).contiguous(),
        "past_lengths": torch.tensor([0], dtype=torch.int32),
        "query_lengths": torch.tensor([TOKENS], dtype=torch.int32),
        "page_table": torch.tensor([[5, 2, 3, 1, 4]], dtype=torch.int32),
        "tree_mask": torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril(),
        "logit_rows": torch.tensor([[0, TOKENS - 1]], dtype=torch.int32),
    }


def engine(
    folder: Path, config: BuildConfig, fault: Callable[[onnx.ModelProto], None]
) -> TensorRTSession:
    """The quantised target's engine, with a fault planted."""
    folder.mkdir(parents=True)
    spec = read_target(Path(config.target.checkpoint))
    model = build_graphs(spec, None, config.engine, reference_location)["target"]
    ready = keep_packed_products(trt_export(model, linear=True), REFERENCE_ROOT, folder)
    fault(ready.model)
    file = written(ready, folder)
    profiles = graph_profiles("target", model, config.engine, config.limits, TreeSizes(6, 1, 5))
    cache = folder.parent / "timing.cache"
    built = build_engine(file, folder / ENGINE_FILE, profiles, config.engine, cache)
    write_config(folder, config.engine, model, built.num_bytes)
    return TensorRTSession(file, folder)


def quantised_config(folder: Path, kind: str) -> BuildConfig:
    target = folder / f"target_{kind}"
    if not target.exists():
        save_quantised(target, kind)
    return tiny_config(target=target, draft=None, engine=engine_of("float16"), limits=LIMITS)


def torch_bundle(folder: Path, config: BuildConfig) -> Path:
    target = Path(config.target.checkpoint)
    made = folder / f"torch_{target.name}"
    options = {"target": target, "draft": None, "limits": LIMITS, "engine": TORCH}
    return next(made.iterdir()) if made.exists() else build_tiny(made, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_with_packed_weights_agrees_with_the_torch_session(folder: Path, kind: str) -> None:
    config = quantised_config(folder, kind)
    expected = torch_bundle(folder, config)
    session = engine(folder / kind, config, lambda _: None)
    inputs = inputs_of("target", torch.float16)
    steps = errors(outputs(session, inputs), reference(expected, "target", inputs))
    prompt = prompt_inputs()
    prompts = errors(outputs(session, prompt), reference(expected, "target", prompt))
    print(kind, "step", f"{max(steps.values()):.1e}", "prompt", f"{max(prompts.values()):.1e}")
    assert max(steps.values()) < TOLERANCE["float16"], steps
    assert max(prompts.values()) < TOLERANCE["float16"], prompts
    inspection = json.loads((folder / kind / "inspection.json").read_text())
    assert inspection["packed_weights"] == {KINDS[kind].removeprefix("Linear").lower(): 24}
    profiles = len(inspection["profiles"])
    assert inspection["plugins"][KINDS[kind]] in {24, 24 * profiles}


@pytest.mark.parametrize("kind", ["fp8", "w4a16-asymmetric"])
@pytest.mark.parametrize("constant", ["codes", "scales"])
def test_planted_row_of_a_packed_weight_is_caught(folder: Path, kind: str, constant: str) -> None:
    """Each output of the first product is what the next one should be."""

    def next_rows(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == KINDS[kind])
        name = next(name for name in node.input if name.endswith(f"/{constant}"))
        proto = next(i for i in model.graph.initializer if i.name == name)
        offset = next(entry for entry in proto.external_data if entry.key == "offset")
        offset.value = str(int(offset.value) + 4 * proto.dims[1])

    config = quantised_config(folder, kind)
    session = engine(folder / f"fault_{kind}_{constant}", config, next_rows)
    inputs = inputs_of("target", torch.float16)
    expected = reference(torch_bundle(folder, config), "target", inputs)
    found = errors(outputs(session, inputs), expected)
    assert max(found.values()) > FAULT_FLOOR["float16"], found
