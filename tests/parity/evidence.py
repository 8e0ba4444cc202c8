"""Small evidence by hand: one answer of a vocabulary of four, and what a check makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.checks.check_recorder import CheckRecorder, Measurements
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.checks.thresholds import Thresholds
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.workload import Case
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.prompts.prompt_file import Question

LOGITS = torch.tensor([[8.0, 1.0, -3.0, 0.0], [2.0, 8.0, 0.5, 1.0], [8.0, 7.9, 0.0, 1.0]])
"""Best tokens 0, 1, 0; the last row's first two are 0.1 apart, and its root mean square is 5.6."""


def expected_answer(
    autoregressive: tuple[int, ...],
    speculative: tuple[int, ...] = (),
    accepted_lengths: tuple[int, ...] = (),
) -> ExpectedAnswer:
    """A text prompt of five tokens whose reference logits are ``LOGITS``."""
    ids = torch.arange(5)
    inputs = ModelInputs(ids, ids.expand(3, -1).int(), 0, (), torch.empty(0, 3), ids < 0)
    case, tokens = Case("a", "text", Question("a")), (autoregressive, speculative)
    answer = RecordedAnswer(case, inputs, *tokens, None, [], [], accepted_lengths)
    return ExpectedAnswer(answer, {}, torch.empty(0, 3), logits=LOGITS)


class _Evidence(SimpleNamespace):
    """What checks ask of evidence, without an engine or a checkpoint."""

    @property
    def answers(self) -> list[RecordedAnswer]:
        return [e.answer for e in self.expected]

    def decode(self, ids: Sequence[int]) -> str:
        return f"<{ids[0]}>"

    def embed(self, ids: Tensor) -> Tensor:
        return ids[:, None].float()


def evidence(expected: Sequence[ExpectedAnswer] = (), **record: Any) -> Any:
    """Evidence of these answers; ``record``: fields of the record."""
    given = SimpleNamespace(**record)
    return _Evidence(expected=list(expected), record=given, pytorch=None, manifest=None)


def recorder_of(dtype: str, **overrides: float) -> CheckRecorder:
    return CheckRecorder(CHECKS.values(), Thresholds(dtype, overrides))


def measured(name: str, given: Any, dtype: str = "float32", **overrides: float) -> Measurements:
    """What check ``name`` of the registry makes of the evidence ``given``."""
    found = recorder_of(dtype, **overrides)[name]
    found.check.function(given, found)
    return found
