"""Decoding on the CPU against transformers: ``python -m benchmarks.cpu``.

A text geometry like Qwen3-0.6B's or Qwen3.5-0.8B's with random float32 weights, batch 1. One
process, both sides alternating, best of the rounds: plain decoding of both after the same prompt,
and our step of 1 token against a verify of 16. The matrix products of the same model are timed
alone too: what they take is the least that a step can take on this processor.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from benchmarks.synthetic_hybrid import hybrid_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.config import EngineConfig
from trt_eagle3.decode.decoder import Decoder
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.runner import AttentionMetadata, TargetRunner, causal_mask
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.state import layer_states
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.session import open_session
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.activations import write_activations
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.io.run_command import run_command
from trt_eagle3.spec import GatedDeltaSpec

__all__ = ["CpuEngine", "best_ms", "cpu_engine", "decoded", "main", "small_model", "small_size"]

_VERIFY = 16
_FLOAT32 = EngineConfig()
CpuEngine = tuple[Callable[[Prompt], Iterator[tuple[int, ...]]], Callable[[int, int], object]]
"""Decoding of a prompt, and a target pass of n tokens after a context."""
_QWEN3 = "qwen3-0.6b"
small_size = click.option(
    "--size",
    type=click.Choice([_QWEN3, "qwen3.5-0.8b", "qwen3.5-tiny"]),
    default=_QWEN3,
    show_default=True,
    help="Geometry: that of the model, or a tiny one, to try the benchmark.",
)


@click.command()
@small_size
@click.option("--context", default=256, show_default=True, help="Prompt tokens.")
@click.option("--tokens", default=32, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=3, show_default=True, help="The best of so many rounds counts.")
def main(size: str, context: int, tokens: int, rounds: int) -> None:
    """Print tokens per second of both, step times, and the ratios."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = small_model(size)
        model.save_pretrained(folder)
        decode, step = cpu_engine(Path(folder), read_target(Path(folder)))
        ids = torch.randint(1000, model.config.get_text_config().vocab_size // 2, (context,))
        ours, theirs = [], []
        for _ in range(rounds):
            theirs.append(_transformers(model, ids, tokens))
            ours.append(decoded(decode, ids, tokens))
        assert ours[0][1] == theirs[0][1], "the two sides decoded different tokens"
        products = _products(Path(folder))
        rows: dict[str, Callable[[int], object]] = {
            "trt-eagle3 step": partial(step, context),
            "its matrix products alone": products,
        }
        steps = {
            name: [best_ms(run, n, 5 * rounds) for n in (1, _VERIFY)] for name, run in rows.items()
        }
    _print(size, max(r for r, _ in ours), max(r for r, _ in theirs), steps, context)


def small_model(size: str) -> PreTrainedModel:
    """A geometry of ``small_size`` with random weights."""
    if size == _QWEN3:
        return _qwen3()
    model: PreTrainedModel = Qwen3_5ForCausalLM(hybrid_config(size, None)).eval()
    return model


def _qwen3() -> PreTrainedModel:
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": rope,
        "eos_token_id": 151645,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 1024,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    model: PreTrainedModel = Qwen3VLForConditionalGeneration(config).eval()
    return model


def cpu_engine(folder: Path, spec: TargetCheckpoint, engine: EngineConfig = _FLOAT32) -> CpuEngine:
    """Plain decoding, and one target pass of n tokens after a context."""
    model = build_graphs(spec, None, engine, lambda ref: ref.file.name)["target"]
    write_activations(model, engine.activations)
    (folder / "target.onnx").write_bytes(model.SerializeToString())
    pool = PagePool(1024 // engine.page_size, engine.page_size)
    target = _runner(folder, spec, pool)
    decoder = Decoder(target, None, max_seq_len=1000, prefill_chunk=engine.prefill_chunk)

    def decode(prompt: Prompt) -> Iterator[tuple[int, ...]]:
        return decoder.run(SequenceState(prompt, pool, spec.vocab_size))

    def step(context: int, num_tokens: int) -> object:
        pages = torch.arange(
            1, 1 - (-(context + num_tokens) // engine.page_size), dtype=torch.int32
        )[None]
        positions = torch.arange(context, context + num_tokens, dtype=torch.int32).expand(3, -1)
        embeds = target.embedding.lookup(torch.arange(num_tokens))
        metadata = AttentionMetadata.single(context, pages, causal_mask(num_tokens), positions)
        metadata = replace(metadata, state_inputs=target.states.padding(1, pages))
        return target.forward(embeds[None], metadata, torch.arange(num_tokens)[None])

    return decode, step


def _products(folder: Path) -> Callable[[int], object]:
    """Every matrix product of the decoder and the head over n rows, and nothing else."""
    spec = read_target(folder)
    b = GraphBuilder("products", "float32", lambda ref: ref.file.name)
    widths = sorted({ref.shape[1] for ref in spec.tensors.values() if len(ref.shape) == 2})
    inputs = {width: b.input(f"x{width}", b.dtype, ("rows", width)) for width in widths}
    for i, group in enumerate(_groups(spec)):
        refs = [spec.tensors[f"{name}.weight"] for name in group]
        b.output(
            b.linear(inputs[refs[0].shape[1]], refs, name=f"y{i}"),
            f"y{i}",
            ("rows", sum(r.shape[0] for r in refs)),
        )
    (folder / "products.onnx").write_bytes(b.build().SerializeToString())
    session = open_session("onnxruntime", folder / "products.onnx", folder)
    return lambda rows: session.run({f"x{width}": torch.randn(rows, width) for width in widths})


def _groups(spec: TargetCheckpoint) -> list[list[str]]:
    """Names of the weights that are multiplied at once."""
    groups = [["lm_head"]]
    for i, layer in enumerate(spec.layers):
        attention, linear, mlp = (f"layers.{i}.{n}." for n in ("self_attn", "linear_attn", "mlp"))
        if isinstance(layer.mixer, GatedDeltaSpec):
            groups += [[f"{linear}in_proj_{p}" for p in pair] for pair in (("qkv", "z"), "ba")]
            groups.append([f"{linear}out_proj"])
        else:
            groups += [[f"{attention}{p}_proj" for p in "qkv"], [f"{attention}o_proj"]]
        groups += [[f"{mlp}gate_proj", f"{mlp}up_proj"], [f"{mlp}down_proj"]]
    return groups


def _runner(folder: Path, spec: TargetCheckpoint, pool: PagePool) -> TargetRunner:
    embedding = EmbeddingTable(spec.tensors["embed_tokens.weight"], torch.float32)
    session = open_session("onnxruntime", folder / "target.onnx", folder)
    states = layer_states(session.states, pool.num_pages * pool.page_size)
    return TargetRunner(session, states, embedding, spec.num_visual_levels)


class _TokenTimes:
    """A streamer of ``generate`` that notes when each token came; its first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def _transformers(model: Any, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    """Tokens per second after the first, and the tokens."""
    streamer, count = _TokenTimes(), tokens + 1
    out = model.generate(
        ids[None], max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=streamer
    )
    _, first, *_, last = streamer.times
    return tokens / (last - first), out[0, len(ids) :].tolist()


def decoded(
    decode: Callable[[Prompt], Iterator[tuple[int, ...]]], ids: torch.Tensor, tokens: int
) -> tuple[float, list[int]]:
    """Tokens per second after the first, and the tokens, of decoding without speculation."""
    rows = torch.arange(len(ids), dtype=torch.int32).expand(3, -1)
    prompt = Prompt(ids, rows, 0, torch.zeros(len(ids), dtype=torch.bool))
    found: list[int] = []
    start = 0.0
    for emitted in decode(prompt):
        start = start or time.perf_counter()
        found += emitted
        if len(found) > tokens:
            break
    return tokens / (time.perf_counter() - start), found


def best_ms(run: Callable[[int], object], num_tokens: int, times: int) -> float:
    """The shortest of so many runs."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run(num_tokens)
        best = min(best, 1000 * (time.perf_counter() - start))
    return best


def _print(
    model: str, ours: float, theirs: float, steps: dict[str, list[float]], context: int
) -> None:
    table = Table(f"{model}, float32, batch 1", f"context {context}", "ratio")
    table.add_row("transformers generate", f"{theirs:.2f} tok/s", "1.00")
    table.add_row("trt-eagle3 plain (onnxruntime)", f"{ours:.2f} tok/s", f"{ours / theirs:.2f}")
    for name, (one, verify) in steps.items():
        table.add_row(f"{name}, 1 token", f"{one:.1f} ms", "1.00")
        table.add_row(f"{name}, {_VERIFY} tokens", f"{verify:.1f} ms", f"{verify / one:.2f}")
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
