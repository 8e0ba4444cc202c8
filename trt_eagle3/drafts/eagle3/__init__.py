"""EAGLE-3 drafts of all supported producers (``checkpoint/draft.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.checkpoint.manifest import DraftManifest, Eagle3Manifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.convert import Layout
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.parity.reference.draft import ReferenceDraft
    from trt_eagle3.probe.interpretation import Factor

__all__ = ["KIND", "own"]


class _Eagle3:
    """Implements ``drafts.kind.DraftKind``."""

    title = "EAGLE-3"
    manifest: type[DraftManifest] = Eagle3Manifest
    graph_names = ("fuse", "draft")
    in_target = False
    tensorrt_llm = True

    def vllm_options(self, manifest: DraftManifest) -> dict[str, Any]:
        more = {} if own(manifest).parallel is None else {"parallel_drafting": True}
        return {"method": "eagle3", **more}

    def claims(self, _checkpoint: str, _folder: Path, /) -> bool:
        return True

    def describe(self, folder: Path) -> str:
        from trt_eagle3.checkpoint.draft import describe_draft

        return describe_draft(folder)

    def read(
        self, path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any]
    ) -> DraftManifest:
        from trt_eagle3.checkpoint.draft import read_draft

        return read_draft(path, target, overrides)

    def shapes(self, manifest: DraftManifest) -> Mapping[str, tuple[int, ...]]:
        from trt_eagle3.checkpoint.draft_geometry import draft_shapes

        return draft_shapes(own(manifest))

    def tables(self, manifest: DraftManifest) -> Collection[str]:
        return () if own(manifest).parallel is None else ("mask_hidden",)

    def chain_steps(self, manifest: DraftManifest) -> int | None:
        rows = own(manifest).parallel
        return None if rows is None else rows.num_drafts

    def graphs(
        self, manifest: DraftManifest, dtype: str, page_size: int, resolve: ResolveLocation
    ) -> dict[str, onnx.ModelProto]:
        from trt_eagle3.drafts.eagle3.graph import draft_graph, fuse_graph

        return {
            "fuse": fuse_graph(own(manifest), dtype, resolve),
            "draft": draft_graph(own(manifest), dtype, page_size, resolve),
        }

    def reference(
        self, manifest: DraftManifest, dtype: torch.dtype, device: torch.device | str
    ) -> ReferenceDraft:
        from trt_eagle3.drafts.eagle3.reference import Eagle3Reference

        return Eagle3Reference.load(own(manifest), dtype, device)

    def factors(self) -> Mapping[str, Factor]:
        from trt_eagle3.drafts.eagle3.factors import FACTORS

        return FACTORS

    def export(
        self, manifest: DraftManifest, folder: Path, layout: Layout, architecture: str
    ) -> None:
        from trt_eagle3.checkpoint.convert import convert_draft

        convert_draft(own(manifest), folder, layout, architecture)

    def differences(self, manifest: DraftManifest, spec: TargetSpec) -> Iterator[str]:
        """Yield differences to a runtime that reads aux hidden states after deepstack.

        That runtime also uses pad embeddings at image positions, and shifts no position.
        """
        caught = [k for k in manifest.aux_layers if spec.layers[k].visual_level is not None]
        if manifest.aux_pre_deepstack and caught:
            yield (
                f"aux_pre_deepstack: it takes out({caught}) after the deepstack level is added, "
                "here before"
            )
        if own(manifest).image_rows != "pad":
            yield (
                "image_rows: its draft reads the pad token's embedding at image positions, here "
                "the vision rows"
            )
        if shift := own(manifest).position_shift:
            yield f"position_shift: it has none, here {shift}"


def own(manifest: DraftManifest) -> Eagle3Manifest:
    """Cast ``manifest`` to this kind's class."""
    assert isinstance(manifest, Eagle3Manifest), type(manifest)
    return manifest


KIND = _Eagle3()
