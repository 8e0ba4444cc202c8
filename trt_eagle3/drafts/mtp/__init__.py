"""MTP heads: the draft in a target's own checkpoint (``TargetCheckpoint.mtp``).

The input of row t is the embedding of token t + 1 and the target's hidden state of row t. One
decoder layer follows, then the target's own head. In a chain, each step uses the hidden state of
the step before:

    x = fc(cat[norm(embedding), norm(hidden)])     norms: pre_fc_norm_embedding, pre_fc_norm_hidden
    y = norm(layer(x))                             logits = head(y); y is the next step's hidden

``fuse`` is ``pre_fc_norm_hidden`` here: features are hidden states after this norm. The draft graph
also feeds back hidden states after it.

Facts: vLLM's ``qwen3_5_mtp.py`` (order, norms, vision rows), llama.cpp #24025 and LightLLM #1402
(the hidden state after the target's final norm: with the one before it, acceptance falls from 2.7
to 1.8 tokens, and the answers stay the same).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.drafts.mtp.manifest import MtpManifest, as_served
from trt_eagle3.errors import UserError
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.convert import Layout
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.parity.reference.draft import ReferenceDraft
    from trt_eagle3.probe.interpretation import Factor

__all__ = ["KIND", "NAME", "own"]

NAME = "mtp"
"""Value of ``draft.checkpoint`` for a target's own head."""


class _Mtp:
    """Implements ``drafts.kind.DraftKind``."""

    title = "MTP head"
    manifest: type[DraftManifest] = MtpManifest
    graph_names = ("fuse", "draft")
    in_target = True
    tensorrt_llm = False

    def vllm_options(self, manifest: DraftManifest) -> dict[str, Any]:
        del manifest
        return {"method": "mtp"}

    def claims(self, checkpoint: str, _folder: Path, /) -> bool:
        return checkpoint == NAME

    def describe(self, _folder: Path, /) -> str:
        return ""  # it has no folder of its own

    def read(
        self, _path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any], /
    ) -> DraftManifest:
        from trt_eagle3.drafts.mtp.reader import read_head

        return read_head(target, overrides)

    def shapes(self, manifest: DraftManifest) -> Mapping[str, tuple[int, ...]]:
        from trt_eagle3.drafts.mtp.reader import head_shapes

        return head_shapes(own(manifest))

    def tables(self, _manifest: DraftManifest, /) -> Collection[str]:
        return ()

    def chain_steps(self, _manifest: DraftManifest, /) -> int | None:
        return None

    def graphs(
        self, manifest: DraftManifest, dtype: str, page_size: int, resolve: ResolveLocation
    ) -> dict[str, onnx.ModelProto]:
        from trt_eagle3.drafts.mtp.graph import draft_graph, fuse_graph

        return {
            "fuse": fuse_graph(own(manifest), dtype, resolve),
            "draft": draft_graph(own(manifest), dtype, page_size, resolve),
        }

    def reference(
        self, manifest: DraftManifest, dtype: torch.dtype, device: torch.device | str
    ) -> ReferenceDraft:
        from trt_eagle3.drafts.mtp.reference import MtpReference

        return MtpReference.load(own(manifest), dtype, device)

    def factors(self) -> Mapping[str, Factor]:
        from trt_eagle3.drafts.mtp.factors import FACTORS

        return FACTORS

    def export(
        self, manifest: DraftManifest, folder: Path, layout: Layout, architecture: str
    ) -> None:
        raise UserError(
            f"{folder}: {layout}: the MTP head of {manifest.path} is part of that {architecture}, "
            "and has no files of its own. Name an EAGLE-3 draft."
        )

    def differences(self, manifest: DraftManifest, spec: TargetSpec) -> Iterator[str]:
        for field, value in as_served(spec).items():
            if getattr(manifest, field) != value:
                yield f"{field}: it uses {value}, here {getattr(manifest, field)}"


def own(manifest: DraftManifest) -> MtpManifest:
    """Cast ``manifest`` to this kind's class."""
    assert isinstance(manifest, MtpManifest), type(manifest)
    return manifest


KIND = _Mtp()
