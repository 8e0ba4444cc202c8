"""Which tensor went wrong first: the coarse one that left its tolerance, then the tensors inside
that stage.

Every tensor is compared with what the reference makes of the engine's own input to that stage, so
that the first that is out is where the fault lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.board import GATES, Board, Measurement
from trt_eagle3.parity.cycles import DraftRecord
from trt_eagle3.parity.drafting import DraftReference
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.record import Pass, RecordingEngine, replay
from trt_eagle3.parity.target import TargetReference
from trt_eagle3.parity.target_check import CheckedTarget, tensor_names
from trt_eagle3.parity.trace import embeds_of, outputs_of

__all__ = ["Diagnosis", "Tools", "diagnose", "diagnose_coarsely", "first_tensor"]

_LAYER = re.compile(r"layers\.(\d+)\.output(_pre_deepstack)?")
_VISION_BLOCK = (
    "norm1",
    "attn.qkv",
    "attn.output",
    "attention_residual",
    "norm2",
    "mlp.fc1",
    "mlp.fc2",
    "output",
)
_DRAFT_ORDER = ("hidden_norm", "embedding_and_hidden")
_DRAFT_LAYER = (
    "self_attn.qkv",
    "self_attn.q",
    "self_attn.k",
    "self_attn.out",
    "self_attn.output",
    "attention_residual",
    "post_attention_layernorm",
    "mlp.output",
    "output",
)


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong first.

    Attributes:
        stage, gate, case, row: where. tensor: the first tensor that left its tolerance, as fine as
            it could be found.
        value, bound: what was measured of it and its tolerance. detail: in words.
    """

    stage: str
    gate: str
    case: str
    tensor: str
    row: int | None
    value: float
    bound: float
    detail: str


@dataclass(frozen=True)
class Tools:
    """What looking closer needs.

    ``drafting`` and ``records`` are absent of a bundle without a draft.
    """

    engine: RecordingEngine
    bound: Mapping[str, Mapping[str, Tensor]]
    reference: TargetReference
    targets: Sequence[CheckedTarget]
    drafting: DraftReference | None
    records: Sequence[DraftRecord]


def diagnose(board: Board, tools: Tools) -> Diagnosis | None:
    """The first failure, looked at more closely where its stage has tensors inside."""
    found = board.first_failure()
    if found is None:
        return None
    return _look_closer(board, found, tools) or diagnose_coarsely(board)


def diagnose_coarsely(board: Board) -> Diagnosis | None:
    """The first failure as it was measured."""
    m = board.first_failure()
    if m is None:
        return None
    limit = board.limit(m.gate)
    return Diagnosis(
        GATES[m.gate].stage, m.gate, m.case, m.tensor, m.row, m.value, limit.value, m.detail
    )


def first_tensor(board: Board, case: str) -> str | None:
    """The first tensor of one case that left its tolerance, tokens aside; None where all of them
    held.
    """
    for gate in GATES:
        if gate.startswith("tokens."):
            continue
        for m in board.failures(gate):
            if m.case == case:
                return m.tensor
    return None


def _look_closer(board: Board, m: Measurement, tools: Tools) -> Diagnosis | None:
    place = next((i for i, t in enumerate(tools.targets) if t.answer.name == m.case), None)
    if place is None:
        return None
    t, inside = tools.targets[place], None
    layer = _LAYER.fullmatch(m.tensor)
    if m.gate in {"target.layer_steps", "target.layers"} and layer and not layer[2]:
        inside = (
            _inside_layer(t, int(layer[1]), tools)
            if f"{m.tensor}_pre_deepstack" not in t.intermediates
            else None
        )
    elif m.gate == "target.layer_steps" and layer:
        inside = _inside_layer(t, int(layer[1]), tools)
    elif m.gate in {"vision.embeds", "vision.deepstack"}:
        inside = _inside_vision(t, tools)
    elif m.gate in {"draft.features", "draft.logits"} and tools.drafting is not None:
        inside = _inside_draft(t, tools.records[place], tools.drafting, tools)
    if inside is None:
        return None
    gate = GATES[m.gate]
    limit = board.thresholds["vision" if gate.stage == "vision" else "layer_step"]
    for name, errors in inside:
        worst = float(errors.max())
        if not limit.holds(worst):
            detail = f"the first of the tensors inside; seen at {m.tensor} ({m.value:.3g})"
            return Diagnosis(
                gate.stage, m.gate, m.case, name, int(errors.argmax()), worst, limit.value, detail
            )
    return None


Errors = Iterator[tuple[str, Tensor]]


def _replayed(
    tools: Tools, graph: str, names: Sequence[str], passes: Sequence[Pass]
) -> list[dict[str, Tensor]]:
    return replay(tools.engine.open_graph(graph, names), passes, tools.bound.get(graph, {}))


def _inside_layer(t: CheckedTarget, k: int, tools: Tools) -> Errors:
    """The tensors of decoder layer ``k``, from the engine's own input to it."""
    passes, reference = t.answer.plain_passes, tools.reference
    given = t.intermediates[f"layers.{k - 1}.output"] if k else embeds_of(passes)
    (layer,) = reference.layers([k])
    rope = reference.rope(t.positions[:-1].T)
    expected = layer.trace(given.to(reference.device, reference.dtype), rope)
    pre = f"layers.{k}.output_pre_deepstack"
    known = tensor_names(tools.engine, "target")
    if pre in known:
        expected[pre] = expected.pop(f"layers.{k}.output")
    names = [name for name in expected if name in known]
    outputs = _replayed(tools, "target", names, passes)
    for name in names:
        yield name, _errors(outputs_of(passes, outputs, name), expected[name])


def _inside_vision(t: CheckedTarget, tools: Tools) -> Errors:
    """The tensors of the tower, from its first patch on; each against the reference's own."""
    seen = t.answer.vision
    if seen is None:
        return
    depth = tools.engine.spec.vision.depth
    known = tensor_names(tools.engine, "vision")
    wanted = [
        "patch_embed",
        "embeddings",
        *(f"blocks.{i}.{name}" for i in range(depth) for name in _VISION_BLOCK),
    ]
    names = [name for name in wanted if name in known]
    (found,) = _replayed(tools, "vision", names, [seen])
    expected = tools.reference.vision(seen.inputs["patches"], t.answer.inputs.grid_thw, names)
    for name in names:
        yield name, _errors(found[name].flatten(1), expected.intermediates[name].flatten(1))
    yield "visual_embeds", _errors(found["visual_embeds"], expected.visual_embeds)
    for i, level in enumerate(expected.deepstack):
        yield (
            f"level.{i}",
            _errors(found["deepstack"][i] if "deepstack" in found else level * 0, level),
        )


def _inside_draft(
    t: CheckedTarget, record: DraftRecord, reference: DraftReference, tools: Tools
) -> Errors:
    """The tensors of the draft's first prompt pass, from what it was given."""
    m, passes = (
        reference.manifest,
        [p for p in record.passes if int(p.inputs["past_lengths"].max()) == 0][:1],
    )
    layers = [f"layers.{i}.{name}" for i in range(m.num_layers) for name in _DRAFT_LAYER]
    known = tensor_names(tools.engine, "draft")
    names = [name for name in (*_DRAFT_ORDER, *layers, "norm") if name in known]
    outputs = _replayed(tools, "draft", names, passes)
    count = len(embeds_of(passes))
    rows = [record.committed[i] for i in range(count)]
    features = torch.stack([r.fused for r in rows]).to(tools.reference.device)
    positions = reference.positions(torch.arange(count), t.positions)
    embeds = torch.stack([r.embeds for r in rows]).to(features)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    expected = reference.draft.run(embeds, features, positions.T, mask)
    for name in names:
        yield name, _errors(outputs_of(passes, outputs, name), expected.intermediates[name])
    yield "features_out", _errors(outputs_of(passes, outputs, "features_out"), expected.features)


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (
        row_errors(actual, expected)
        if actual.shape == expected.shape
        else torch.tensor([torch.inf])
    )
