"""AutoregressiveParity: ``DraftParity`` of drafts that predict one token per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import errors_or_infinite
from trt_eagle3.parity.record.cycles import Committed
from trt_eagle3.parity.record.engine import replay
from trt_eagle3.parity.record.intermediates import tensor_names
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.trace import embeds_of, outputs_of
from trt_eagle3.parity.reference.chain_acceptance import accepted_chains
from trt_eagle3.parity.reference.compared_draft import ComparedDraft
from trt_eagle3.parity.reference.draft import DraftRows
from trt_eagle3.parity.reference.draft_parity import Errors, Rounding
from trt_eagle3.parity.reference.draft_rows import compare_drafts, read_draft
from trt_eagle3.parity.reference.drafting import Acceptance, AutoregressiveReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["AutoregressiveParity"]


@dataclass(frozen=True)
class AutoregressiveParity:
    """Implements ``DraftParity``."""

    reference: AutoregressiveReference

    def compare(
        self, _record: Record, expected: Sequence[ExpectedAnswer], progress: Callable[[], object], /
    ) -> tuple[list[ComparedDraft], Acceptance]:
        return compare_drafts(self.reference, expected, progress)

    def inside(self, record: Record, e: ExpectedAnswer) -> Errors:
        """Yield errors of the draft's first prompt forward, computed from the engine's inputs."""
        found = read_draft(self.reference, e.answer)
        forwards = [f for f in found.forwards if int(f.inputs["past_lengths"].max()) == 0][:1]
        rows = [found.committed[i] for i in range(len(embeds_of(forwards)))]
        expected = self._run_committed(rows, e)
        known = tensor_names(record.engine, "draft")
        names = [name for name in expected.intermediates if name in known]
        session = record.engine.open_graph("draft", names)
        outputs = replay(session, forwards, record.bound["draft"])
        for name in names:
            given = outputs_of(forwards, outputs, name)
            yield name, errors_or_infinite(given, expected.intermediates[name])
        given = outputs_of(forwards, outputs, "features_out")
        yield "features_out", errors_or_infinite(given, expected.features)

    def accepted(self, e: ExpectedAnswer, steps: int) -> Tensor:
        return accepted_chains(self.reference, e, steps)

    @property
    def rounding(self) -> Rounding | None:
        return None

    def _run_committed(self, rows: Sequence[Committed], e: ExpectedAnswer) -> DraftRows:
        """Run the reference on the features that the engine's draft received."""
        reference = self.reference
        features = torch.stack([r.fused for r in rows]).to(reference.target.device)
        positions = reference.positions(torch.arange(len(rows)), e.positions)
        embeds = torch.stack([r.embeds for r in rows]).to(features)
        mask = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        return reference.draft.run(embeds, features, positions.T, mask)
