"""MTP heads: the graphs against the formula, and both against transformers' layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafts.mtp.head import add_head, change_config, hf_head, read_head, save_tensors
from tests.families.qwen3_next.random_pair import save_qwen3_next
from tests.hybrid import ROPE, save_qwen3_5_moe_text, save_qwen3_5_text
from tests.quantised import fp8_block
from tests.reference.checkpoint import file_name
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, all_rows, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.drafts.mtp.manifest import MtpManifest
from trt_eagle3.drafts.mtp.reference import MtpReference
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.metrics import relative_error

PAGE_SIZE, ROWS = 4, 11
SESSIONS = {"onnxruntime": OnnxRuntimeSession, "torch": TorchSession}
WHOLE_ROPE = ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
TARGETS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (save_qwen3_5_text, {}),
    "tied head, biases, whole rope": (
        save_qwen3_5_text,
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": WHOLE_ROPE},
    ),
    "mixture of experts": (save_qwen3_5_moe_text, {}),
    "Qwen3-Next": (save_qwen3_next, {"num_hidden_layers": 4}),
}


def checkpoint(name: str, folder: Path) -> Path:
    save, changes = TARGETS[name]
    save(folder, **changes)
    return add_head(folder)


def inputs(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, hidden states, and positions of a picture between texts."""
    generator = torch.Generator().manual_seed(2)
    embeds, hidden = torch.randn(2, ROWS, width, generator=generator)
    positions = torch.arange(ROWS).expand(3, -1).clone()
    positions[:, 3:7] = torch.tensor([[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]])
    positions[:, 7:] -= 2
    return embeds, hidden, positions


class Engine:
    """The graphs of a head in a session."""

    def __init__(self, manifest: MtpManifest, folder: Path, backend: str) -> None:
        graphs = kind_of(manifest).graphs(manifest, "float32", PAGE_SIZE, file_name)
        sessions = []
        for name in ("fuse", "draft"):
            file = folder / f"{name}.onnx"
            file.write_bytes(graphs[name].SerializeToString())
            sessions.append(SESSIONS[backend](file, folder))
        fuse, draft = sessions
        table = EmbeddingTable(
            read_target(folder).tensors["embed_tokens.weight"], torch.float32, "cpu"
        )
        states = layer_states(draft.states, 20 * PAGE_SIZE)
        self.runner = DraftRunner(fuse, draft, states, table, None)
        self._pages = PageTable(PagePool(20, PAGE_SIZE))
        self._pages.reserve(4 * ROWS)

    def run(
        self, embeds: Tensor, features: Tensor, positions: Tensor, past: int = 0
    ) -> tuple[Tensor, Tensor]:
        """A run of rows behind ``past`` others."""
        count = len(embeds)
        pages = self._pages.pages(past + count)
        metadata = AttentionMetadata.single(past, pages, causal_mask(count), positions.int())
        (logits,), (out,) = self.runner.forward(
            embeds[None], features[None], metadata, all_rows(1, count)
        )
        return logits, out


@pytest.mark.parametrize("backend", SESSIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_graphs_and_formula_equal_transformers_layers(
    name: str, backend: str, tmp_path: Path
) -> None:
    manifest = read_head(checkpoint(name, tmp_path))
    embeds, hidden, positions = inputs(manifest.hidden_size)
    expected, following = hf_head(tmp_path, embeds, hidden, positions)
    reference = MtpReference.load(manifest, torch.float32)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    found = reference.run(embeds, reference.fuse(hidden), positions, mask)
    assert relative_error(found.logits, expected) < FLOAT32_TOLERANCE
    assert relative_error(found.features, reference.fuse(following)) < FLOAT32_TOLERANCE
    engine = Engine(manifest, tmp_path, backend)
    logits, out = engine.run(embeds, engine.runner.fuse(hidden), positions)
    assert relative_error(logits, expected) < FLOAT32_TOLERANCE
    assert relative_error(out, reference.fuse(following)) < FLOAT32_TOLERANCE


def test_a_chain_of_steps_equals_the_formula(tmp_path: Path) -> None:
    """Each on the features of the one before, over the keys and values of all."""
    manifest = read_head(checkpoint("dense", tmp_path))
    embeds, hidden, positions = inputs(manifest.hidden_size)
    reference = MtpReference.load(manifest)
    engine = Engine(manifest, tmp_path, "onnxruntime")
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    rows = reference.run(embeds, reference.fuse(hidden), positions, mask)
    memory, fed = list(rows.memory), rows.features[-1:]
    _, out = engine.run(embeds, engine.runner.fuse(hidden), positions)
    ours = out[-1:]
    for step in range(3):
        count = ROWS + step
        token, at = embeds[step : step + 1], torch.full((3, 1), count - 2)
        whole = torch.ones(1, count + 1, dtype=torch.bool)
        rows = reference.run(token, fed, at, whole, memory)
        memory = [
            (torch.cat([k, a]), torch.cat([v, b]))
            for (k, v), (a, b) in zip(memory, rows.memory, strict=True)
        ]
        logits, ours = engine.run(token, ours, at, past=count)
        assert relative_error(logits, rows.logits) < FLOAT32_TOLERANCE, step
        fed = rows.features


def quantise(folder: Path, *, fc: bool) -> None:
    """FP8 by blocks: the head's layer, and ``fc`` or not, which nobody excludes either way."""
    tensors = load_file(folder / "model.safetensors")
    stems = ("self_attn.", "mlp.", "mtp.fc") if fc else ("self_attn.", "mlp.")
    for name in [n for n in tensors if "proj.weight" in n or n == "mtp.fc.weight"]:
        if any(stem in name for stem in stems):
            module, weight = name.removesuffix(".weight"), tensors.pop(name)
            tensors |= {f"{module}.{part}": t for part, t in fp8_block(weight).items()}
    for layer in ("model.layers.2", "mtp.layers.0"):
        tensors[f"{layer}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_tensors(folder, tensors)
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config=block | {"activation_scheme": "dynamic"})


@pytest.mark.parametrize("fc", [False, True])
def test_quantised_head_equals_the_formula_over_its_values(fc: bool, tmp_path: Path) -> None:
    folder = checkpoint("dense", tmp_path)
    quantise(folder, fc=fc)
    target, manifest = read_target(folder), read_head(folder)
    assert set(target.kv_scales) == {2}, "the head's keys are no FP8"
    assert isinstance(manifest.tensors["layers.0.self_attn.q_proj.weight"], QuantisedRef)
    assert isinstance(manifest.tensors["fc.weight"], QuantisedRef) is fc
    embeds, hidden, positions = inputs(manifest.hidden_size)
    reference = MtpReference.load(manifest, torch.float32)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    expected = reference.run(embeds, reference.fuse(hidden), positions, mask)
    engine = Engine(manifest, folder, "torch")
    logits, out = engine.run(embeds, engine.runner.fuse(hidden), positions)
    assert relative_error(logits, expected.logits) < FLOAT32_TOLERANCE
    assert relative_error(out, expected.features) < FLOAT32_TOLERANCE


def test_quantised_head_that_is_broken_or_absent_is_told_to_its_users_alone(tmp_path: Path) -> None:
    folder = checkpoint("dense", tmp_path)
    quantise(folder, fc=True)
    whole = read_target(folder)
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, {n: t for n, t in tensors.items() if n != "mtp.fc.weight_scale_inv"})
    assert read_target(folder).tensors.keys() == whole.tensors.keys()
    with pytest.raises(UserError, match=r"mtp\.fc\.weight_scale_inv is missing"):
        read_head(folder)
    save_tensors(folder, {n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    bare = read_target(folder)
    assert bare.tensors.keys() == whole.tensors.keys()
    assert bare.quantisation is not None
    assert whole.quantisation is not None
    assert bare.quantisation.as_dict() == whole.quantisation.as_dict()


DEVIATIONS: dict[str, dict[str, Any]] = {
    "halves exchanged": {"concat": "hidden_first"},
    "norm without the one": {"norm_offset": 0.0},
    "fed back before the norm": {"feedback": "pre_norm"},
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_wrong_field_is_seen(name: str, tmp_path: Path) -> None:
    folder = checkpoint("dense", tmp_path)
    embeds, hidden, positions = inputs(24)
    expected, following = hf_head(folder, embeds, hidden, positions)
    following = MtpReference.load(read_head(folder), torch.float32).fuse(following)
    engine = Engine(read_head(folder, **DEVIATIONS[name]), folder, "onnxruntime")
    logits, out = engine.run(embeds, engine.runner.fuse(hidden), positions)
    worst = max(relative_error(logits, expected), relative_error(out, following))
    assert worst > FAULT_FLOOR * FLOAT32_TOLERANCE
