"""Decoding on the CPU against transformers: ``python -m benchmarks.cpu``.

A text geometry like Qwen3-0.6B's or Qwen3.5-0.8B's with random weights, batch 1. All sides
alternate in one process, and the best round counts. Measured: autoregressive decoding after the
same prompt, and our steps of 1, 6 and 16 tokens. Both sides in float32 must emit the same tokens.
``--quantised`` adds ``engine.weights`` with ``engine.activations: int8``. The matrix products of
the same model are also timed alone: in float32 they are the lower bound of a step on this
processor.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.engine.builder.weight_quantiser import quantise_target
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import open_session
from trt_eagle3.errors import CheckFailedError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.activations import write_activations
from trt_eagle3.graph.build_graphs import build_graphs
from trt_eagle3.graph.builder import GraphBuilder
from trt_eagle3.io.run_command import run_command
from trt_eagle3.spec import GatedDeltaSpec

__all__ = ["main", "product_groups"]

_ROWS = (1, 6, 16)
_FLOAT32 = "trt-eagle3 float32"
_QUANTISED = {
    "trt-eagle3 int8": EngineConfig(weights="int8", activations="int8"),
    "trt-eagle3 int4": EngineConfig(weights="int4", activations="int8"),
    "trt-eagle3 int4, and the head": EngineConfig(
        weights="int4", activations="int8", quantise_head=True
    ),
}
_PRODUCTS = "matrix products alone"
_COLUMNS = [f"{n} rows, ms" for n in _ROWS]
_QWEN3 = "qwen3-0.6b"
_Decode = Callable[[Prompt], Iterator[tuple[int, ...]]]
_Engine = tuple[_Decode, Callable[[int, int], object]]
"""Decoding of a prompt, and a target forward of n tokens after a context."""


@click.command()
@click.option(
    "--size",
    type=click.Choice([_QWEN3, "qwen3.5-0.8b", "qwen3.5-tiny"]),
    default=_QWEN3,
    show_default=True,
    help="Geometry: that of the model, or a tiny one, to try the benchmark.",
)
@click.option("--context", default=256, show_default=True, help="Prompt tokens.")
@click.option("--tokens", default=32, show_default=True, help="Tokens decoded per round.")
@click.option("--rounds", default=3, show_default=True, help="The best of so many rounds counts.")
@click.option("--quantised", is_flag=True, help="Also with INT8 and INT4 weights.")
def main(size: str, context: int, tokens: int, rounds: int, quantised: bool) -> None:
    """Print tokens per second of all sides, their ratios, and step times."""
    torch.manual_seed(0)
    configs = {_FLOAT32: EngineConfig(), **(_QUANTISED if quantised else {})}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        root = Path(folder)
        model = _small_model(size).bfloat16()  # the dtype that can be quantised
        model.save_pretrained(root)
        model = model.float()
        engines = _engines(root, configs)
        ids = torch.randint(1000, model.config.get_text_config().vocab_size // 2, (context,))
        theirs, speed = 0.0, dict.fromkeys(engines, 0.0)
        products = _products(root)
        steps = {name: [float("inf")] * len(_ROWS) for name in (*engines, _PRODUCTS)}
        for _ in range(rounds):
            found, expected = _transformers(model, ids, tokens)
            theirs = max(theirs, found)
            for name, (decode, step) in engines.items():
                found, decoded = _decoded(decode, ids, tokens)
                if name == _FLOAT32 and decoded != expected:
                    raise CheckFailedError("the two sides emitted different tokens")
                speed[name] = max(speed[name], found)
                _shorten(steps[name], partial(step, context), rounds)
            _shorten(steps[_PRODUCTS], products, rounds)
    table = Table(f"{size}, batch 1, context {context}", "tok/s", "ratio", *_COLUMNS)
    table.add_row("transformers float32", f"{theirs:.2f}", "1.00")
    for name, times in steps.items():
        rate = [f"{speed[name]:.2f}", f"{speed[name] / theirs:.2f}"] if name in speed else ["", ""]
        table.add_row(name, *rate, *(f"{ms:.1f}" for ms in times))
    Console().print(table)


def _engines(root: Path, configs: Mapping[str, EngineConfig]) -> dict[str, _Engine]:
    spec, engines = read_target(root), dict[str, _Engine]()
    for name, config in configs.items():
        target = spec
        if config.weights is not None:
            file, head = root / f"{len(engines)}.safetensors", config.quantise_head
            target = quantise_target(spec, config.weights, file, head=head)
        engines[name] = _engine(root, target, config)
    return engines


def _small_model(size: str) -> PreTrainedModel:
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


def _engine(folder: Path, spec: TargetCheckpoint, engine: EngineConfig) -> _Engine:
    """Return autoregressive decoding, and one target forward of n tokens after a context."""
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
    """Return a function that runs every matrix product of decoder and head over n rows."""
    spec = read_target(folder)
    b = GraphBuilder("products", "float32", lambda ref: ref.file.name)
    widths = sorted({ref.shape[1] for ref in spec.tensors.values() if len(ref.shape) == 2})
    inputs = {width: b.input(f"x{width}", b.dtype, ("rows", width)) for width in widths}
    for i, group in enumerate(product_groups(spec)):
        refs = [spec.tensors[f"{name}.weight"] for name in group]
        b.output(
            b.linear(inputs[refs[0].shape[1]], refs, name=f"y{i}"),
            f"y{i}",
            ("rows", sum(r.shape[0] for r in refs)),
        )
    (folder / "products.onnx").write_bytes(b.build().SerializeToString())
    session = open_session("onnxruntime", folder / "products.onnx", folder)
    return lambda rows: session.run({f"x{width}": torch.randn(rows, width) for width in widths})


def product_groups(spec: TargetCheckpoint) -> list[list[str]]:
    """Return names of the weights that are multiplied at once."""
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
    """A streamer of ``generate`` that records token times; its first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: there is nothing to flush."""


def _transformers(model: Any, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    """Return tokens per second after the first token, and the tokens."""
    streamer, count = _TokenTimes(), tokens + 1
    out = model.generate(
        ids[None], max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=streamer
    )
    _, first, *_, last = streamer.times
    return tokens / (last - first), out[0, len(ids) :].tolist()


def _decoded(decode: _Decode, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    """Return tokens per second after the first token, and the tokens, without speculation."""
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


def _shorten(best: list[float], run: Callable[[int], object], times: int) -> None:
    """Keep in ``best`` the shortest milliseconds of runs with each of ``_ROWS``."""
    for place, rows in enumerate(_ROWS):
        for _ in range(times):
            start = time.perf_counter()
            run(rows)
            best[place] = min(best[place], 1000 * (time.perf_counter() - start))


if __name__ == "__main__":
    run_command(main)
