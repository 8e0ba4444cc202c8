"""Input and output of a backend's part of a build."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from trt_eagle3.atomic_io import create_file
from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_to_dict
from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.drafts.registry import DRAFT_GRAPHS
from trt_eagle3.engine.bundle.record import EngineRecord
from trt_eagle3.engine.bundle.weight_locations import WeightLocations
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.builder import ResolveLocation

__all__ = ["BuildJob", "BuiltEngine", "Engines", "TreeSizes", "Written"]


@dataclass(frozen=True)
class TreeSizes:
    """Sizes of a speculation's largest tree, for which the engines are built.

    Attributes:
        num_nodes: tokens of a target forward. width: most nodes of a draft step. num_draft_rows:
            rows of all draft steps.
    """

    num_nodes: int = 1
    width: int = 1
    num_draft_rows: int = 1


@dataclass(frozen=True)
class BuildJob:
    """A bundle to build.

    Attributes:
        build_config: the whole config as JSON values; each graph's ``config.json`` repeats it.
        path: final path of the bundle. tree: the largest tree that the bundle decodes.
        reference_weights: leave the weights in the checkpoints.
        begin: called with each of ``pipeline.STAGES`` that the backend starts. show: called with
            the progress of a long stage.
    """

    engine: EngineConfig
    limits: LimitsConfig
    build_config: Mapping[str, Any]
    spec: TargetCheckpoint
    manifest: DraftManifest | None
    path: Path
    tree: TreeSizes
    reference_weights: bool
    begin: Callable[[str], object]
    show: Callable[[str], object]

    def make_graphs(self, folder: Path, resolve: ResolveLocation) -> dict[str, onnx.ModelProto]:
        """Build the graphs, with weights located by ``resolve``; write each graph's
        ``config.json`` into ``folder``.
        """
        self.begin("graphs")
        graphs = build_graphs(self.spec, self.manifest, self.engine, resolve)
        for name in graphs:
            create_file(folder / name / "config.json", self._graph_config(name))
        return graphs

    def _graph_config(self, name: str) -> bytes:
        """Return the content of an engine folder's ``config.json``, as TensorRT-LLM has it."""
        manifest = self.manifest if name in DRAFT_GRAPHS else None
        pretrained = manifest_to_dict(manifest) if manifest else target_to_dict(self.spec)
        values = {
            "version": version("trt-eagle3"),
            "pretrained_config": pretrained,
            "build_config": self.build_config,
        }
        return json.dumps(values, indent=2).encode()


@dataclass(frozen=True)
class BuiltEngine:
    """An engine on disk.

    ``device_bytes``: activation memory that it needs; ``num_plugins``: layers that are plugins.
    """

    num_bytes: int
    seconds: float
    num_layers: int
    num_plugins: int
    device_bytes: int


@dataclass(frozen=True)
class Engines:
    """The compiled engines of a backend that compiles its graphs.

    Attributes:
        built: engines by graph. missing: why no engines were built, and what remains to be done;
            None if they were built.
    """

    built: Mapping[str, BuiltEngine]
    missing: str | None = None


@dataclass(frozen=True)
class Written:
    """The output of a backend's part of a build.

    Attributes:
        locations: of the weights. record: the types and versions of the graphs. placed: how each
            weight file was placed. engines: None if the backend does not compile graphs.
    """

    locations: WeightLocations
    record: EngineRecord
    placed: tuple[str, ...] = ()
    engines: Engines | None = None
