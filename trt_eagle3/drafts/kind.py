"""What a kind of drafts gives the rest of the program.

The contract of its graphs is the same for all kinds, so that decoding knows none of them
(``docs/architecture.md``): ``fuse`` makes features of what the target gives, ``draft`` takes the
embeddings of the tokens one ahead and features, and gives logits and the features of the next step.
A kind's methods import its parts when they are called, as a family's do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.convert import Layout
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.parity.reference.draft import ReferenceDraft
    from trt_eagle3.probe.interpretation import Factor

__all__ = ["DraftKind"]


class DraftKind(Protocol):
    """A kind of drafts."""

    @property
    def title(self) -> str:
        """What people call it."""
        ...

    @property
    def manifest(self) -> type[DraftManifest]:
        """The class of its manifests."""
        ...

    @property
    def in_target(self) -> bool:
        """Whether it is part of the target's own checkpoint, and so has no files of its own."""
        ...

    @property
    def vllm_method(self) -> str:
        """``method`` of vLLM's ``speculative-config``."""
        ...

    @property
    def tensorrt_llm(self) -> bool:
        """Whether TensorRT-LLM can be given it."""
        ...

    def claims(self, checkpoint: str) -> bool:
        """Whether ``draft.checkpoint`` names a draft of this kind."""
        ...

    def read(
        self, path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any]
    ) -> DraftManifest:
        """The draft in the folder ``path``.

        Raises:
            UserError: none that is understood, one that contradicts itself, or one of another
                target.
        """
        ...

    def shapes(self, manifest: DraftManifest) -> Mapping[str, tuple[int, ...]]:
        """Canonical name and shape of its weights."""
        ...

    def graphs(
        self, manifest: DraftManifest, dtype: str, page_size: int, resolve: ResolveLocation
    ) -> dict[str, onnx.ModelProto]:
        """``fuse`` and ``draft``."""
        ...

    def reference(
        self, manifest: DraftManifest, dtype: torch.dtype, device: torch.device | str
    ) -> ReferenceDraft:
        """The draft in plain PyTorch, its weights read; for parity."""
        ...

    def factors(self) -> Mapping[str, Factor]:
        """What may be ambiguous in its files; for ``probe``."""
        ...

    def export(
        self, manifest: DraftManifest, folder: Path, layout: Layout, architecture: str
    ) -> None:
        """Write a draft with files of its own in the layout of a runtime.

        ``architecture``: of the target.

        Raises:
            UserError: the layout cannot express it.
        """
        ...

    def differences(self, manifest: DraftManifest, spec: TargetSpec) -> Iterator[str]:
        """What other runtimes read otherwise than ``manifest``, one line each."""
        ...
