"""docs/memory.md: its formula and its tables are those of the code, and the code's are what is
allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from benchmarks.synthetic import write_draft, write_target
from tests.tiny import ROOT, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig, LimitsConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.kv_cache import KVCache
from trt_eagle3.engine.builder.weight_quantiser import is_quantised_here
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.runtime.memory import (
    MemoryNeed,
    check_fits,
    fill_memory,
    kv_bytes_per_token,
    memory_need,
    num_pages,
)
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target

PAGE = (ROOT / "docs/memory.md").read_text()
NAMES = {
    "2b": "Qwen3-VL-2B",
    "4b": "Qwen3-VL-4B",
    "8b": "Qwen3-VL-8B",
    "32b": "Qwen3-VL-32B",
    "30b-a3b": "Qwen3-VL-30B-A3B",
    "qwen3.5-9b": "Qwen3.5-9B",
    "qwen3.5-27b": "Qwen3.5-27B",
}
CUDA = EngineConfig(backend="torch", device="cuda", dtype="bfloat16")
FP8_KV = EngineConfig(backend="torch", device="cuda", dtype="bfloat16", kv_dtype="fp8")
NODES = 4
GPUS = (23e9, 46e9, 79e9, 140e9)
SAVED = {"fp8": 2 - 1, "int8": 2 - 1, "int4": 2 - 0.516}
"""Bytes that a quantised number saves, as on the page."""


def limits(batch: int) -> LimitsConfig:
    return LimitsConfig(max_batch_size=batch, max_seq_len=8192, max_visual_tokens=2048)


@dataclass(frozen=True)
class Pair:
    spec: TargetCheckpoint
    draft: DraftManifest

    @property
    def quantised(self) -> int:
        """Numbers that ``engine.weights`` quantises."""
        found = self.spec.tensors.items()
        return sum(prod(ref.shape) for name, ref in found if is_quantised_here(name))

    def need(self, engine: EngineConfig, batch: int, weights: str | None = None) -> MemoryNeed:
        saved = int(self.quantised * SAVED[weights]) if weights else 0
        return memory_need(self.spec, self.draft, limits(batch), engine, NODES, saved)

    def tokens(self, free: float, engine: EngineConfig, weights: str | None) -> str:
        """Cell of the table: thousands of tokens with 16 and with 64 sequences."""
        return " / ".join(
            _thousands(self.need(engine, batch, weights), free, limits(batch)) for batch in (16, 64)
        )


def _thousands(need: MemoryNeed, free: float, wanted: LimitsConfig) -> str:
    try:
        found = fill_memory(need, int(free), wanted, CUDA.page_size).max_kv_tokens
    except UserError:
        return "no"
    return "all" if found is None else f"{found // 1000}"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    found = {}
    for size in NAMES:
        folder = tmp_path_factory.mktemp(size)
        write_target(folder / "target", size)
        write_draft(folder / "draft", size)
        spec = read_target(folder / "target")
        found[size] = Pair(spec, read_draft(folder / "draft", spec))
    return found


def table_of_needs(pairs: dict[str, Pair]) -> Iterator[str]:
    for size, pair in pairs.items():
        weights = " / ".join(
            f"{pair.need(CUDA, 16, w).weights / 1e9:.1f}" for w in (None, "fp8", "int4")
        )
        kv = " / ".join(
            f"{kv_bytes_per_token(pair.spec, pair.draft, 'bfloat16', t):,}"
            for t in ("compute", "fp8")
        )
        needs = [pair.need(CUDA, batch) for batch in (16, 64)]
        rest = " / ".join(f"{(n.images + n.prefill + n.states) / 1e9:.1f}" for n in needs)
        yield f"| {NAMES[size]} | {weights} | {kv} | {rest} |"


def table_of_tokens(pairs: dict[str, Pair]) -> Iterator[str]:
    kinds: dict[str, tuple[EngineConfig, str | None]] = {
        "bfloat16": (CUDA, None),
        "`fp8`": (CUDA, "fp8"),
        "`fp8`, FP8 KV": (FP8_KV, "fp8"),
        "`int4`": (CUDA, "int4"),
    }
    for size, pair in pairs.items():
        for kind, (engine, weights) in kinds.items():
            cells = [pair.tokens(free, engine, weights) for free in GPUS]
            yield f"| {NAMES[size]}, {kind} | {' | '.join(cells)} |"


@pytest.mark.parametrize("table", [table_of_needs, table_of_tokens])
def test_tables_of_the_page_are_the_codes(
    table: Callable[[dict[str, Pair]], Iterator[str]], pairs: dict[str, Pair]
) -> None:
    rows = "\n".join(table(pairs))
    assert f"|\n{rows}\n\n" in PAGE, f"expected these rows:\n{rows}"


def test_refusal_on_the_page_is_the_codes(pairs: dict[str, Pair]) -> None:
    wanted = LimitsConfig(max_batch_size=8, max_seq_len=16384, max_visual_tokens=12288)
    need = memory_need(pairs["8b"].spec, pairs["8b"].draft, wanted, CUDA, NODES)
    with pytest.raises(UserError) as caught:
        check_fits(need, int(30e9), wanted)
    assert f"error: {caught.value}" in PAGE.replace("GPU\nhas", "GPU has")


@pytest.mark.parametrize("engine", [CUDA, FP8_KV, EngineConfig(backend="torch")])
@pytest.mark.parametrize("size", ["2b", "8b"])
def test_formula_of_the_page_is_the_codes(
    size: str, engine: EngineConfig, pairs: dict[str, Pair]
) -> None:
    spec, draft = pairs[size].spec, pairs[size].draft
    need, wanted = pairs[size].need(engine, 16), limits(16)
    b = 4 if engine.dtype == "float32" else 2
    c = 1 if engine.kv_dtype == "fp8" else b
    attention = spec.attention
    kv_bytes = 2 * c * attention.num_kv_heads * attention.head_dim * spec.num_layers
    kv_bytes += 2 * b * draft.num_kv_heads * draft.head_dim * draft.num_layers
    assert need.kv_token == kv_bytes
    assert need.kv_cache == (16 * 8192 + engine.page_size) * kv_bytes
    numbers = sum(prod(ref.shape) for ref in spec.tensors.values())  # a tied head is listed too
    tables = ("d2t", "t2d")
    numbers += sum(prod(r.shape) for n, r in draft.tensors.items() if n not in tables)
    assert need.weights == pytest.approx(b * numbers, rel=1e-3)  # norms are not counted
    fewer = memory_need(spec, draft, limits(15), engine, NODES).prefill
    rows = 512 * len(draft.aux_layers) * spec.hidden_size
    assert need.prefill - fewer == 12 * NODES * spec.vocab_size + b * rows
    images = memory_need(spec, draft, wanted.model_copy(update={"max_visual_tokens": 1}), engine)
    assert need.images == 2048 * images.images


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_quantised_weights_save_what_the_page_says(weights: str, tmp_path: Path) -> None:
    engine = {**CUDA.model_dump(mode="json"), "weights": weights}
    record = read_bundle(build_tiny(tmp_path, engine=engine))
    spec = read_target(ROOT / "examples/tiny/target")
    kept = [  # K of 448, as of down_proj, has no kernel
        prod(ref.shape)
        for name, ref in spec.tensors.items()
        if is_quantised_here(name) and ref.shape[-1] % 128 == 0
    ]
    assert record.packed_savings == pytest.approx(sum(kept) * SAVED[weights], rel=0.02)


def test_kv_cache_that_is_allocated_is_the_formulas(tmp_path: Path) -> None:
    bundle = LoadedBundle.open(build_tiny(tmp_path, limits={"max_kv_tokens": 2048}))
    need = memory_need(
        bundle.spec, bundle.manifest, bundle.limits, bundle.record.config.engine, NODES
    )
    slots = num_pages(bundle.limits, bundle.page_size) * bundle.page_size
    allocated = 0
    for graph in ("target", "draft"):
        states = [s for s in bundle.open_graph(graph).states if s.kind == "paged"]
        allocated += KVCache(states, slots).num_bytes
    assert allocated == need.kv_cache
