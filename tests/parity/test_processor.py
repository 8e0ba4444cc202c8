"""The processor's reference: transformers' own text, positions and pixels, videos without
torchvision included.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.parity.evidence import evidence, expected_answer, measured
from tests.tiny import TARGET
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal import ModelInputs, Processor, Video
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.parity.reference.processor import ProcessorReference, ReferenceInputs
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.prompts.prompt_file import Question

FRAMES = [draw_image(seed, (64, 96)) for seed in range(5)]


def the_reference() -> Qwen3VLReference:
    return load_reference(read_target(TARGET), torch.float32, "cpu")


@pytest.fixture(scope="module")
def processor() -> Processor:
    return FAMILY.processor(TARGET, read_target(TARGET))


@pytest.fixture(scope="module")
def reference(processor: Processor) -> ProcessorReference:
    return FAMILY.processor_reference(TARGET, the_reference(), processor)


def failures(ours: ModelInputs, theirs: ReferenceInputs | None) -> list[str]:
    assert theirs is not None
    expected = expected_answer(())
    answer = dataclasses.replace(expected.answer, inputs=ours)
    given = evidence([dataclasses.replace(expected, answer=answer, inputs=theirs)])
    names = [name for name in CHECKS if name.startswith("processor.")]
    return [name for name in names if measured(name, given).failures]


@pytest.mark.parametrize(
    "question",
    [
        Question("Ünï \U0001f30a 海"),
        Question("a", [draw_image(1), draw_image(2, (31, 77))]),
        Question("a", videos=[FRAMES]),
        Question("a", [draw_image(1)], [FRAMES[:2], Video(FRAMES[:3], timestamps=[0.0, 0.7, 9.0])]),
        Question("a", videos=[Video(FRAMES[:4], fps=7.5)]),
    ],
    ids=["text", "images", "odd video", "image and two videos", "rate"],
)
def test_program_and_transformers_prepare_alike(
    question: Question, processor: Processor, reference: ProcessorReference
) -> None:
    ours = processor.prompt(question.prompt, question.images, question.videos)
    assert failures(ours, reference(question)) == []


def test_other_frames_times_or_images_are_noticed(
    processor: Processor, reference: ProcessorReference
) -> None:
    ours = processor.prompt("a", [], [FRAMES[:4]])
    swapped = [FRAMES[1], FRAMES[0], *FRAMES[2:4]]
    assert failures(ours, reference(Question("a", videos=[swapped]))) == ["processor.pixel_values"]
    late = Video(FRAMES[:4], timestamps=[0.0, 0.5, 1.0, 2.5])
    assert "processor.token_ids" in failures(ours, reference(Question("a", videos=[late])))
    both = [draw_image(1), draw_image(2)]
    assert failures(processor.prompt("a", both), reference(Question("a", both[::-1]))) == [
        "processor.pixel_values"
    ]


def test_video_that_would_be_resized_is_left_to_those_who_have_torchvision(
    reference: ProcessorReference,
) -> None:
    assert (
        reference(Question("a", videos=[[draw_image(1, (70, 50)), draw_image(2, (70, 50))]]))
        is None
    )


def test_positions_of_a_prompt_are_transformers_own() -> None:
    reference = the_reference()
    ids = reference.config
    tokens = torch.tensor(
        [1, ids.vision_start_token_id, *[ids.image_token_id] * 6, ids.vision_end_token_id, 2]
    )
    positions, delta = reference.rope_index(tokens, torch.tensor([[1, 4, 6]]))
    assert positions.T.tolist()[2:8] == [
        [2, 2 + row, 2 + column] for row in range(2) for column in range(3)
    ]
    assert delta == -3
