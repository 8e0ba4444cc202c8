"""The streamed reference is transformers: the same numbers as its whole model gives, layer by
layer.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

from tests.reference.target import VISION, Target, random_target
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import add_visual_level

GRIDS = torch.tensor([[1, 4, 6], [2, 2, 4]])
SAME = 1e-6  # the same modules, called with and without a cache


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    text = {"tie_word_embeddings": request.param, "attention_bias": request.param}
    return random_target(
        tmp_path_factory.mktemp("target"), text=text, stored=torch.bfloat16, seed=4
    )


@torch.no_grad()
def test_streamed_target_equals_the_whole_model(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([1, 2, 7, 5, 5, 5, 5, 5, 5, 8, 3, 7, 6, 6, 8, 7, 6, 6, 8, 4])
    patches = torch.randn(24 + 16, target.spec.vision.patch_dim, generator=generator)
    kinds = (ids == 5).int() + 2 * (ids == 6).int()
    expected = target.model(
        input_ids=ids[None],
        mm_token_type_ids=kinds[None],
        pixel_values=patches[:24],
        image_grid_thw=GRIDS[:1],
        pixel_values_videos=patches[24:],
        video_grid_thw=GRIDS[1:],
        output_hidden_states=True,
    )
    reference = target.reference
    positions, delta = reference.rope_index(ids, GRIDS)
    assert delta == int(target.model.model.rope_deltas[0])
    seen = reference.vision(patches, GRIDS)
    visual = kinds > 0
    hidden, rope = reference.embed(ids), reference.rope(positions)
    hidden[visual] = seen.visual_embeds
    for layer in reference.layers():
        hidden = add_visual_level(layer(hidden, rope), seen.visual_levels, layer.index, visual)
        # transformers adds the level after it has kept the state
        if layer.index + 1 < reference.num_layers:
            whole = expected.hidden_states[layer.index + 1][0]
            same = add_visual_level(whole, seen.visual_levels, layer.index, visual)
            assert relative_error(hidden, same) < SAME or relative_error(hidden, whole) < SAME
    assert relative_error(reference.head(reference.norm(hidden)), expected.logits[0]) < SAME


@torch.no_grad()
def test_streamed_vision_equals_the_whole_tower(target: Target) -> None:
    patches = torch.randn(
        40, target.spec.vision.patch_dim, generator=torch.Generator().manual_seed(1)
    )
    expected = target.model.model.visual(patches, grid_thw=GRIDS, output_hidden_states=True)
    found = target.reference.vision(patches, GRIDS, ["blocks.1.output"])
    assert relative_error(found.visual_embeds, expected.pooler_output) < SAME
    assert (
        len(found.visual_levels)
        == len(expected.deepstack_features)
        == len(VISION["deepstack_visual_indexes"])
    )
    for level, whole in zip(found.visual_levels, expected.deepstack_features, strict=True):
        assert relative_error(level, whole) < SAME
    assert relative_error(found.intermediates["blocks.1.output"], expected.last_hidden_state) < SAME


def test_float64_reference_computes_in_float64(target: Target) -> None:
    reference = Qwen3VLReference(target.model.config, target.spec.tensors, torch.float64)
    generator = torch.Generator().manual_seed(2)
    embeds = torch.randn(9, target.spec.hidden_size, generator=generator, dtype=torch.float64)
    positions = torch.arange(9).expand(3, -1)
    (layer,) = reference.layers([1])
    exact = layer(embeds, reference.rope(positions))
    assert exact.dtype == torch.float64
    doubled = target.model.model.language_model.layers[1].double()
    rounded = doubled(embeds[None], position_embeddings=reference.rope(positions))[0].detach()
    target.model.float()
    error = relative_error(rounded, exact)
    assert 1e-9 < error < 1e-5, (
        "transformers' own norms round to float32 inside; this reference's must not"
    )


def test_trace_has_the_names_of_the_graph_and_ends_with_the_output(target: Target) -> None:
    reference = target.reference
    embeds = torch.randn(5, target.spec.hidden_size, generator=torch.Generator().manual_seed(3))
    rope = reference.rope(torch.arange(5).expand(3, -1))
    (layer,) = reference.layers([2])
    trace = layer.trace(embeds, rope)
    assert next(iter(trace)) == "layers.2.input_layernorm"
    assert list(trace)[-1] == "layers.2.output"
    assert torch.equal(trace["layers.2.output"], layer(embeds, rope))
    assert trace["layers.2.self_attn.q"].shape == (5, 32)


def test_reference_computes_in_float32_whatever_the_process_allows(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions on a GPU are in TF32 by default, and such a reference is five times further
    off than is allowed.
    """
    seen: list[tuple[bool, str]] = []

    def spied(module: Any) -> None:
        true = module.forward

        def forward(*args: Any, **options: Any) -> Any:
            seen.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
            return true(*args, **options)

        monkeypatch.setattr(module, "forward", forward)

    spied(hf.Qwen3VLVisionPatchEmbed)
    spied(hf.Qwen3VLTextMLP)
    torch.set_float32_matmul_precision("high")
    try:
        reference = target.reference
        reference.vision(torch.randn(40, target.spec.vision.patch_dim), GRIDS)
        positions, _ = reference.rope_index(torch.tensor([1, 2, 3]), GRIDS[:0])
        next(reference.layers())(
            reference.embed(torch.tensor([1, 2, 3])), reference.rope(positions)
        )
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32, "torch's default"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [(False, "highest")] * 2


SWITCHES = """
import os, sys, torch
from trt_eagle3.parity.ops import full_float32

def allowed():
    parts = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    return [part.fp32_precision == "tf32" for part in parts]

for switch in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0, switch
        continue
    exec(switch)
    before = allowed()
    with full_float32():
        inside = allowed()
    assert inside == [False, False]
    assert allowed() == before, (allowed(), before)
    os._exit(0)
"""


def test_products_are_in_float32_by_whichever_switches_the_process_uses() -> None:
    """torch's older switches fail where the newer ones have been used; each process has its own."""
    switches = (
        "pass",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.fp32_precision = 'tf32'",
    )
    done = subprocess.run(
        [sys.executable, "-c", SWITCHES, *switches], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
