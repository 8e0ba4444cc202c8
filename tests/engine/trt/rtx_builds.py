"""What the real builder of TensorRT for RTX makes of our graphs and plugins, as JSON.

    python -m tests.engine.trt.rtx_builds PLUGIN_LIBRARY FOLDER

In a process of its own: a builder that meets what it does not expect may end the process.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from tests.engine.tensorrt_api import read_rtx, rtx_table
from tests.engine.trt.plugin_library import WHEELS
from tests.families.drawn_pairs import PAIRS, draw_pair
from tests.families.random_pairs import config_of
from tests.families.text_pairs import quantise
from tests.moe import save_qwen3_moe, with_layout
from tests.quantised import save_quantised
from tests.tiny import ROOT, TARGET, tiny_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import BuildConfig, EngineConfig
from trt_eagle3.drafts.registry import find_draft
from trt_eagle3.engine.builder.job import TreeSizes
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.engine.trt.build import build_engine
from trt_eagle3.engine.trt.bundle import write_engines
from trt_eagle3.engine.trt.dialects.registry import find_dialect
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.profiles import Profile, graph_profiles
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.registry import read_target, tower_of
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.graph.word_states import with_word_states
from trt_eagle3.pipeline import build

CHIPS = ("sm89", "sm120")
DTYPES = ("float16", "bfloat16")
TARGETS = (
    ("w4a16", "auto"),
    ("fp8-channel", "auto"),
    ("fp8", "plugin"),
    ("w4a16-asymmetric", "plugin"),
)
BLOCK_DRAFT = ROOT / "examples/tiny/dflash"
INNER, OUTER, BLOCK = 256, 512, 128
LAYERS, AUX_LAYERS = 3, (0, 1, 2)
"""Of the targets: a builder's time is that of its layers, and one more is like the last."""
ONE_CHIP = ("sm89",)
"""Of the families' engines."""
EXPERTS = ("fp8", "w4a16-asymmetric")
"""Formats of experts that stay packed."""


def engine_config(library: Path, chips: tuple[str, ...] = CHIPS, **engine: Any) -> dict[str, Any]:
    tensorrt = {"runtime": "rtx", "chips": chips, "plugin_library": str(library)}
    raw = {"backend": "tensorrt", "device": "cuda", "dtype": "float16", "tensorrt": tensorrt}
    residual = "float32" if engine.get("dtype", "float16") == "float16" else "compute"
    return {**raw, "residual": residual, **engine}


def reason_of(run: Callable[[], object]) -> str:
    """What a user is told; "" where it works."""
    try:
        run()
    except (UserError, EnvironmentMissingError) as error:
        return str(error)
    return ""


# One attention of our plugin


def attention(attributes: Mapping[str, Any], v_width: int = 64) -> onnx.ModelProto:
    """A TreeAttention of two heads of 64 in float16, with ``attributes`` changed or taken away."""
    known = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "page_size": 16,
        "scale": 0.125,
        "compute_type": 10,
        "plugin_version": PLUGIN_VERSION,
    }
    given = {name: value for name, value in {**known, **attributes}.items() if value is not None}
    half, integer = TensorProto.FLOAT16, TensorProto.INT32
    inputs = {
        "q": (half, [8, 256]),
        "k": (half, [8, 128]),
        "v": (half, [8, 128]),
        "k_cache": (half, [64, 2, 64]),
        "v_cache": (half, [64, 2, v_width]),
        "past_lengths": (integer, [1]),
        "query_lengths": (integer, [1]),
        "page_table": (integer, [1, 4]),
        "tree_mask": (TensorProto.BOOL, [1, 8, 8]),
    }
    outputs = {"out": inputs["q"], "k_out": inputs["k_cache"], "v_out": inputs["v_cache"]}
    node = helper.make_node("TreeAttention", [*inputs], [*outputs], domain="trt_eagle3", **given)
    return model_of([node], inputs, outputs, 17)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, list[Any]]],
    outputs: Mapping[str, tuple[int, list[Any]]],
    opset: int,
    weights: tuple[onnx.TensorProto, ...] = (),
) -> onnx.ModelProto:
    sides = [
        [helper.make_tensor_value_info(n, *v) for n, v in s.items()] for s in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *sides, initializer=weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("trt_eagle3", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8 if opset == 17 else 11)


def build_model(
    model: onnx.ModelProto, folder: Path, config: dict[str, Any], profiles: tuple[Profile, ...]
) -> int:
    """Bytes of its engine."""
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    engine = EngineConfig.model_validate(config)
    return build_engine(file, folder / "engine", profiles, engine, folder / "cache").num_bytes


def refusals(library: Path, folder: Path) -> dict[str, str]:
    """Why each wrong node or setting is refused; "" where it is not."""

    def refused(*arguments: Any, **named: Any) -> str:
        model, config = attention(*arguments, **named), engine_config(library)
        shapes = {value.name: shape_of(value) for value in model.graph.input}
        fixed = {name: (shape,) * 3 for name, shape in shapes.items()}
        return reason_of(lambda: build_model(model, folder, config, (Profile("all", fixed),)))

    found = {
        "right": refused({}),
        "attribute": refused({"num_heads": 3}),
        "no attribute": refused({"page_size": None}),
        "version": refused({"plugin_version": "1"}),
        "shape": refused({}, v_width=32),
        "window": refused({"window": 4}),
    }
    dialect = type(find_dialect(EngineConfig.model_validate(engine_config(library)).tensorrt))
    configure = dialect.configure

    def without_aliases(self: Any, settings: Any, *rest: Any) -> None:
        configure(self, settings, *rest)
        settings.set_preview_feature(self.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, False)

    dialect.configure = without_aliases  # type: ignore[method-assign]
    found["no aliases"] = refused({})
    dialect.configure = configure  # type: ignore[method-assign]
    return found


def shape_of(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


# Targets with few layers


def shortened(target: Path) -> Path:
    """A checkpoint of the tiny target's, cut to ``LAYERS`` decoder layers."""
    config = json.loads((target / "config.json").read_text())
    dropped = range(LAYERS, config["text_config"]["num_hidden_layers"])
    config["text_config"]["num_hidden_layers"] = LAYERS
    (target / "config.json").write_text(json.dumps(config))
    file = target / "model.safetensors"
    prefixes = tuple(f"model.language_model.layers.{k}." for k in dropped)
    tensors = {name: t for name, t in load_file(file).items() if not name.startswith(prefixes)}
    save_file(tensors, file)
    return target


def pair_build(library: Path, target: Path, dtype: str, made: Path) -> str:
    """The folder of a bundle of a short tiny pair."""
    tiny = tiny_config(target=target, engine=engine_config(library, dtype=dtype))
    assert tiny.draft is not None
    draft = tiny.draft.model_copy(update={"overrides": {"aux_layers": AUX_LAYERS}})
    tiny = tiny.model_copy(update={"draft": draft})
    return str(build(tiny, output=made).path)


# Products with quantised weights


def packed(name: str, dtype: int, shape: tuple[int, ...], num_bytes: int) -> onnx.TensorProto:
    drawn = np.random.default_rng(1).integers(0, 120, num_bytes, dtype=np.uint8)
    return TensorProto(name=name, data_type=dtype, dims=shape, raw_data=drawn.tobytes())


def half(name: str, shape: tuple[int, ...]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.full(shape, 0.01, np.float16), name)


def quantised(kind: str) -> onnx.ModelProto:
    """``y = x . W^T`` in float16, its weight of ``kind`` behind a DequantizeLinear."""
    size = (OUTER, INNER)
    weight, scale, options = {
        "int4": (
            packed("w", TensorProto.INT4, size, OUTER * INNER // 2),
            half("s", (OUTER, INNER // BLOCK)),
            {"axis": 1, "block_size": BLOCK},
        ),
        "int8": (
            packed("w", TensorProto.INT8, size, OUTER * INNER),
            half("s", (OUTER,)),
            {"axis": 0},
        ),
        "fp8": (packed("w", TensorProto.FLOAT8E4M3FN, size, OUTER * INNER), half("s", ()), {}),
    }[kind]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **options),
        helper.make_node("Gemm", ["x", "d"], ["y"], transB=1),
    ]
    x, y = ((TensorProto.FLOAT16, ["n", size]) for size in (INNER, OUTER))
    return model_of(nodes, {"x": x}, {"y": y}, 24, (weight, scale))


def quantised_builds(library: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Kind -> chip -> bytes of the engine, or why there is none."""
    rows = Profile("rows", {"x": ((1, INNER), (8, INNER), (64, INNER))})

    def attempt(kind: str, chip: str) -> int | str:
        config = engine_config(library, chips=(chip,))
        try:
            return build_model(quantised(kind), folder, config, (rows,))
        except UserError as error:
            return str(error)

    chips = ("sm86", "sm89", "sm120")
    return {kind: {chip: attempt(kind, chip) for chip in chips} for kind in ("int4", "int8", "fp8")}


def target_build(library: Path, folder: Path, kind: str, linear: str) -> str:
    """The folder of the tiny target's engine alone, with weights in format ``kind``, and of FP8
    ones with FP8 keys and values.
    """
    target = shortened(save_quantised(folder / f"checkpoint_{kind}", kind))
    engine = engine_config(library, kv_dtype="fp8" if kind == "fp8" else "compute")
    engine["tensorrt"] |= {"linear": linear}
    return build_target(target, engine, folder / f"{kind}_{linear}")


def experts_build(library: Path, folder: Path) -> str:
    """The folder of a mixture of experts' engine; of 8 experts, which products need not pad."""
    target = folder / "checkpoint_experts"
    save_qwen3_moe(target, hidden_size=32, moe_intermediate_size=24, num_experts=8)
    return build_target(target, engine_config(library), folder / "experts")


def packed_experts_build(library: Path, folder: Path, kind: str) -> str:
    """The folder of a mixture's engine whose experts are stored in format ``kind``."""
    target = folder / f"checkpoint_experts_{kind}"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    with_layout(target, save_qwen3_moe(target, **sizes, num_experts=4, head_dim=32), "single")
    quantise(target, kind)
    return build_target(target, engine_config(library, ONE_CHIP), folder / f"experts_{kind}")


def family_builds(library: Path, folder: Path, family: str) -> dict[str, Any]:
    """Kind of draft -> the ``folder`` of engines of a family's random pair, and the nodes of ours
    in each of their ``graphs``.

    Target and tower are built once, for the first draft.
    """
    pair = draw_pair(family, folder / f"pair_{family}")
    found: dict[str, Any] = {}
    spec = read_target(pair.target)
    for kind, draft in pair.drafts.items():
        engine = engine_config(library, ONE_CHIP)
        config = config_of(pair.target, Path(draft), folder, engine=engine)
        manifest = find_draft(draft, spec, {})
        graphs = build_graphs(spec, manifest, config.engine, reference_location)
        models = {
            name: with_word_states(model)
            for name, model in graphs.items()
            if not found or name not in {"target", "vision"}
        }
        made = folder / f"{family}_{kind}"
        write_graphs_engines(made, models, config, spec)
        nodes = {name: ops_of(model) for name, model in models.items()}
        found[kind] = {"folder": str(made), "graphs": nodes}
    return found


def ops_of(model: onnx.ModelProto) -> dict[str, int]:
    """Number of nodes of each op of ours."""
    return Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)


def write_graphs_engines(
    made: Path,
    models: Mapping[str, onnx.ModelProto],
    config: BuildConfig,
    spec: TargetCheckpoint,
) -> None:
    """Put the engines of ``models`` into the folder ``made``."""
    vision, most = spec.vision, config.limits.max_visual_tokens
    images = tower_of(spec).ranges(vision, most) if vision else {}
    sizes = TreeSizes(6, 1, 5)
    profiles = {
        name: graph_profiles(name, model, config.engine, config.limits, sizes, images)
        for name, model in models.items()
    }
    for name in models:
        (made / name).mkdir(parents=True)
        (made / name / "config.json").write_text("{}")
    write_engines(made, models, profiles, config.engine, made.parent / "cache")


def block_build(library: Path, folder: Path) -> str:
    """The folder of a block draft's engines alone."""
    config = tiny_config(draft=BLOCK_DRAFT, engine=engine_config(library))
    spec, made = read_target(TARGET), folder / "block_draft"
    manifest = find_draft(str(BLOCK_DRAFT), spec, {})
    graphs = build_graphs(spec, manifest, config.engine, reference_location)
    models = {name: with_word_states(graphs[name]) for name in ("context", "block")}
    write_graphs_engines(made, models, config, spec)
    return str(made)


def build_target(target: Path, engine: dict[str, Any], made: Path) -> str:
    """Put the target's engine alone into the folder ``made``."""
    config = tiny_config(target=target, draft=None, engine=engine)
    spec = read_target(target)
    graphs = build_graphs(spec, None, config.engine, reference_location)
    write_graphs_engines(made, {"target": with_word_states(graphs["target"])}, config, spec)
    return str(made)


def main(library: Path, folder: Path) -> None:
    sys.path.append(str(WHEELS))
    found: dict[str, Any] = {"seconds": {}}

    def step(name: str, run: Callable[[], Any]) -> None:
        start = time.process_time()
        found[name] = run()
        found["seconds"][name] = round(time.process_time() - start, 2)

    config = EngineConfig.model_validate(engine_config(library))
    dialect = find_dialect(config.tensorrt)
    step("no companion", lambda: reason_of(lambda: dialect.prepare_parser(folder / "nothing.so")))
    step("plugins", lambda: str(load_plugins(config.tensorrt)))
    step("api", lambda: read_rtx(dialect.trt) == rtx_table())
    target = shortened(shutil.copytree(TARGET, folder / "checkpoint"))
    for dtype in DTYPES:
        step(dtype, lambda dtype=dtype: pair_build(library, target, dtype, folder / dtype))
    for kind, linear in TARGETS:
        step(
            f"{kind} {linear}",
            lambda k=kind, w=linear: target_build(library, folder, k, w),
        )
    step("experts", lambda: experts_build(library, folder))
    for kind in EXPERTS:
        step(f"experts {kind}", lambda k=kind: packed_experts_build(library, folder, k))
    for family in PAIRS:
        step(f"family {family}", lambda f=family: family_builds(library, folder, f))
    step("block draft", lambda: block_build(library, folder))
    step("refusals", lambda: refusals(library, folder))
    step("quantised", lambda: quantised_builds(library, folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
