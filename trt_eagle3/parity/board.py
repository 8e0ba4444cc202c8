"""The board: every gate, what was measured for it, and what failed first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.parity.thresholds import P95, WORST_ROW, Limit, Thresholds

__all__ = ["GATES", "Board", "Gate", "Measurement"]


@dataclass(frozen=True)
class Gate:
    """A gate.

    ``stage``: the part of the engine that it looks at. ``threshold``: a name of ``THRESHOLDS``.
    """

    name: str
    stage: str
    title: str
    threshold: str


_GATES = (
    Gate("bundle.meaning", "bundle", "geometry and draft manifest as the checkpoints say", "exact"),
    Gate(
        "bundle.files",
        "bundle",
        "weights and processor files, byte for byte the checkpoints'",
        "exact",
    ),
    Gate("bundle.tables", "bundle", "token tables and draft vocabulary, for every token", "exact"),
    Gate("processor.token_ids", "processor", "prompt token ids", "exact"),
    Gate(
        "processor.position_ids",
        "processor",
        "rope positions and rope_delta of the prompt",
        "exact",
    ),
    Gate("processor.pixel_values", "processor", "patches and grids", "pixel_values"),
    Gate("vision.embeds", "vision", "visual embeddings", "vision"),
    Gate("vision.deepstack", "vision", "deepstack levels", "vision"),
    Gate(
        "target.inputs_embeds",
        "prefill",
        "token embeddings and visual rows as the target gets them",
        "exact",
    ),
    Gate("target.deepstack_embeds", "prefill", "deepstack rows as the target gets them", "exact"),
    Gate(
        "target.position_ids",
        "decode",
        "rope positions of every row, decoded and verified ones included",
        "exact",
    ),
    Gate(
        "target.layer_steps",
        "target",
        "each decoder layer, fed with the engine's own input",
        "layer_step",
    ),
    Gate("target.layers", "target", "each decoder layer's output", "layer_output"),
    Gate("target.aux", "target", "aux hidden states", "aux"),
    Gate("target.logits_cosine", "target", "logits: direction", "logits_cosine"),
    Gate("target.logits_l2", "target", "logits: size of the error", "logits_l2"),
    Gate("target.top1", "target", "logits: best token where the reference is sure", "top1"),
    Gate("target.top5", "target", "logits: best token where it is not", "top5"),
    Gate("tokens.plain", "decode", "greedy tokens, plain, against the reference", "token_failures"),
    Gate(
        "tokens.text",
        "decode",
        "text of the answers, as transformers decodes their tokens",
        "exact",
    ),
    Gate("verify.logits", "verify", "logits of verified rows, against the reference", "logits_l2"),
    Gate(
        "tokens.speculative", "decode", "greedy tokens, speculative against plain", "token_failures"
    ),
    Gate(
        "draft.aux",
        "draft extend",
        "aux rows that the draft is given, against the reference",
        "aux",
    ),
    Gate("draft.inputs_embeds", "draft extend", "token embeddings as the draft gets them", "exact"),
    Gate("draft.position_ids", "draft extend", "rope positions of the draft's rows", "exact"),
    Gate("draft.fuse", "fuse", "features of the aux hidden states", "draft_features"),
    Gate("draft.features", "draft", "features fed back, over four steps", "draft_steps"),
    Gate("draft.logits", "draft", "draft logits over four steps", "draft_steps"),
    Gate(
        "draft.proposals",
        "propose",
        "proposed tokens are the draft's best, and the tree is one",
        "exact",
    ),
    Gate(
        "draft.acceptance",
        "accept",
        "acceptance by position, against the reference draft's own",
        "acceptance",
    ),
    Gate(
        "batch.tokens",
        "batch",
        "tokens of all prompts at once, against each alone",
        "token_failures",
    ),
    Gate(
        "batch.logits", "batch", "logits of all prompts at once, against the reference", "logits_l2"
    ),
    Gate(
        "batch.acceptance",
        "batch",
        "acceptance of all prompts at once, against each alone",
        "acceptance",
    ),
    Gate(
        "sampling.probabilities",
        "sampling",
        "processed target probabilities",
        "sampling_probabilities",
    ),
    Gate("sampling.tokens", "sampling", "frequencies of sampled tokens", "sampling_frequencies"),
)
GATES: Mapping[str, Gate] = {gate.name: gate for gate in _GATES}
"""All gates, in the order of the data's way through the engine: the first that fails is where to
look.
"""


@dataclass(frozen=True)
class Measurement:
    """One value. ``row``: of the sequence, where one row is the worst."""

    gate: str
    value: float
    case: str
    tensor: str
    row: int | None = None
    detail: str = ""


@dataclass
class Board:
    """Collects measurements, and why a gate has none."""

    thresholds: Thresholds
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def limit(self, gate: str) -> Limit:
        """The tolerance of a gate."""
        return self.thresholds[GATES[gate].threshold]

    def add(
        self,
        gate: str,
        value: float,
        case: str,
        tensor: str,
        row: int | None = None,
        detail: str = "",
    ) -> None:
        """Note one value."""
        self.measurements.setdefault(gate, []).append(
            Measurement(gate, float(value), case, tensor, row, detail)
        )

    def add_rows(self, gate: str, errors: Tensor, case: str, tensor: str, first: int = 0) -> None:
        """Note what a gate makes of the errors of rows ``first`` on: their worst, or their p95 or a
        share of the worst.

        A p95 alone would let one row of twenty be anything.
        """
        if not len(errors):
            return
        value = float(errors.max())
        if self.limit(gate).metric.endswith(P95):
            value = max(_quantile(errors, 0.95), value / WORST_ROW)
        self.add(gate, value, case, tensor, first + int(errors.argmax()))

    def add_exact(
        self, gate: str, actual: Tensor, expected: Tensor, case: str, tensor: str, first: int = 0
    ) -> None:
        """Note the largest difference of two tensors [n, ...]; another shape is an infinite one."""
        if actual.shape != expected.shape:
            detail = f"expected shape {list(expected.shape)}, got {list(actual.shape)}"
            self.add(gate, float("inf"), case, tensor, None, detail)
            return
        if not actual.numel():
            return
        by_row = (
            (actual.double() - expected.double())
            .abs()
            .reshape(len(actual), -1)
            .amax(dim=1)
            .nan_to_num(nan=torch.inf)
        )
        worst = int(by_row.argmax())
        wrong = int((by_row > self.limit(gate).value).sum())
        detail = f"{wrong} of {len(by_row)} rows differ" if wrong else ""
        self.add(gate, float(by_row[worst]), case, tensor, first + worst, detail)

    def count(self, gate: str, **numbers: int) -> None:
        """Add to what a gate has counted over all prompts (``tokens=32``)."""
        counts = self.counts.setdefault(gate, Counter())
        counts.update({what.replace("_", " "): n for what, n in numbers.items()})

    def skip(self, gates: Iterable[str], reason: str) -> None:
        """Say why gates have no measurement."""
        self.skipped |= dict.fromkeys(gates, reason)

    def failures(self, gate: str) -> list[Measurement]:
        """Measurements out of tolerance, in the order in which they were taken."""
        limit = self.limit(gate)
        return [m for m in self.measurements.get(gate, []) if not limit.holds(m.value)]

    def worst(self, gate: str) -> Measurement | None:
        """The measurement furthest on the wrong side."""
        found = self.measurements.get(gate)
        if not found:
            return None
        sign = 1 if self.limit(gate).better == "low" else -1
        return max(found, key=lambda m: sign * m.value)

    def first_failure(self) -> Measurement | None:
        """What left its tolerance first, in the order of ``GATES`` and of the measurements."""
        return next((m for gate in GATES for m in self.failures(gate)), None)


def _quantile(values: Tensor, q: float) -> float:
    """Infinity counts as a value, not as an undefined one."""
    ordered = values.double().sort().values
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
