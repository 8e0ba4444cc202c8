"""Random Qwen3-VL targets: a checkpoint on disk, its spec, and transformers as what it must
compute.

Shapes: S rows, H hidden, V vocab, L deepstack levels, N visual rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.reference.checkpoint import random_tensor, write_tensors
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import TargetLayer, add_visual_level
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, NormSpec, RopeSpec, VisionSpec

TEXT = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "hidden_act": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class TargetStates:
    """What transformers computes: logits [S, V], and per layer the output [S, H] before and
    after its deepstack.
    """

    logits: Tensor
    before_deepstack: list[Tensor]
    after_deepstack: list[Tensor]

    def aux(self, layers: tuple[int, ...], before: bool) -> Tensor:
        """[S, k * H] of ``layers``."""
        states = self.before_deepstack if before else self.after_deepstack
        return torch.cat([states[k] for k in layers], dim=-1)


@dataclass(frozen=True)
class Target:
    """A checkpoint: its spec, and the model that transformers makes of its values in float32."""

    model: Qwen3VLForConditionalGeneration
    spec: TargetCheckpoint

    @cached_property
    def reference(self) -> Qwen3VLReference:
        """The model as parity computes it, layer by layer."""
        return Qwen3VLReference(self.model.config, self.spec.tensors)

    @cached_property
    def _layers(self) -> list[TargetLayer]:
        """Loaded once: tests ask for the states of many sequences."""
        return list(self.reference.layers())

    def states(
        self, embeds: Tensor, positions: Tensor, visual_rows: Tensor, visual_levels: Tensor
    ) -> TargetStates:
        """Run ``embeds [S, H]`` at ``positions [3, S]`` with ``deepstack [L, N, H]`` on
        ``visual_rows [S]``.
        """
        reference, hidden = self.reference, embeds
        rope = reference.rope(positions)
        before: list[Tensor] = []
        after: list[Tensor] = []
        for layer in self._layers:
            before.append(layer(hidden, rope))
            hidden = add_visual_level(before[-1], visual_levels, layer.index, visual_rows)
            after.append(hidden)
        return TargetStates(reference.head(reference.norm(hidden)), before, after)


def random_target(
    directory: Path,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    sections: tuple[int, int, int] = (2, 1, 1),
    stored: torch.dtype = torch.float32,
    seed: int = 0,
) -> Target:
    """A checkpoint in ``directory`` that differs from ``TEXT`` and ``VISION`` as said;
    ``stored``: type on disk.
    """
    text, vision = {**TEXT, **(text or {})}, {**VISION, **(vision or {})}
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": list(sections),
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    model = Qwen3VLForConditionalGeneration(config).eval().float()
    tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert tied == text["tie_word_embeddings"]
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, parameter in model.named_parameters():
        value = random_tensor(name, tuple(parameter.shape), generator).to(stored)
        values[name.replace("model.language_model.", "").replace("model.visual.", "visual.")] = (
            value
        )
        parameter.data.copy_(value)
    tensors = write_tensors(directory / "target.safetensors", values)
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return Target(model, _spec(directory, text, vision, sections, tensors))


def _spec(
    directory: Path,
    text: dict[str, Any],
    vision: dict[str, Any],
    sections: tuple[int, int, int],
    tensors: Any,
) -> TargetCheckpoint:
    norm, bias = NormSpec(text["rms_norm_eps"]), text["attention_bias"]
    attention = AttentionSpec(
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rope=RopeSpec.plain(text["head_dim"], 5e6, "interleaved", sections),
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )
    levels = vision["deepstack_visual_indexes"]
    layers = tuple(
        LayerSpec(
            attention, DenseMlp(text["intermediate_size"]), norm, i if i < len(levels) else None
        )
        for i in range(text["num_hidden_layers"])
    )
    return TargetCheckpoint(
        family="qwen3_vl",
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        max_position_embeddings=text["max_position_embeddings"],
        layers=layers,
        norm=norm,
        tied_head=text["tie_word_embeddings"],
        eos_token_ids=(0,),
        vision=VisionSpec(
            **{name: value for name, value in vision.items() if name != "deepstack_visual_indexes"},
            out_hidden_size=text["hidden_size"],
            level_blocks=tuple(levels),
            image_token_id=5,
            video_token_id=6,
            vision_start_token_id=7,
            vision_end_token_id=8,
        ),
        path=directory,
        tensors=tensors,
    )
