"""DraftKind: the interface of a kind of drafts.

Decoding depends on the graphs, not on the kind (``docs/architecture.md``). The graphs of
autoregressive kinds are ``fuse`` and ``draft``. ``fuse`` computes features from the target's
hidden states. ``draft`` maps the embeddings of the tokens one ahead and the features to logits and
the next step's features. Those of block drafts are ``context`` and ``block``
(``drafts/block/graph.py``).

A kind's methods import its modules when they are called, as a family's methods do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.convert import Layout
    from trt_eagle3.drafts.block.reference import BlockReference
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.parity.reference.draft import ReferenceDraft
    from trt_eagle3.probe.interpretation import Factor

__all__ = ["DraftKind"]


class DraftKind(Protocol):
    """A kind of drafts."""

    @property
    def title(self) -> str:
        """Name for messages."""
        ...

    @property
    def manifest(self) -> type[DraftManifest]:
        """The class of its manifests."""
        ...

    @property
    def graph_names(self) -> tuple[str, ...]:
        """The graphs that ``graphs`` builds."""
        ...

    @property
    def in_target(self) -> bool:
        """Whether it is part of the target's own checkpoint, and has no files of its own."""
        ...

    @property
    def tensorrt_llm(self) -> bool:
        """Whether TensorRT-LLM can run it."""
        ...

    def vllm_options(self, manifest: DraftManifest) -> dict[str, Any]:
        """Return the keys of vLLM's ``speculative-config`` that name this kind."""
        ...

    def claims(self, checkpoint: str, folder: Path) -> bool:
        """Return whether ``draft.checkpoint`` names a draft of this kind.

        ``folder``: the place of its files: the target's if ``in_target``.
        """
        ...

    def describe(self, folder: Path) -> str:
        """Describe a draft of this kind in ``folder`` for messages; empty if there is none."""
        ...

    def read(
        self, path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any]
    ) -> DraftManifest:
        """Read the draft in the folder ``path``.

        Raises:
            UserError: no draft is recognised, it is inconsistent, or it is one of another target.
        """
        ...

    def shapes(self, manifest: DraftManifest) -> Mapping[str, tuple[int, ...]]:
        """Return canonical name and shape of its weights."""
        ...

    def tables(self, manifest: DraftManifest) -> Collection[str]:
        """Return the tensors that decoding reads outside the graphs, beside token table and d2t."""
        ...

    def chain_steps(self, manifest: DraftManifest) -> int | None:
        """Return the most tokens of its chains if it drafts only chains; None: any tree."""
        ...

    def graphs(
        self, manifest: DraftManifest, dtype: str, page_size: int, resolve: ResolveLocation
    ) -> dict[str, onnx.ModelProto]:
        """Build the graphs of ``graph_names``."""
        ...

    def reference(
        self, manifest: DraftManifest, dtype: torch.dtype, device: torch.device | str
    ) -> ReferenceDraft | BlockReference:
        """Load the draft in plain PyTorch with its weights, for parity."""
        ...

    def factors(self) -> Mapping[str, Factor]:
        """Return the fields that may be ambiguous in its files, for ``probe``."""
        ...

    def export(
        self, manifest: DraftManifest, folder: Path, layout: Layout, architecture: str
    ) -> None:
        """Write a draft with files of its own in the layout of a runtime.

        ``architecture``: the target's.

        Raises:
            UserError: the layout cannot express it.
        """
        ...

    def differences(self, manifest: DraftManifest, spec: TargetSpec) -> Iterator[str]:
        """Describe what other runtimes read differently from ``manifest``, one line each."""
        ...
