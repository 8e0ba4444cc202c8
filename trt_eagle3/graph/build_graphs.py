"""Build all graphs of a target and its draft."""

from __future__ import annotations

import onnx

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.families.registry import family_of
from trt_eagle3.graph.builder import ResolveLocation
from trt_eagle3.graph.residual import Residual
from trt_eagle3.graph.target import target_graph

__all__ = ["build_graphs"]


def build_graphs(
    spec: TargetCheckpoint,
    manifest: DraftManifest | None,
    engine: EngineConfig,
    resolve: ResolveLocation,
) -> dict[str, onnx.ModelProto]:
    """Build the graphs of a target, and of its draft if there is one, by name.

    No weight is loaded: weights are referenced by the future places that ``resolve`` returns.
    """
    aux = manifest.aux_layers if manifest else ()
    before = manifest is not None and manifest.aux_pre_deepstack
    residual = Residual(wide=engine.residual == "float32" and engine.dtype != "float32")
    models = {
        "target": target_graph(
            spec,
            aux,
            before,
            engine.dtype,
            engine.page_size,
            resolve,
            residual,
            engine.kv_dtype == "fp8",
            aux_normed=manifest is not None and manifest.takes_normed,
        ),
    }
    vision = family_of(spec).vision if spec.vision else None
    if vision is not None:
        models["vision"] = vision.graph(spec, engine.dtype, resolve)
    if manifest:
        models |= kind_of(manifest).graphs(manifest, engine.dtype, engine.page_size, resolve)
    return models
