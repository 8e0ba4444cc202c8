"""Gates on what the engine was asked and showed its graphs: meaning, processor, vision, and the
target's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest, manifest_to_dict
from trt_eagle3.checkpoint.target import TargetSpec, target_to_dict
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import Board
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.processor import ProcessorReference, ReferenceInputs
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.target import TargetReference, VisionStates
from trt_eagle3.parity.trace import deepstack_of, embeds_of, positions_of, rows_of

__all__ = [
    "check_meaning",
    "check_processor",
    "check_target_inputs",
    "check_text",
    "check_vision",
    "compare_inputs",
    "expected_positions",
]

_READING = ("sources", "warnings")  # how a manifest was found, not what it means


def check_meaning(
    board: Board, engine: RecordingEngine, spec: TargetSpec, manifest: DraftManifest | None
) -> None:
    """The bundle's record of target and draft against the checkpoints, read again; and of its
    engine against itself.

    By the engine's type the tolerances go: a coarser one written there would loosen them all.
    """
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("target", target_to_dict(engine.spec), target_to_dict(spec))
    ]
    if engine.manifest is not None and manifest is not None:
        pairs.append(("draft", manifest_to_dict(engine.manifest), manifest_to_dict(manifest)))
    for part, recorded, found in pairs:
        wrong = [k for k in found if k not in _READING and recorded.get(k) != found[k]]
        detail = "; ".join(
            f"{k}: bundle {recorded.get(k)!r:.60}, checkpoint {found[k]!r:.60}" for k in wrong
        )
        board.add(
            "bundle.meaning", len(wrong), "", f"{part}.{wrong[0]}" if wrong else part, None, detail
        )
    made, built = engine.record.engine, engine.record.config.engine
    wrong = [k for k in ("backend", "dtype") if getattr(made, k) != getattr(built, k)]
    detail = "; ".join(f"{k}: engine {getattr(made, k)}, config {getattr(built, k)}" for k in wrong)
    board.add(
        "bundle.meaning", len(wrong), "", f"engine.{wrong[0]}" if wrong else "engine", None, detail
    )


def check_processor(
    board: Board, reference: ProcessorReference, answer: Answer
) -> ModelInputs | ReferenceInputs:
    """Ids, positions and pixels; returns transformers' inputs, or the engine's own where there
    are none to compare.
    """
    ours, theirs = answer.inputs, reference(answer.case.question)
    if theirs is None:
        return ours
    compare_inputs(board, ours, theirs, answer.name)
    if not torch.equal(ours.token_ids, theirs.token_ids) or not torch.equal(
        ours.grid_thw, theirs.grid_thw
    ):
        return ours  # the gates that follow look at the rest of the engine
    return theirs


def check_text(board: Board, reference: ProcessorReference, answer: Answer) -> None:
    """The text that was streamed; 1 where it is another one."""
    wanted = reference.text(answer.plain)
    at = next(
        (i for i, pair in enumerate(zip(wanted, answer.text, strict=False)) if pair[0] != pair[1]),
        None,
    )
    at = min(len(wanted), len(answer.text)) if at is None else at
    differ = wanted != answer.text
    detail = (
        f"at character {at}: expected {wanted[at : at + 20]!r}, got {answer.text[at : at + 20]!r}"
        if differ
        else ""
    )
    board.add("tokens.text", int(differ), answer.name, "text", None, detail)


def compare_inputs(
    board: Board, ours: ModelInputs, theirs: ModelInputs | ReferenceInputs, case: str
) -> None:
    """Ids, positions and pixels of one prompt."""
    board.add_exact("processor.token_ids", ours.token_ids, theirs.token_ids, case, "token_ids")
    board.add_exact(
        "processor.position_ids", ours.position_ids.T, theirs.position_ids.T, case, "position_ids"
    )
    deltas = torch.tensor([ours.rope_delta]), torch.tensor([theirs.rope_delta])
    board.add_exact("processor.position_ids", *deltas, case, "rope_delta")
    if len(theirs.grid_thw) or len(ours.grid_thw):
        board.add_exact("processor.pixel_values", ours.grid_thw, theirs.grid_thw, case, "grid_thw")
        board.add_exact("processor.pixel_values", ours.patches, theirs.patches, case, "patches")


def check_vision(board: Board, answer: Answer, expected: VisionStates | None) -> None:
    """Visual embeddings and deepstack levels of one case; ``expected`` are its own rows."""
    if expected is None or answer.vision is None:
        return
    found = answer.vision.outputs
    board.add_rows(
        "vision.embeds",
        _errors(found["visual_embeds"], expected.visual_embeds),
        answer.name,
        "visual_embeds",
    )
    levels = found.get("deepstack", ())
    for i, level in enumerate(expected.deepstack):
        errors = _errors(levels[i], level) if i < len(levels) else torch.tensor([torch.inf])
        board.add_rows("vision.deepstack", errors, answer.name, f"deepstack.{i}")


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (
        row_errors(actual, expected)
        if actual.shape == expected.shape
        else torch.tensor([torch.inf])
    )


def expected_positions(reference: TargetReference, answer: Answer) -> Tensor:
    """[n, 3]: where every row of the sequence stands, as transformers counts."""
    prompt, delta = reference.rope_index(answer.inputs.token_ids, answer.inputs.grid_thw)
    decoded = torch.arange(answer.prompt_len, answer.num_rows + 1) + delta
    return torch.cat([prompt, decoded.expand(3, -1)], dim=1).T


def check_target_inputs(
    board: Board, reference: TargetReference, answer: Answer, positions: Tensor
) -> None:
    """Embeddings, deepstack rows and positions of every row that the target ran."""
    passes, case, visual = answer.plain_passes, answer.name, answer.visual_rows
    given = embeds_of(passes)
    text = reference.embed(answer.token_ids[:-1]).cpu().to(given.dtype)
    hidden, levels = text.shape[1], deepstack_of(passes)
    seen = answer.vision.outputs["visual_embeds"] if answer.vision else given.new_zeros(0, hidden)
    expected = text.clone()
    if len(seen) == int(visual.sum()):
        expected[visual] = seen.to(given.dtype)
    board.add_exact("target.inputs_embeds", given, expected, case, "inputs_embeds")
    below = torch.zeros_like(levels)
    if answer.vision and "deepstack" in answer.vision.outputs and len(seen) == int(visual.sum()):
        below[visual] = answer.vision.outputs["deepstack"].transpose(0, 1).to(below.dtype)
    board.add_exact(
        "target.deepstack_embeds", levels.flatten(1), below.flatten(1), case, "deepstack_embeds"
    )
    for p in [*passes, *(p for p in answer.speculative_passes if p.graph == "target")]:
        rows = rows_of(p)
        depths = (
            rows.mask.sum(dim=1) - 1 if rows.past >= answer.prompt_len else torch.arange(rows.count)
        )
        places = rows.past + rows.first + depths
        inside = places < len(positions)
        found, wanted = positions_of(p)[inside], positions[places[inside]]
        board.add_exact("target.position_ids", found, wanted, case, "position_ids", rows.start)
