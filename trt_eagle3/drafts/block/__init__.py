"""Block drafts: DFlash, DFlash2 and DSpark (``BlockManifest``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.errors import UserError
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.convert import Layout
    from trt_eagle3.drafts.block.reference import BlockReference
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.probe.interpretation import Factor

__all__ = ["CANNOT_CONVERT", "KIND", "own"]

CANNOT_CONVERT = (
    "a block draft: no layout here holds it. Servers that run it read its own files: name its "
    "checkpoint there."
)

_TABLES = ("candidate_selector.", "markov_head.", "confidence_head.", "mask_embedding")
"""Prefixes of the tensors that the heads read outside the graphs."""


class _Block:
    """Implements ``drafts.kind.DraftKind``."""

    title = "block draft"
    manifest: type[DraftManifest] = BlockManifest
    graph_names = ("context", "block")
    in_target = False
    tensorrt_llm = False

    def vllm_options(self, manifest: DraftManifest) -> dict[str, Any]:
        return {"method": "dspark" if own(manifest).method == "dspark" else "dflash"}

    def claims(self, _checkpoint: str, folder: Path, /) -> bool:
        from trt_eagle3.drafts.block.names import names_block

        return names_block(folder)

    def describe(self, folder: Path) -> str:
        return f"a {self.title}" if self.claims("", folder) else ""

    def read(
        self, path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any]
    ) -> DraftManifest:
        from trt_eagle3.drafts.block.reader import read_block

        return read_block(path, target, overrides)

    def shapes(self, manifest: DraftManifest) -> Mapping[str, tuple[int, ...]]:
        from trt_eagle3.drafts.block.shapes import block_shapes

        return block_shapes(own(manifest))

    def tables(self, manifest: DraftManifest) -> Collection[str]:
        return tuple(name for name in self.shapes(manifest) if name.startswith(_TABLES))

    def chain_steps(self, manifest: DraftManifest) -> int | None:
        return own(manifest).drafts_of(own(manifest).block_size)

    def graphs(
        self, manifest: DraftManifest, dtype: str, page_size: int, resolve: ResolveLocation
    ) -> dict[str, onnx.ModelProto]:
        from trt_eagle3.drafts.block.graph import block_graph, context_graph

        return {
            "context": context_graph(own(manifest), dtype, page_size, resolve),
            "block": block_graph(own(manifest), dtype, page_size, resolve),
        }

    def reference(
        self, manifest: DraftManifest, dtype: torch.dtype, device: torch.device | str
    ) -> BlockReference:
        from trt_eagle3.drafts.block.reference import BlockReference

        return BlockReference.load(own(manifest), dtype, device)

    def factors(self) -> Mapping[str, Factor]:
        from trt_eagle3.drafts.block.factors import FACTORS

        return FACTORS

    def export(
        self, _manifest: DraftManifest, _folder: Path, _layout: Layout, _architecture: str, /
    ) -> None:
        raise UserError(CANNOT_CONVERT)

    def differences(self, manifest: DraftManifest, spec: TargetSpec) -> Iterator[str]:
        """Yield differences to vLLM 0.33, whose aux hidden states are taken after deepstack."""
        block = own(manifest)
        caught = [k for k in block.aux_layers if spec.layers[k].visual_level is not None]
        if block.aux_pre_deepstack and caught:
            yield (
                f"aux_pre_deepstack: it takes out({caught}) after the deepstack level is added, "
                "here before"
            )
        if block.markov is not None and block.markov.form != "vanilla":
            yield f"markov: it builds the vanilla head alone, here {block.markov.form}"


def own(manifest: DraftManifest) -> BlockManifest:
    """Cast ``manifest`` to this kind's class."""
    assert isinstance(manifest, BlockManifest), type(manifest)
    return manifest


KIND = _Block()
