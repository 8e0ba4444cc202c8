"""The fuse and draft graphs against ``trt_eagle3/parity/reference/draft.py``, for every variant
that a manifest can name.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference.checkpoint import file_name, random_draft
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.drafts.eagle3.graph import draft_graph, fuse_graph
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.spec import RopeSpec

PAGE_SIZE = 4
PROMPT_ROWS = 7
CHAIN = (-1, 0, 1, 2)
TREE = (-1, -1, 0, 0, 1, 2, 4)
"""Parents of drafted nodes; -1 hangs from the last prompt row.

Levels: (0, 1), (2, 3, 4), (5, 6).
"""
YARN = dataclasses.replace(
    RopeSpec.plain(8, 10000.0), attention_scaling=1.2079441541679836, kind="yarn"
)


def open_draft(manifest: Eagle3Manifest) -> DraftRunner:
    sessions = []
    models = (
        fuse_graph(manifest, "float32", file_name),
        draft_graph(manifest, "float32", PAGE_SIZE, file_name),
    )
    for name, model in zip(("fuse", "draft"), models, strict=True):
        path = manifest.path / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        sessions.append(OnnxRuntimeSession(path, manifest.path))
    return DraftRunner(
        *sessions,
        layer_states(sessions[1].states, 8 * PAGE_SIZE),
        EmbeddingTable(manifest.tensors["embed_tokens.weight"], torch.float32),
        None,
    )


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """Drafting of ``parents`` after a prompt; positions are random, so that no axis can stand
    for another.
    """

    parents: Sequence[int]
    aux: Tensor
    embeds: Tensor
    positions: Tensor

    @classmethod
    def draw(cls, m: Eagle3Manifest, parents: Sequence[int], seed: int) -> DrawnRows:
        generator = torch.Generator().manual_seed(seed)
        count = PROMPT_ROWS + len(parents)
        return cls(
            parents,
            torch.randn(PROMPT_ROWS, len(m.aux_layers) * m.target_hidden_size, generator=generator),
            torch.randn(count, m.hidden_size, generator=generator),
            torch.randint(0, 60, (3, count), generator=generator, dtype=torch.int32),
        )

    @property
    def levels(self) -> list[list[int]]:
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return [[i for i, d in enumerate(depth) if d == level] for level in range(max(depth) + 1)]

    @property
    def mask(self) -> Tensor:
        """bool [T, T] over prompt rows and nodes."""
        mask = causal_mask(PROMPT_ROWS + len(self.parents))
        mask[PROMPT_ROWS:, PROMPT_ROWS:] = False
        for i, parent in enumerate(self.parents, start=PROMPT_ROWS):
            mask[i, i] = True
            if parent >= 0:
                mask[i, PROMPT_ROWS:] |= mask[PROMPT_ROWS + parent, PROMPT_ROWS:]
        return mask

    def run(self, runner: DraftRunner) -> tuple[Tensor, Tensor]:
        """Logits and features of all rows over a cache: the prompt in two chunks, then level by
        level.
        """
        pages = PageTable(PagePool(8, PAGE_SIZE))
        pages.reserve(len(self.embeds))
        features, logits = runner.fuse(self.aux), []
        out = []
        for start, stop in ((0, 4), (4, PROMPT_ROWS)):
            place = AttentionMetadata.single(
                start, pages.pages(stop), causal_mask(stop - start), self.positions[:, start:stop]
            )
            rows = slice(start, stop)
            wanted = torch.arange(stop - start)[None]
            parts = runner.forward(self.embeds[None, rows], features[None, rows], place, wanted)
            logits.append(parts[0][0])
            out.append(parts[1][0])
        for level in self.levels:
            done = torch.cat(out)
            stop = PROMPT_ROWS + level[-1] + 1
            nodes = [PROMPT_ROWS + i for i in level]
            fed = torch.stack(
                [
                    done[PROMPT_ROWS + self.parents[i] if self.parents[i] >= 0 else PROMPT_ROWS - 1]
                    for i in level
                ]
            )
            mask, positions = self.mask[nodes, PROMPT_ROWS:stop], self.positions[:, nodes]
            place = AttentionMetadata.single(PROMPT_ROWS, pages.pages(stop), mask, positions)
            parts = runner.forward(
                self.embeds[None, nodes], fed[None], place, torch.arange(len(level))[None]
            )
            logits.append(parts[0][0])
            out.append(parts[1][0])
        return torch.cat(logits), torch.cat(out)

    def reference(self, draft: Eagle3Reference) -> tuple[Tensor, Tensor]:
        """The same, recomputed over all rows so far at every level."""
        features = draft.fuse(self.aux)
        for level in [*self.levels, []]:
            count = len(features)
            logits, out = draft.forward(
                self.embeds[:count], features, self.positions[:, :count], self.mask[:count, :count]
            )
            fed = [
                out[PROMPT_ROWS + self.parents[i] if self.parents[i] >= 0 else PROMPT_ROWS - 1]
                for i in level
            ]
            features = torch.cat([features, torch.stack(fed)]) if fed else features
        return logits, out

    def error(self, runner: DraftRunner, draft: Eagle3Reference) -> float:
        found, expected = self.run(runner), self.reference(draft)
        return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


VARIANTS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "residual normed": {"residual": "normed"},
    "first norm double": {"first_norm": "double"},
    "double and normed": {"first_norm": "double", "residual": "normed"},
    "norm before fc": {"norm_before_fc": True},
    "fc norm": {"fc_norm": True},
    "feedback post norm": {"feedback": "post_norm"},
    "qk norm": {"qk_norm": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "fc bias": {"fc_bias": True},
    "3 layers": {"num_layers": 3},
    "target wider": {"target_hidden_size": 40, "embedding": "own"},
    "one aux state": {"aux_layers": (2,)},
    "chunked": {"rope": RopeSpec.plain(8, 1e4, "chunked", (2, 1, 1))},
    "interleaved": {"rope": RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))},
    "yarn": {"rope": YARN},
    "full vocab": {"draft_vocab_size": 32},
    "target head": {"head": "target"},
    "epsilon": {"rms_norm_eps": 1e-3},
    "head dim not hidden over heads": {
        "head_dim": 10,
        "rope": RopeSpec.plain(10, 1e4),
        "num_heads": 5,
        "num_kv_heads": 1,
    },
}


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_variant_over_a_cache_equals_recomputation(
    variant: str, parents: Sequence[int], tmp_path: Path
) -> None:
    draft = random_draft(tmp_path, **VARIANTS[variant])
    rows = DrawnRows.draw(draft.manifest, parents, seed=1)
    assert rows.error(open_draft(draft.manifest), draft) < FLOAT32_TOLERANCE


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    pairs = draw(st.integers(3, 6))
    h, w = draw(st.integers(0, pairs // 3)), draw(st.integers(0, pairs // 3))
    num_heads, num_kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (5, 1), (7, 1)]))
    layout = draw(st.sampled_from(["1d", "chunked", "interleaved"]))
    sections = () if layout == "1d" else (pairs - h - w, h, w)
    flags = ("norm_before_fc", "fc_norm", "qk_norm", "attention_bias", "mlp_bias", "fc_bias")
    return {
        **{flag: draw(st.booleans()) for flag in flags},
        "residual": draw(st.sampled_from(["hidden", "normed"])),
        "first_norm": draw(st.sampled_from(["single", "double"])),
        "feedback": draw(st.sampled_from(["pre_norm", "post_norm"])),
        "num_layers": draw(st.integers(1, 3)),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 2 * pairs,
        "hidden_size": draw(st.sampled_from([11, 24])),
        "target_hidden_size": draw(st.sampled_from([13, 24])),
        "rope": RopeSpec.plain(2 * pairs, draw(st.sampled_from([1e4, 5e6])), layout, sections),
        "aux_layers": tuple(range(draw(st.integers(1, 4)))),
        "stored": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=20)
@given(fields=manifests(), parents=st.sampled_from([CHAIN, TREE]))
def test_draft_of_any_combination_equals_recomputation(
    fields: dict[str, Any], parents: Sequence[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        draft = random_draft(Path(directory), **fields)
        rows = DrawnRows.draw(draft.manifest, parents, fields["seed"])
        assert rows.error(open_draft(draft.manifest), draft) < FLOAT32_TOLERANCE


DEVIATIONS: dict[str, Any] = {
    "residual": "normed",
    "first_norm": "double",
    "norm_before_fc": True,
    "fc_norm": True,
    "feedback": "post_norm",
    "qk_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "fc_bias": True,
    "num_layers": 1,
    "rms_norm_eps": 1e-2,
}


@pytest.mark.parametrize("field", DEVIATIONS)
def test_draft_deviation_in_one_field_is_caught(field: str, tmp_path: Path) -> None:
    draft = random_draft(tmp_path, num_layers=2)
    wrong = dataclasses.replace(draft.manifest, **{field: DEVIATIONS[field]})
    rows = DrawnRows.draw(draft.manifest, TREE, seed=1)
    assert rows.error(open_draft(draft.manifest), draft) < FLOAT32_TOLERANCE
    assert rows.error(open_draft(wrong), draft) > FAULT_FLOOR


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec.plain(8, 1e4),
        RopeSpec.plain(8, 1e4, "chunked", (2, 1, 1)),
        RopeSpec.plain(8, 5e6, "interleaved", (2, 1, 1)),
        dataclasses.replace(
            RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1)), attention_scaling=1.1
        ),
    ],
    ids=["1d", "chunked", "base", "attention scaling"],
)
def test_draft_deviation_in_rope_is_caught(rope: RopeSpec, tmp_path: Path) -> None:
    draft = random_draft(tmp_path, rope=RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1)))
    rows = DrawnRows.draw(draft.manifest, TREE, seed=1)
    assert (
        rows.error(open_draft(dataclasses.replace(draft.manifest, rope=rope)), draft) > FAULT_FLOOR
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"),
        ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("norm.weight", "layers.0.post_attention_layernorm.weight"),
    ],
)
def test_draft_with_two_tensors_swapped_is_caught(left: str, right: str, tmp_path: Path) -> None:
    draft = random_draft(tmp_path)
    tensors = draft.manifest.tensors
    wrong = dataclasses.replace(
        draft.manifest, tensors={**tensors, left: tensors[right], right: tensors[left]}
    )
    assert (
        DrawnRows.draw(draft.manifest, TREE, seed=1).error(open_draft(wrong), draft) > FAULT_FLOOR
    )
