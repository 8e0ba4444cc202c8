"""Gates on the target graph: every layer, aux states and logits, against the streamed reference.

Shapes: n rows of a sequence, H hidden, R rows of logits, V vocab, L deepstack levels, k aux layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.metrics import cosines, leads, margins, row_errors
from trt_eagle3.parity.record import RecordingEngine, replay
from trt_eagle3.parity.target import Rope, TargetLayer, TargetReference, VisionStates, add_deepstack
from trt_eagle3.parity.trace import deepstack_of, embeds_of, logits_of, outputs_of

__all__ = [
    "CheckedTarget",
    "check_layers",
    "check_logits",
    "checked_target",
    "compare_logits",
    "layer_intermediates",
    "tensor_names",
]

SURE = 0.1
"""Margin in probability above which the reference's best token must be the engine's, unless the
two are a tie.
"""


@dataclass
class CheckedTarget:
    """What the reference makes of one answer's rows; filled layer by layer.

    Attributes:
        taps: the engine's layer outputs [n, H] by graph name; empty where its session gives none.
        visual: [N, H], and ``levels`` [L, N, H], the reference's own. positions: [n + 1, 3].
        aux: [n, k * H], the reference's, once all layers are through.
        logits: float32 [A, V]: the reference's for every token of the answer.
    """

    answer: Answer
    intermediates: Mapping[str, Tensor]
    visual: Tensor
    levels: Tensor
    positions: Tensor
    aux: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def aux_rows(self, manifest: DraftManifest) -> Tensor:
        """[n, k * H]."""
        return torch.cat([self.aux[k] for k in manifest.aux_layers], dim=-1)


def layer_intermediates(
    engine: RecordingEngine,
    bound: Mapping[str, Tensor],
    answers: Sequence[Answer],
    progress: Callable[[], object],
) -> list[dict[str, Tensor]]:
    """Per answer the engine's layer outputs [n, H] by name: its passes are run again, with those
    tensors tapped.
    """
    known = tensor_names(engine, "target")
    layers = range(engine.spec.text.num_layers)
    wanted = [f"layers.{k}.{name}" for k in layers for name in ("output_pre_deepstack", "output")]
    names = [name for name in wanted if name in known]
    if not names:
        return [{} for _ in answers]
    session = engine.open_graph("target", names)
    found = []
    for answer in answers:
        outputs = replay(session, answer.plain_passes, bound)
        found.append({name: outputs_of(answer.plain_passes, outputs, name) for name in names})
        progress()
    return found


def tensor_names(engine: RecordingEngine, graph: str) -> frozenset[str]:
    """Tensors that a session of ``graph`` can be asked for; none of a TensorRT engine, which
    cannot be looked into.
    """
    file = engine.path / graph / "model.onnx"
    if engine.record.engine.backend == "tensorrt" or not file.is_file():
        return frozenset()
    return frozenset(
        o for node in onnx.load(file, load_external_data=False).graph.node for o in node.output
    )


def check_layers(
    board: Board,
    reference: TargetReference,
    targets: Sequence[CheckedTarget],
    manifest: DraftManifest | None,
    progress: Callable[[], object],
) -> None:
    """Run all sequences through the layers together; each is loaded once, compared and let go."""
    ropes = [reference.rope(t.positions[:-1].T) for t in targets]
    for t in targets:
        t.hidden = reference.embed(t.answer.token_ids[:-1])
        if len(t.visual) == int(t.answer.visual_rows.sum()):
            t.hidden[t.answer.visual_rows] = t.visual.to(t.hidden)
    wanted = manifest.aux_layers if manifest else ()
    for layer in reference.layers():
        for t, rope in zip(targets, ropes, strict=True):
            before = layer(t.hidden, rope)
            t.hidden = add_deepstack(before, t.levels, layer.index, t.answer.visual_rows)
            if layer.index in wanted:
                pre = manifest is not None and manifest.aux_pre_deepstack
                t.aux[layer.index] = (before if pre else t.hidden).cpu()
            name = f"layers.{layer.index}.output"
            if name in t.intermediates:
                board.add_rows(
                    "target.layers",
                    row_errors(t.intermediates[name], t.hidden),
                    t.answer.name,
                    name,
                )
                _check_step(board, reference, t, layer, rope)
        progress()
    for t in targets:
        _check_aux(board, t, manifest)


def _check_step(
    board: Board, reference: TargetReference, t: CheckedTarget, layer: TargetLayer, rope: Rope
) -> None:
    """One layer alone: from the engine's own input to its output, and the deepstack level on top
    of that.
    """
    passes, case, k = t.answer.plain_passes, t.answer.name, layer.index
    given = t.intermediates[f"layers.{k - 1}.output"] if k else embeds_of(passes)
    expected = layer(given.to(reference.device, reference.dtype), rope)
    pre = t.intermediates.get(f"layers.{k}.output_pre_deepstack")
    if pre is not None:
        board.add_rows(
            "target.layer_steps",
            row_errors(pre, expected),
            case,
            f"layers.{k}.output_pre_deepstack",
        )
        expected = pre.to(expected)
    levels = deepstack_of(passes)
    if k < reference.num_deepstack:
        expected = expected + (levels[:, k].to(expected) if k < levels.shape[1] else 0)
    name = f"layers.{k}.output"
    board.add_rows("target.layer_steps", row_errors(t.intermediates[name], expected), case, name)


def _check_aux(board: Board, t: CheckedTarget, manifest: DraftManifest | None) -> None:
    passes = t.answer.plain_passes
    if manifest is None or "aux_hidden_states" not in passes[0].outputs:
        return
    found = outputs_of(passes, [p.outputs for p in passes], "aux_hidden_states")
    parts = found.chunk(len(manifest.aux_layers), dim=-1)
    for k, part in zip(manifest.aux_layers, parts, strict=True):
        errors = row_errors(part, t.aux[k])
        board.add_rows("target.aux", errors, t.answer.name, f"aux_hidden_states[out({k})]")


def check_logits(
    board: Board, reference: TargetReference, targets: Sequence[CheckedTarget]
) -> None:
    """The reference's logits of every answer token, and the engine's beside them."""
    rows = [t.hidden[t.answer.prompt_len - 1 :] for t in targets]
    normed = reference.norm(torch.cat(rows))
    for t, logits in zip(
        targets, reference.head(normed).split([len(r) for r in rows]), strict=True
    ):
        t.logits = logits.float()
        first = t.answer.prompt_len - 1
        found = {logit.row: logit.values for p in t.answer.plain_passes for logit in logits_of(p)}
        kept = [row for row in range(first, t.answer.num_rows) if row in found]
        ours = torch.stack([found[row] for row in kept])
        compare_logits(board, t.answer.name, ours, t.logits[torch.tensor(kept) - first], first)


def compare_logits(board: Board, case: str, ours: Tensor, theirs: Tensor, first: int) -> None:
    """Logits f32 [R, V] of rows ``first`` on, beside the expected ones."""
    errors, directions = row_errors(ours, theirs), cosines(ours, theirs)
    worst = int(directions.argmin())
    ordered = directions.sort().values
    board.add(
        "target.logits_cosine",
        float(ordered[int(0.05 * (len(ordered) - 1))]),
        case,
        "logits",
        first + worst,
    )
    board.add_rows("target.logits_l2", errors, case, "logits", first)
    sure = (margins(theirs) > SURE) & (leads(theirs) > board.thresholds["tie_margin"].value)
    best = ours.argmax(dim=-1)
    hit = best == theirs.argmax(dim=-1)
    near = (theirs.topk(min(5, theirs.shape[1]), dim=-1).indices == best[:, None]).any(dim=1)
    for gate, chosen, good in (("target.top1", sure, hit), ("target.top5", ~sure, near)):
        if chosen.any():
            wrong = (chosen & ~good).nonzero().flatten()
            row = first + int(wrong[0]) if len(wrong) else None
            board.count(gate, rows=int(chosen.sum()))
            board.add(gate, float(good[chosen].double().mean()), case, "logits", row)


def checked_target(
    reference: TargetReference,
    answer: Answer,
    intermediates: Mapping[str, Tensor],
    seen: VisionStates | None,
    positions: Tensor,
) -> CheckedTarget:
    """An answer before any layer has run."""
    hidden = reference.config.text_config.hidden_size
    visual = seen.visual_embeds if seen else torch.zeros(0, hidden)
    levels = seen.deepstack if seen else torch.zeros(reference.num_deepstack, 0, hidden)
    return CheckedTarget(answer, intermediates, visual, levels, positions)
