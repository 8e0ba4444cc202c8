"""INT4 experts, each made by the rows that go through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.calibration.conftest import MAX_LEN, forward, scaled_target, write_prompts
from tests.calibration.test_run import relative_error
from tests.tiny import MIXTURE, tiny_config
from trt_eagle3.calibration.activations import ExpertRows, RowStatistics
from trt_eagle3.calibration.experts import LEAST_ROWS, MadeExperts, make_experts
from trt_eagle3.calibration.prompts import read_prompts
from trt_eagle3.calibration.rounding import round_without_data
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.calibration.search import search_scales
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.builder.calibration import Calibration, ChannelScales, Fold
from trt_eagle3.engine.builder.weight_quantiser import quantise_target
from trt_eagle3.families.registry import read_target
from trt_eagle3.pipeline import build

E, H, WIDTH, ROWS = 3, 128, 64, 600
TARGET = MIXTURE / "target"


def draw_rows(expert: int, count: int, seed: int) -> Tensor:
    """Rows [count, H] of few directions, some channels sixteen times the others': other ones for
    each expert.
    """
    own = torch.Generator().manual_seed(expert)
    mixing = torch.randn(24, H, generator=own)
    mixing[:, torch.randperm(H, generator=own)[:8]] *= 16
    drawn = torch.randn(count, 24, generator=torch.Generator().manual_seed(100 + seed))
    return drawn @ mixing


def draw_weights() -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(9)
    gate_up = torch.randn(E, 2 * WIDTH, H, generator=own) * H**-0.5
    return gate_up, torch.randn(E, H, WIDTH, generator=own) * WIDTH**-0.5


def routed(experts: list[int], counts: list[int]) -> ExpertRows:
    """Rows of ``draw_rows`` of the first, routed as the second says."""
    found = ExpertRows(1)
    for expert, (source, count) in enumerate(zip(experts, counts, strict=True)):
        logits = torch.nn.functional.one_hot(torch.full((count,), expert), E).float()
        found.add(draw_rows(source, count, seed=0), logits)
    return found


def values(stored: tuple[Tensor, Tensor], columns: int) -> Tensor:
    """float32 [rows, columns] of INT4 numbers."""
    codes, scales = stored
    places = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = ((codes[..., None] >> places) & 15).flatten(1).float() - 8
    return numbers * scales.float().repeat_interleave(columns // scales.shape[1], dim=1)


def output_errors(gate_up: Tensor, down: Tensor) -> list[float]:
    """Of each expert's output on rows that it has not seen."""
    found = []
    for expert, weights in enumerate(zip(*draw_weights(), strict=True)):
        x = draw_rows(expert, 200, seed=1)
        outputs = []
        for first, second in (weights, (gate_up[expert], down[expert])):
            gate, up = (x @ first.T).chunk(2, dim=-1)
            outputs.append((silu(gate) * up) @ second.T)
        found.append(relative_error(outputs[1], outputs[0]))
    return found


def unscaled(made: MadeExperts) -> tuple[Tensor, Tensor]:
    """Weights as the products see them, the scales between gate_up and down taken out."""
    gate_up = values(made.gate_up, H).view(E, 2 * WIDTH, H) * made.scales[..., None]
    down = values(made.down, WIDTH).view(E, H, WIDTH) / made.scales[:, None, WIDTH:]
    return gate_up, down


def data_free() -> list[float]:
    parts = [
        torch.stack([values(round_without_data(w), w.shape[1]) for w in own])
        for own in draw_weights()
    ]
    return output_errors(parts[0], parts[1])


def statistics(rows: Tensor) -> RowStatistics:
    found = RowStatistics(1)
    found.add(rows)
    return found


def test_experts_made_of_their_rows_err_less_than_data_free() -> None:
    made = make_experts(*draw_weights(), routed([0, 1, 2], [ROWS] * E), None)
    for ours, theirs in zip(output_errors(*unscaled(made)), data_free(), strict=True):
        assert ours < 0.5 * theirs
    assert made.without_data == 0


def test_experts_made_of_anothers_rows_err_more() -> None:
    """The planted fault: a row counts for an expert that it does not go through."""
    made = make_experts(*draw_weights(), routed([1, 2, 0], [ROWS] * E), None)
    for ours, theirs in zip(output_errors(*unscaled(made)), data_free(), strict=True):
        assert ours > 0.5 * theirs


def test_expert_of_too_few_rows_is_made_without_data_and_counted() -> None:
    gate_up, down = draw_weights()
    made = make_experts(gate_up, down, routed([0, 1, 2], [ROWS, LEAST_ROWS - 1, 0]), None)
    assert made.without_data == 2
    for stored, weights in ((made.gate_up, gate_up), (made.down, down)):
        rows = weights.shape[1]
        for expert in (1, 2):
            part = slice(expert * rows, (expert + 1) * rows)
            for found, expected in zip(stored, round_without_data(weights[expert]), strict=True):
                assert torch.equal(found[part], expected)
    assert torch.equal(made.scales[1:], torch.ones(2, 2 * WIDTH))
    assert not torch.equal(made.scales[0], torch.ones(2 * WIDTH))


@pytest.fixture(scope="module")
def mixture() -> TargetCheckpoint:
    return read_target(TARGET)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("few") / "train.jsonl", "train", 3, 6)


@pytest.fixture(scope="module")
def calibration(
    mixture: TargetCheckpoint, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Calibration:
    prompts = read_prompts(prompt_file, mixture, MAX_LEN)
    return calibrate(mixture, prompts, "cpu", tmp_path_factory.mktemp("layers"))


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).square().sum(dim=-1) / expected.square().sum(dim=-1)


def with_router_scales(calibration: Calibration) -> dict[str, Tensor]:
    """Its scales, those before routers drawn: it may have found that none are best."""
    found = dict(calibration.scales.by_producer)
    for layer in range(1, 6):
        drawn = torch.randint(-2, 3, (256,), generator=torch.Generator().manual_seed(layer))
        found[f"layers.{layer}.post_attention_layernorm.weight"] = drawn.float().exp2()
    return found


class RouterForgotten(ChannelScales):
    """The planted fault: the router's columns are not multiplied."""

    def columns(self, name: str) -> Tensor | None:
        return None if name.endswith("mlp.gate.weight") else super().columns(name)


def test_scales_alone_change_no_layer_of_a_mixture(
    mixture: TargetCheckpoint, calibration: Calibration, tmp_path: Path
) -> None:
    prompts = read_prompts(write_prompts(tmp_path / "p.jsonl", "train", 3, 6), mixture, MAX_LEN)
    expected = forward(mixture, prompts).layers
    errors = {}
    for kind in (ChannelScales, RouterForgotten):
        scales = kind(mixture, with_router_scales(calibration))
        found = forward(scaled_target(mixture, scales, tmp_path / kind.__name__), prompts)
        # of a row in hundreds two experts are as probable, and another one may win
        errors[kind] = max(
            float(row_errors(*pair).median()) for pair in zip(found.layers, expected, strict=True)
        )
    assert errors[ChannelScales] < 1e-9
    assert errors[RouterForgotten] > 1e-3


def test_scales_before_a_router_are_powers_of_two(calibration: Calibration) -> None:
    for layer in range(1, 6):
        own = calibration.scales.columns(f"layers.{layer}.mlp.gate.weight")
        assert own is not None
        assert torch.equal(own.log2(), own.log2().round())
    fold = Fold("norm", ("gate_up", "router"), exact=True)
    x = draw_rows(0, 200, seed=2)
    found = search_scales(fold, [draw_weights()[0][0]], statistics(x), torch.ones(H).bfloat16())
    assert torch.equal(found.log2(), found.log2().round())
    assert len(found.unique()) > 1


def test_calibrated_mixture_errs_less_than_data_free_on_prompts_it_has_not_seen(
    mixture: TargetCheckpoint, calibration: Calibration, tmp_path: Path
) -> None:
    file = write_prompts(tmp_path / "heldout.jsonl", "heldout", 7, 6)
    prompts = read_prompts(file, mixture, MAX_LEN)
    dense = forward(mixture, prompts)
    errors = []
    for name, found in (("free", None), ("calibrated", calibration)):
        made = quantise_target(mixture, "int4", tmp_path / name, calibration=found)
        layers = forward(made, prompts).layers
        errors.append(sum(map(relative_error, layers, dense.layers)))
    assert errors[1] < 0.95 * errors[0], errors


def test_build_says_how_many_experts_saw_too_few_rows(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 12 plus 30?"}')
    draft = MIXTURE / "draft"

    config = tiny_config(target=TARGET, draft=draft, engine={"weights": "int4"})
    said: list[str] = []
    report = build(config, output=tmp_path, calibration=prompts, announce=said.append)
    assert "experts with too few rows are quantised without data" in report.calibrated_on
    assert any("calibration: 1 prompts" in line for line in said)
