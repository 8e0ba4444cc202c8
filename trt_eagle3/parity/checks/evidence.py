"""Evidence: what the engine did and what was expected, for the checks to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.reference.compared_draft import ComparedDraft
from trt_eagle3.parity.reference.draft_parity import DraftParity
from trt_eagle3.parity.reference.drafting import Acceptance
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.quantisation_cost import QuantisationCost
from trt_eagle3.parity.reference.rounding import RoundingReference
from trt_eagle3.parity.reference.target import TargetReference
from trt_eagle3.spec import TargetSpec

__all__ = ["Evidence", "PyTorch"]


@dataclass(frozen=True)
class PyTorch:
    """The references; ``drafting`` is None for a bundle without a draft."""

    target: TargetReference
    drafting: DraftParity | None
    rounding: RoundingReference | None = None


@dataclass(frozen=True)
class Evidence:
    """What the checks compare.

    Attributes:
        spec, manifest: read again from the checkpoints, or those of another bundle.
        expected: the expected values of each answer, in the order of the cases.
        drafts: compared draft rows by answer; empty without a draft.
        pytorch: the references; None if the expected values are another bundle's.
        original: the 16-bit target, if the expected target is quantised and the original is known.
        cost: what quantisation changes, if ``original`` is known.
    """

    record: Record
    spec: TargetSpec
    manifest: DraftManifest | None
    expected: Sequence[ExpectedAnswer]
    drafts: Sequence[ComparedDraft] = ()
    acceptance: Acceptance = field(default_factory=Acceptance)
    pytorch: PyTorch | None = None
    original: TargetCheckpoint | None = None
    cost: QuantisationCost | None = None

    @property
    def engine(self) -> RecordingEngine:
        """The recorded engine; its sessions are closed."""
        return self.record.engine

    @property
    def checkpoint(self) -> TargetCheckpoint:
        """The target as read from its checkpoint, for checks that need PyTorch."""
        assert isinstance(self.spec, TargetCheckpoint), "another bundle's spec has no tensors"
        return self.spec

    @property
    def reference(self) -> TargetReference:
        """The target's reference, for checks that need PyTorch."""
        assert self.pytorch is not None, "two bundles are compared: there is no reference"
        return self.pytorch.target

    @property
    def drafting(self) -> DraftParity | None:
        """The draft beside its reference, if there is one."""
        return self.pytorch.drafting if self.pytorch else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n, H]: the engine's embeddings, which identify the rows of a tree."""
        return self.reference.embed(token_ids).cpu().to(self.engine.dtype)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self.engine.processor.decode(token_ids)

    @property
    def answers(self) -> Sequence[RecordedAnswer]:
        """The recorded answers, in the order of the cases."""
        return [e.answer for e in self.expected]
