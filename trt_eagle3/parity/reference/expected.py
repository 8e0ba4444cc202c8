"""Expected answers: the reference's values for one answer's prompt and rows.

Shapes: n rows of a sequence, H hidden, A tokens of an answer, V vocab, N visual rows, L deepstack
levels, k aux layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.metrics import RowErrors
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.routes import Experts, recorded_experts
from trt_eagle3.parity.reference.processor import ProcessorReference, ReferenceInputs
from trt_eagle3.parity.reference.target import TargetReference, VisionStates

__all__ = ["ExpectedAnswer", "encode_images", "expect_prompts", "expect_tokens", "input_embeds"]


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass
class ExpectedAnswer:
    """The reference's values for one answer; the target's rows are filled in layer by layer.

    Attributes:
        intermediates: the engine's layer outputs [n, H] by graph name; empty if its session
            returns none.
        positions: [n + 1, 3].
        inputs: the prompt's inputs; None if the reference cannot prepare it.
        text: text of the answer; None if it is not decoded again.
        vision: outputs for the prompt's images.
        hidden: [n, H], after the layers that have run.
        aux: [n, H] by layer.
        logits: float32 [A, V], of every token of the answer.
        experts: the experts that the engine's rows chose.
        strays: float64 [n] by layer: how far their logits are below the reference's own choice.
        open_rows: bool [n], rows whose experts nearly tie in a layer: other forwards of the engine
            may choose other experts.
        layer_errors, step_errors, aux_errors: errors of decoder layers end to end, of each layer
            alone, and of the aux hidden states; computed while a layer's output is in memory.
        with_speculation: the same rows with the experts of the forwards with speculation; None: as
            in the recorded forwards without it.
    """

    answer: RecordedAnswer
    intermediates: Mapping[str, Tensor]
    positions: Tensor
    inputs: ModelInputs | ReferenceInputs | None = None
    text: str | None = None
    vision: VisionStates | None = None
    hidden: Tensor = field(default_factory=_nothing)
    logits: Tensor = field(default_factory=_nothing)
    aux: dict[int, Tensor] = field(default_factory=dict)
    experts: Experts = field(default_factory=dict)
    strays: dict[int, Tensor] = field(default_factory=dict)
    open_rows: Tensor = field(default_factory=_nothing)
    layer_errors: list[RowErrors] = field(default_factory=list)
    step_errors: list[RowErrors] = field(default_factory=list)
    aux_errors: list[RowErrors] = field(default_factory=list)
    with_speculation: ExpectedAnswer | None = None

    @property
    def verified(self) -> ExpectedAnswer:
        """The expected values of the rows with speculation."""
        return self.with_speculation or self

    def open_at(self, rows: Sequence[int]) -> Tensor | None:
        """bool [len(rows)]: ``open_rows`` at ``rows``; None if there are none."""
        return self.open_rows[torch.tensor(rows)] if len(rows) and len(self.open_rows) else None

    @property
    def levels(self) -> Tensor:
        """[L, N, H]: the deepstack levels; L = 0 without images."""
        return self.vision.visual_levels if self.vision else torch.empty(0, 0, 0)


def expect_prompts(
    record: Record,
    reference: TargetReference,
    processor: ProcessorReference,
    progress: Callable[[], object],
) -> list[ExpectedAnswer]:
    """Prepare every prompt with the reference: its inputs, image embeddings and positions."""
    found = []
    for answer, intermediates in zip(record.answers, record.intermediates, strict=True):
        inputs = processor(answer.case.question)
        text = processor.text(answer.autoregressive)
        progress()
        vision = _encode_images(reference, _comparable(answer.inputs, inputs))
        positions = _positions(reference, answer)
        experts = recorded_experts(record.engine.spec, answer)
        found.append(
            ExpectedAnswer(answer, intermediates, positions, inputs, text, vision, experts=experts)
        )
        progress()
    return found


def expect_tokens(
    reference: TargetReference, expected: ExpectedAnswer, tokens: tuple[int, ...]
) -> ExpectedAnswer:
    """Prepare the prompt of ``expected`` with other tokens of an answer."""
    answer = replace(
        expected.answer, autoregressive=tokens, speculative=(), autoregressive_forwards=[]
    )
    return ExpectedAnswer(answer, {}, _positions(reference, answer), vision=expected.vision)


def encode_images(reference: TargetReference, e: ExpectedAnswer) -> VisionStates:
    """Encode the images of an answer's prompt with the reference."""
    theirs = e.inputs if isinstance(e.inputs, ReferenceInputs) else None
    inputs = _comparable(e.answer.inputs, theirs)
    return reference.vision(inputs.patches, inputs.grid_thw)


def input_embeds(
    reference: TargetReference, e: ExpectedAnswer, vision: VisionStates | None
) -> Tensor:
    """[n, H]: embeddings of the tokens, with ``vision`` in the rows of images."""
    hidden = reference.embed(e.answer.token_ids[:-1])
    rows = e.answer.visual_rows
    visual = vision.visual_embeds if vision else hidden.new_zeros(0, hidden.shape[1])
    if len(visual) == int(rows.sum()):
        hidden[rows] = visual.to(hidden)
    return hidden


def _comparable(ours: ModelInputs, theirs: ReferenceInputs | None) -> ModelInputs | ReferenceInputs:
    """Return the reference's inputs, or the engine's own if the prompts differ.

    Later checks can then still compare the rest of the engine.
    """
    same = theirs is not None and all(
        torch.equal(a, b)
        for a, b in ((ours.token_ids, theirs.token_ids), (ours.grid_thw, theirs.grid_thw))
    )
    return theirs if same and theirs is not None else ours


def _encode_images(
    reference: TargetReference, inputs: ModelInputs | ReferenceInputs
) -> VisionStates | None:
    return reference.vision(inputs.patches, inputs.grid_thw) if len(inputs.patches) else None


def _positions(reference: TargetReference, answer: RecordedAnswer) -> Tensor:
    """[n + 1, 3]: positions of every row of the sequence, by transformers' rules."""
    inputs = answer.inputs
    prompt, delta = reference.rope_index(inputs.token_ids, inputs.grid_thw, inputs.grid_seconds)
    decoded = torch.arange(answer.prompt_len, answer.num_rows + 1) + delta
    return torch.cat([prompt, decoded.expand(3, -1)], dim=1).T
