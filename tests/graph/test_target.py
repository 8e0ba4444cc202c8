"""The target graph against transformers on random geometries."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.checkpoint import file_name
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from tests.reference.target import Target, TargetStates, random_target
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.errors import UserError
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.spec import LayerSpec, NormSpec, RopeSpec

PAGE_SIZE = 4
NUM_ROWS = 17
VISUAL = slice(3, 9)


def open_target(
    spec: TargetCheckpoint, aux_layers: tuple[int, ...], before: bool = False
) -> TargetRunner:
    """A runner of the graph over pages 1 .. 7."""
    model = target_graph(spec, aux_layers, before, "float32", PAGE_SIZE, file_name)
    path = spec.path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    table = EmbeddingTable(spec.tensors["embed_tokens.weight"], torch.float32)
    session = OnnxRuntimeSession(path, spec.path)
    states = layer_states(session.states, 8 * PAGE_SIZE)
    return TargetRunner(session, states, table, spec.num_visual_levels)


class OneSequence:
    """What states know of a sequence that has all pages."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.pages = PageTable(PagePool(8, PAGE_SIZE))


@dataclass(frozen=True)
class TargetRows:
    """A prompt of ``NUM_ROWS`` rows with visual ones in the middle; ``deepstack`` [L, S, H] is
    zero at text rows.
    """

    embeds: Tensor
    positions: Tensor
    visual: Tensor
    visual_levels: Tensor

    def run(self, runner: TargetRunner, cuts: list[int]) -> tuple[Tensor, Tensor | None]:
        """Logits and aux of all rows, computed in chunks that end at ``cuts``."""
        states = runner.states
        sequence: Any = OneSequence()
        states.reserve(sequence, NUM_ROWS)
        parts = []
        for start, stop in zip([0, *cuts], [*cuts, NUM_ROWS], strict=True):
            place = AttentionMetadata(
                past=[start],
                counts=[stop - start],
                state_inputs=states.inputs([sequence], [stop], certain=[stop - start]),
                mask=causal_mask(stop - start)[None],
                positions=self.positions[:, None, start:stop],
            )
            wanted = torch.arange(stop - start)[None]
            visual_levels = self.visual_levels[:, None, start:stop].contiguous()
            parts.append(
                runner.forward(self.embeds[None, start:stop], place, wanted, visual_levels)
            )
            states.swap_entries([sequence])
        states.release(sequence)
        logits, aux = zip(*parts, strict=True)
        return torch.cat(logits, dim=1)[0], None if aux[0] is None else torch.cat(aux, dim=1)[0]

    def reference(self, target: Target) -> TargetStates:
        return target.states(
            self.embeds, self.positions, self.visual, self.visual_levels[:, VISUAL]
        )


def rows_of(spec: TargetCheckpoint, seed: int) -> TargetRows:
    generator = torch.Generator().manual_seed(seed)
    hidden = spec.hidden_size
    visual = torch.zeros(NUM_ROWS, dtype=torch.bool)
    visual[VISUAL] = True
    visual_levels = (
        torch.randn(spec.num_visual_levels, NUM_ROWS, hidden, generator=generator) * visual[:, None]
    )
    positions = torch.arange(NUM_ROWS).expand(3, -1).clone()
    positions[1:, VISUAL] = 3 + torch.randint(0, 40, (2, 6), generator=generator)
    return TargetRows(
        torch.randn(NUM_ROWS, hidden, generator=generator), positions.int(), visual, visual_levels
    )


@dataclass(frozen=True)
class Geometry:
    """What hypothesis draws; ``open`` makes the checkpoint of it."""

    heads: tuple[int, int, int]
    hidden: int
    layers: int
    levels: int
    sections: tuple[int, int, int]
    tied: bool
    bias: bool
    stored: torch.dtype
    seed: int

    @contextmanager
    def open(self) -> Iterator[Target]:
        num_heads, num_kv_heads, head_dim = self.heads
        text = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "attention_bias": self.bias,
            "tie_word_embeddings": self.tied,
        }
        vision = {
            "depth": max(self.levels, 1),
            "deepstack_visual_indexes": list(range(self.levels)),
        }
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            yield random_target(
                path,
                text=text,
                vision=vision,
                sections=self.sections,
                stored=self.stored,
                seed=self.seed,
            )


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (5, 1), (6, 2), (7, 1)]))
    pairs = draw(st.integers(3, 8))
    h, w = draw(st.integers(0, pairs // 3)), draw(st.integers(0, pairs // 3))
    layers = draw(st.integers(1, 4))
    return Geometry(
        heads=(num_heads, num_kv_heads, 2 * pairs),
        hidden=draw(st.sampled_from([11, 24, 32])),
        layers=layers,
        levels=draw(st.integers(0, layers)),
        sections=(pairs - h - w, h, w),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        stored=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=20)
@given(
    geometry=geometries(),
    cuts=st.lists(st.integers(1, NUM_ROWS - 1), unique=True, max_size=3),
    before=st.booleans(),
)
def test_target_of_any_geometry_in_any_chunks_equals_transformers(
    geometry: Geometry, cuts: list[int], before: bool
) -> None:
    with geometry.open() as target:
        rows = rows_of(target.spec, geometry.seed)
        layers = tuple(range(geometry.layers))
        logits, aux = rows.run(open_target(target.spec, layers, before), sorted(cuts))
        expected = rows.reference(target)
    assert aux is not None
    assert relative_error(logits, expected.logits) < FLOAT32_TOLERANCE
    for layer, found in enumerate(aux.split(geometry.hidden, dim=-1)):
        assert relative_error(found, expected.aux((layer,), before)) < FLOAT32_TOLERANCE, (
            f"layer {layer}"
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return random_target(tmp_path_factory.mktemp("target"), seed=1)


def with_rope(spec: TargetCheckpoint, rope: RopeSpec) -> TargetCheckpoint:
    return with_layers(spec, lambda x: replace(x, mixer=replace(x.mixer, rope=rope)))


def with_eps(spec: TargetCheckpoint, eps: float) -> TargetCheckpoint:
    norm = NormSpec(eps)
    changed = with_layers(
        spec, lambda x: replace(x, norm=norm, mixer=replace(x.mixer, qk_norm=norm))
    )
    return replace(changed, norm=norm)


def with_layers(
    spec: TargetCheckpoint, change: Callable[[LayerSpec], LayerSpec]
) -> TargetCheckpoint:
    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


def swapped(spec: TargetCheckpoint, left: str, right: str) -> TargetCheckpoint:
    tensors = {**spec.tensors, left: spec.tensors[right], right: spec.tensors[left]}
    return replace(spec, tensors=tensors)


@pytest.mark.parametrize(
    "fault",
    [
        lambda spec: with_rope(spec, RopeSpec.plain(8, 5e6, "chunked", (2, 1, 1))),
        lambda spec: with_rope(spec, RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))),
        lambda spec: with_eps(spec, 0.01),
        lambda spec: replace(spec, layers=spec.layers[:3]),
        lambda spec: swapped(
            spec, "layers.1.self_attn.q_norm.weight", "layers.1.self_attn.k_norm.weight"
        ),
        lambda spec: swapped(spec, "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
        lambda spec: swapped(spec, "lm_head.weight", "embed_tokens.weight"),
        lambda spec: replace(
            spec, layers=(spec.layers[0], *(replace(x, visual_level=None) for x in spec.layers[1:]))
        ),
    ],
    ids=[
        "rope layout",
        "rope base",
        "epsilon",
        "layers",
        "q k norms",
        "gate up",
        "head",
        "deepstack",
    ],
)
def test_target_planted_fault_is_caught(target: Target, fault: object) -> None:
    rows = rows_of(target.spec, 2)
    wrong = fault(target.spec)
    short = replace(rows, visual_levels=rows.visual_levels[: wrong.num_visual_levels])
    logits, _ = short.run(open_target(wrong, ()), [])
    assert relative_error(logits, rows.reference(target).logits) > FAULT_FLOOR


def test_target_aux_taken_on_the_wrong_side_of_deepstack_is_caught(target: Target) -> None:
    rows = rows_of(target.spec, 2)
    _, aux = rows.run(open_target(target.spec, (1,), before=True), [])
    expected = rows.reference(target)
    assert aux is not None
    assert relative_error(aux, expected.aux((1,), before=True)) < FLOAT32_TOLERANCE
    assert relative_error(aux, expected.aux((1,), before=False)) > FAULT_FLOOR
    assert relative_error(aux, expected.aux((2,), before=True)) > FAULT_FLOOR


def test_target_rows_of_a_batch_equal_each_row_alone(target: Target) -> None:
    session = open_target(target.spec, (0, 2))._session
    lengths, generator = [5, 1, 9], torch.Generator().manual_seed(0)
    hidden, levels, longest = target.spec.hidden_size, target.spec.num_visual_levels, 9
    embeds = torch.randn(3, longest, hidden, generator=generator)
    # row 1 owns one page, row 0 two
    pages = torch.tensor([[7, 2, 0], [3, 0, 0], [5, 1, 6]], dtype=torch.int32)

    def run(row: slice, length: int) -> dict[str, Tensor]:
        queries = torch.tensor(lengths[row], dtype=torch.int32)
        count = len(queries)
        return session.run(
            {
                "inputs_embeds": embeds[row, :length],
                "deepstack_embeds": torch.zeros(levels, count, length, hidden),
                "position_ids": torch.arange(length, dtype=torch.int32).expand(3, count, -1),
                "past_lengths": torch.zeros(count, dtype=torch.int32),
                "query_lengths": queries,
                "page_table": pages[row],
                "tree_mask": causal_mask(length).expand(count, -1, -1),
                "logit_rows": (queries - 1)[:, None],
            }
        )

    together = run(slice(0, 3), longest)
    for i, length in enumerate(lengths):
        alone = run(slice(i, i + 1), length)
        assert relative_error(together["logits"][i], alone["logits"][0]) < FLOAT32_TOLERANCE
        found = together["aux_hidden_states"][i, :length]
        assert relative_error(found, alone["aux_hidden_states"][0]) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("layers", [(0, 4), (-1, 2)])
def test_target_refuses_an_aux_layer_that_it_does_not_compute(
    target: Target, layers: tuple[int, ...]
) -> None:
    with pytest.raises(UserError, match=r"does not exist in a target of 4 layers \(0 to 3\)"):
        target_graph(target.spec, layers, False, "float32", PAGE_SIZE, file_name)


def test_target_refuses_a_quantised_weight(target: Target) -> None:
    name = "layers.0.mlp.gate_proj.weight"
    tensors = {
        **target.spec.tensors,
        name: replace(target.spec.tensors[name], dtype="I8"),
    }
    with pytest.raises(UserError, match=r"gate_proj.weight: expected a float32.* got I8"):
        target_graph(
            replace(target.spec, tensors=tensors),
            (),
            False,
            "float32",
            PAGE_SIZE,
            file_name,
        )
