"""Followed answers: what is expected of them along the experts that the engine took.

Without speculation where the engine does not tell its experts, and with it in any case: no
forward of those tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.parity.record.cycles import read_draft_forwards
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.trace import logits_of, outputs_of
from trt_eagle3.parity.record.trees import verified_logits
from trt_eagle3.parity.reference.draft_rows import committed_rows
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.route_search import RouteSearch, Told, tell_aux, tell_logits

__all__ = ["Follower"]


@dataclass(frozen=True)
class Follower:
    """Follows the engine of ``record``; ``aux``, ``logits``: tolerances of what it tells."""

    search: RouteSearch
    record: Record
    manifest: DraftManifest | None
    aux: float
    logits: float

    def __call__(self, expected: Sequence[ExpectedAnswer]) -> list[ExpectedAnswer]:
        """The answers as they are expected of the engine, ``with_speculation`` too."""
        told = [[] if e.intermediates else self._tell_recorded(e) for e in expected]
        alone = self.search.follow(expected, told)
        speculative = self.search.follow(alone, [self._tell_speculative(e) for e in alone])
        pairs = zip(alone, speculative, strict=True)
        return [e if other is e else replace(e, with_speculation=other) for e, other in pairs]

    def _tell_recorded(self, e: ExpectedAnswer) -> list[Told]:
        """What the forwards without speculation tell."""
        forwards, name = e.answer.autoregressive_forwards, "aux_hidden_states"
        given = {x.row: x.values for f in forwards for x in logits_of(f)}
        given = {row: x for row, x in given.items() if row >= e.answer.prompt_len - 1}
        told = self._tell_logits(given, None)
        if self.manifest is None or name not in forwards[0].outputs:
            return told
        aux = outputs_of(forwards, [f.outputs for f in forwards], name)
        return [*self._tell_aux(self.manifest, aux), *told]

    def _tell_speculative(self, e: ExpectedAnswer) -> list[Told]:
        """What the forwards with speculation tell: what the draft was given, and what was
        verified.
        """
        if self.manifest is None:
            return []
        answer, record = e.answer, self.record
        drafted = read_draft_forwards(answer.speculative_forwards, answer.prompt_len)
        rows = committed_rows(e, drafted)
        ids = answer.token_ids[: answer.prompt_len + answer.agreed]
        table = self.search.reference.embed(ids).cpu().to(record.engine.dtype)
        told = self._tell_logits(verified_logits(answer, table), record.columns)
        if not rows:
            return told
        return [*self._tell_aux(self.manifest, torch.stack([row.aux for row in rows])), *told]

    def _tell_aux(self, manifest: DraftManifest, values: Tensor) -> list[Told]:
        return tell_aux(manifest, self.search.num_layers, values, self.aux)

    def _tell_logits(self, given: Mapping[int, Tensor], columns: Tensor | None) -> list[Told]:
        if not given:
            return []
        rows = sorted(given)
        values, num_layers = torch.stack([given[row] for row in rows]), self.search.num_layers
        return [tell_logits(num_layers, torch.tensor(rows), values, self.logits, columns)]
