"""Target rows: run all sequences through the reference's layers, and load each layer once.

A layer's output is compared and released at once; only errors, aux states and logits are kept.
Shapes: n rows of a sequence, H hidden, L deepstack levels, k aux layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.trace import embeds_of, outputs_of, visual_levels_of
from trt_eagle3.parity.reference.expected import ExpectedAnswer, input_embeds
from trt_eagle3.parity.reference.routing import Routes
from trt_eagle3.parity.reference.target import Rope, TargetLayer, TargetReference, add_visual_level

__all__ = ["RouterSlack", "run_layers"]


@dataclass(frozen=True)
class RouterSlack:
    """``Routes.slack`` for a layer alone, and end to end."""

    step: float = 0.0
    output: float = 0.0


def run_layers(
    reference: TargetReference,
    expected: Sequence[ExpectedAnswer],
    manifest: DraftManifest | None,
    progress: Callable[[], object],
    slack: RouterSlack = RouterSlack(),
) -> None:
    """Fill in each answer's layer errors, aux hidden states and logits."""
    ropes = [reference.rope(e.positions[:-1].T) for e in expected]
    for e in expected:
        e.hidden = input_embeds(reference, e, e.vision)
        e.open_rows = torch.zeros(len(e.hidden), dtype=torch.bool)
    for layer in reference.layers():
        for e, rope in zip(expected, ropes, strict=True):
            _run_layer(reference, e, layer, rope, manifest, slack)
        progress()
    for e in expected:
        if manifest is not None and manifest.takes_normed:
            e.aux = {k: reference.norm(e.hidden).cpu() for k in manifest.aux_layers}
        e.aux_errors = _aux_errors(e, manifest)
    _run_head(reference, expected)


def _run_layer(
    reference: TargetReference,
    e: ExpectedAnswer,
    layer: TargetLayer,
    rope: Rope,
    manifest: DraftManifest | None,
    slack: RouterSlack,
) -> None:
    name = f"layers.{layer.index}.output"
    if name in e.intermediates:
        e.step_errors += _step_errors(reference, e, layer, rope, slack.step)
    with layer.routed(_routes(e, layer, slack.output)) as chosen:
        before = layer(e.hidden, rope)
    for choice in chosen:
        e.strays[layer.index] = choice.behind
        e.open_rows |= choice.leads <= slack.step
    e.hidden = add_visual_level(before, e.levels, layer.index, e.answer.visual_rows)
    if manifest is not None and layer.index in manifest.aux_layers:
        e.aux[layer.index] = (before if manifest.aux_pre_deepstack else e.hidden).cpu()
    if name in e.intermediates:
        errors = row_errors(e.intermediates[name], e.hidden)
        e.layer_errors.append(RowErrors(e.answer.name, name, errors))


def _routes(e: ExpectedAnswer, layer: TargetLayer, slack: float) -> Routes | None:
    """Return the engine's experts; None for a dense layer, or if they are unknown."""
    experts = e.experts.get(layer.index)
    return None if experts is None else Routes(experts, slack)


def _step_errors(
    reference: TargetReference, e: ExpectedAnswer, layer: TargetLayer, rope: Rope, slack: float
) -> list[RowErrors]:
    """Compare one layer alone, from the engine's own input; then its deepstack level."""
    forwards, k, found = e.answer.autoregressive_forwards, layer.index, []
    given = e.intermediates[f"layers.{k - 1}.output"] if k else embeds_of(forwards)
    with layer.routed(_routes(e, layer, slack)):
        expected = layer(given.to(reference.device, reference.dtype), rope)
    name = f"layers.{k}.output_pre_deepstack"
    pre = e.intermediates.get(name)
    if pre is not None:
        found.append(RowErrors(e.answer.name, name, row_errors(pre, expected)))
        expected = pre.to(expected)
    if k < reference.num_visual_levels:
        levels = visual_levels_of(forwards)
        expected = expected + (levels[:, k].to(expected) if k < levels.shape[1] else 0)
    name = f"layers.{k}.output"
    errors = row_errors(e.intermediates[name], expected)
    return [*found, RowErrors(e.answer.name, name, errors)]


def _aux_errors(e: ExpectedAnswer, manifest: DraftManifest | None) -> list[RowErrors]:
    forwards = e.answer.autoregressive_forwards
    if manifest is None or "aux_hidden_states" not in forwards[0].outputs:
        return []
    found = outputs_of(forwards, [f.outputs for f in forwards], "aux_hidden_states")
    m, parts = manifest, found.chunk(len(manifest.aux_layers), dim=-1)
    return [
        RowErrors(e.answer.name, f"aux_hidden_states[{name}]", row_errors(part, e.aux[k]))
        for k, name, part in zip(m.aux_layers, m.aux_names, parts, strict=True)
    ]


def _run_head(reference: TargetReference, expected: Sequence[ExpectedAnswer]) -> None:
    """Compute the logits of every answer token, and release the hidden states."""
    rows = [e.hidden[e.answer.prompt_len - 1 :] for e in expected]
    logits = reference.head(reference.norm(torch.cat(rows))).split([len(r) for r in rows])
    for e, found in zip(expected, logits, strict=True):
        e.logits, e.hidden = found.float(), torch.empty(0)
