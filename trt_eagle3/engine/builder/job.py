"""What a backend's part of a build works from, and what it leaves."""

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
from trt_eagle3.engine.bundle.record import EngineRecord
from trt_eagle3.engine.bundle.weight_locations import WeightLocations
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.builder import ResolveLocation

__all__ = ["BuildJob", "BuiltEngine", "Engines", "TreeSizes", "Written"]


@dataclass(frozen=True)
class TreeSizes:
    """What a speculation's largest tree asks of the engines.

    Attributes:
        num_nodes: tokens of a target pass. width: of a draft step at most. num_draft_rows: of all
            draft steps.
    """

    num_nodes: int = 1
    width: int = 1
    num_draft_rows: int = 1


@dataclass(frozen=True)
class BuildJob:
    """A bundle to be made.

    Attributes:
        build_config: the whole config as JSON values, which each graph's ``config.json`` repeats.
        path: where the bundle will be, once it is whole. tree: the largest tree that it decodes.
        reference_weights: leave the weights in the checkpoints.
        begin: called with each of ``pipeline.STAGES`` that the backend goes through. show: told how
            far a long stage is.
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
        """The graphs, whose weights lie where ``resolve`` says; writes each one's ``config.json``
        into ``folder``.
        """
        self.begin("graphs")
        graphs = build_graphs(self.spec, self.manifest, self.engine, resolve)
        for name in graphs:
            create_file(folder / name / "config.json", self._graph_config(name))
        return graphs

    def _graph_config(self, name: str) -> bytes:
        """TensorRT-LLM's ``config.json`` of an engine folder."""
        manifest = self.manifest if name in {"fuse", "draft"} else None
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

    ``device_bytes``: activation memory that it wants; ``num_plugins``: layers that are ours.
    """

    num_bytes: int
    seconds: float
    num_layers: int
    num_plugins: int
    device_bytes: int


@dataclass(frozen=True)
class Engines:
    """What became of the graphs where a backend compiles them.

    Attributes:
        built: by graph. missing: why there is nothing built, with what is left to do; None where
            there is.
    """

    built: Mapping[str, BuiltEngine]
    missing: str | None = None


@dataclass(frozen=True)
class Written:
    """What a backend put into a bundle.

    Attributes:
        locations: of the weights. record: what the graphs were made for. placed: how weight files
            got there. engines: None where graphs are run as they are.
    """

    locations: WeightLocations
    record: EngineRecord
    placed: tuple[str, ...] = ()
    engines: Engines | None = None
