"""The target as ``transformers`` computes it, its weights streamed layer by layer from the
checkpoint.

The modules are transformers' own; only what calls them one after the other is ours, so that one
layer at a time is in memory. Shapes: S rows of a sequence, H hidden, V vocab, N visual rows, L
deepstack levels, n patches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

from trt_eagle3.checkpoint.target_reader import read_target
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.parity.ops import full_float32, rms_norm

__all__ = ["Rope", "TargetLayer", "TargetReference", "VisionStates", "add_deepstack"]

Rope = tuple[Tensor, Tensor]
"""cos and sin [1, S, D]."""

_HEAD_ROWS = 16384  # of the head at once: 16384 x 4096 in float32 are 268 MB


@dataclass(frozen=True)
class VisionStates:
    """What the vision tower makes: visual_embeds [N, H], deepstack [L, N, H], and tensors [n,
    ...] by graph name.
    """

    visual_embeds: Tensor
    deepstack: Tensor
    intermediates: Mapping[str, Tensor]


class TargetReference:
    """A checkpoint's target. ``tensors``: canonical name -> place (``TargetSpec.tensors``)."""

    def __init__(
        self,
        config: Qwen3VLConfig,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        for part in (config.text_config, config.vision_config):
            part._attn_implementation = "sdpa"
        self._tensors = tensors
        self._rotary = hf.Qwen3VLTextRotaryEmbedding(config.text_config).to(self.device)

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TargetReference:
        """The target at ``checkpoint``; no weight is read yet."""
        return cls(
            Qwen3VLConfig.from_pretrained(checkpoint),
            read_target(checkpoint).tensors,
            dtype,
            device,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.text_config.num_hidden_layers)

    @property
    def num_deepstack(self) -> int:
        """Deepstack levels, which the first decoder layers receive."""
        return len(self.config.vision_config.deepstack_visual_indexes)

    def rope_index(self, token_ids: Tensor, grid_thw: Tensor) -> tuple[Tensor, int]:
        """transformers' positions [3, S] and rope_delta of a prompt whose grids stand in prompt
        order.
        """
        with torch.device("meta"):
            model = hf.Qwen3VLModel(self.config)
        kinds = (token_ids == self.config.image_token_id).int() + 2 * (
            token_ids == self.config.video_token_id
        ).int()
        images, videos = _split_grids(kinds, grid_thw, self.config.vision_config.spatial_merge_size)
        positions, delta = model.get_rope_index(
            token_ids[None], kinds[None], image_grid_thw=images, video_grid_thw=videos
        )
        return positions[:, 0], int(delta[0])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings [S, H]; of the table only the rows asked for are read."""
        wanted, places = token_ids.cpu().unique(return_inverse=True)
        runs = wanted.tensor_split((wanted.diff() != 1).nonzero().flatten() + 1)
        table = self._table
        rows = torch.cat(
            [table[int(run[0]) : int(run[-1]) + 1] if len(run) else table[:0] for run in runs]
        )
        return rows[places].to(self.device, self.dtype)

    @cached_property
    def _table(self) -> Any:
        """The token table on disk, mapped; asked for too often to be opened each time."""
        ref = self._tensors["embed_tokens.weight"]
        file: Any = safe_open(ref.file, framework="pt")
        return file.__enter__().get_slice(ref.name)

    def rope(self, positions: Tensor) -> Rope:
        """cos and sin of rows at ``positions [3, S]``."""
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._rotary(x, positions[:, None].to(self.device))
        return cos, sin

    def layers(self, indices: Sequence[int] | None = None) -> Iterator[TargetLayer]:
        """The decoder layers, each loaded when it is asked for and let go before the next."""
        for k in range(self.num_layers) if indices is None else indices:
            with torch.device("meta"):
                module = hf.Qwen3VLTextDecoderLayer(self.config.text_config, k)
            self._fill(module, f"layers.{k}.")
            yield TargetLayer(k, module.eval(), self.config.text_config.head_dim)
            del module

    @torch.no_grad()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [S, H]."""
        with torch.device("meta"):
            module = hf.Qwen3VLTextRMSNorm(
                self.config.text_config.hidden_size, eps=self.config.text_config.rms_norm_eps
            )
        self._fill(module, "norm.")
        found: Tensor = module(hidden)
        return found

    @torch.no_grad()
    @full_float32()
    def head(self, normed: Tensor) -> Tensor:
        """Logits [R, V] on the CPU of normed rows [R, H]; the head passes by in slices."""
        parts = []
        with _opened(self._tensors["lm_head.weight"]) as (file, name):
            rows = file.get_slice(name)
            for start in range(0, rows.get_shape()[0], _HEAD_ROWS):
                weight = rows[start : start + _HEAD_ROWS].to(self.device, self.dtype)
                parts.append((normed @ weight.T).cpu())
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    @full_float32()
    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = ()
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``; ``intermediates`` are names of the
        vision graph.
        """
        with torch.device("meta"):
            tower = hf.Qwen3VLVisionModel(self.config.vision_config).eval()
        tower.rotary_pos_emb = self._vision_rotary
        for name, module in tower.named_modules():
            if _is_streamed(name):
                self._stream(module, f"visual.{name}.")
        found: dict[str, Tensor] = {}
        for intermediate in intermediates:
            _tap_vision(tower, intermediate, found)
        out = tower(patches.to(self.device, self.dtype), grid_thw=grid_thw.to(self.device))
        levels = [level.cpu() for level in out.deepstack_features]
        embeds = out.pooler_output.cpu()
        return VisionStates(
            embeds, torch.stack(levels) if levels else embeds.new_zeros(0, *embeds.shape), found
        )

    @cached_property
    def _vision_rotary(self) -> nn.Module:
        """The tower's rotary embedding, whatever this transformers makes it of: that of a tower
        of one block.
        """
        config = copy.deepcopy(self.config.vision_config)
        config.depth, config.deepstack_visual_indexes = 1, []
        rotary: nn.Module = hf.Qwen3VLVisionModel(config).rotary_pos_emb.to(self.device)
        return rotary

    def _stream(self, module: nn.Module, prefix: str) -> None:
        """Load the module when it is called, and let its weights go afterwards."""

        def load(*_: Any) -> None:
            self._fill(module, prefix)

        def drop(*_: Any) -> None:
            module.to_empty(device="meta")

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        state = {}
        for name in module.state_dict():
            with _opened(self._tensors[prefix + name]) as (file, stored):
                state[name] = file.get_tensor(stored).to(self.device, self.dtype, copy=True)
        module.load_state_dict(state, assign=True)
        if self.dtype == torch.float64:  # transformers norms in float32, whatever the type
            for part in module.modules():
                if isinstance(part, hf.Qwen3VLTextRMSNorm):
                    part.forward = _float64_norm(part)


class TargetLayer:
    """One decoder layer, loaded."""

    def __init__(self, index: int, module: nn.Module, head_dim: int) -> None:
        self.index = index
        self._module: Any = module
        self._head_dim = head_dim

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(p.numel() * p.element_size() for p in self._module.parameters())

    @torch.no_grad()
    @full_float32()
    def __call__(self, hidden: Tensor, rope: Rope) -> Tensor:
        """Output [S, H], before any deepstack level, of a whole sequence's rows [S, H]."""
        found: Tensor = self._module(hidden[None], position_embeddings=rope)
        return found[0]

    def trace(self, hidden: Tensor, rope: Rope) -> dict[str, Tensor]:
        """The layer's tensors [S, ...] by their name in the target graph, in the order in which
        they are computed.
        """
        found: dict[str, Tensor] = {}
        layer, prefix = self._module, f"layers.{self.index}."
        raw: dict[str, Tensor] = {}
        hooks = [
            _keep(layer.input_layernorm, found, f"{prefix}input_layernorm"),
            *(_keep(getattr(layer.self_attn, f"{p}_proj"), raw, p) for p in "qkv"),
            *(_keep(getattr(layer.self_attn, f"{p}_norm"), raw, f"{p}_norm") for p in "qk"),
            _keep(layer.self_attn.o_proj, raw, "out", of_input=True),
            _keep(layer.self_attn.o_proj, raw, "attended"),
            _keep(layer.post_attention_layernorm, raw, "residual", of_input=True),
            _keep(layer.post_attention_layernorm, raw, "post"),
            *(_keep(getattr(layer.mlp, f"{p}_proj"), raw, p) for p in ("gate", "up")),
            _keep(layer.mlp.down_proj, raw, "inner", of_input=True),
            _keep(layer.mlp.down_proj, raw, "mlp"),
        ]
        output = self(hidden, rope)
        for hook in hooks:
            hook.remove()
        q, k = hf.apply_rotary_pos_emb(
            raw["q_norm"][None].transpose(1, 2), raw["k_norm"][None].transpose(1, 2), *rope
        )
        attn = f"{prefix}self_attn."
        found[f"{attn}qkv"] = torch.cat([raw["q"], raw["k"], raw["v"]], dim=-1)
        found[f"{attn}q"], found[f"{attn}k"] = (y[0].transpose(0, 1).flatten(1) for y in (q, k))
        found |= {f"{attn}v": raw["v"], f"{attn}out": raw["out"], f"{attn}output": raw["attended"]}
        found |= {
            f"{prefix}attention_residual": raw["residual"],
            f"{prefix}post_attention_layernorm": raw["post"],
        }
        found[f"{prefix}mlp.gate_up"] = torch.cat([raw["gate"], raw["up"]], dim=-1)
        found |= {
            f"{prefix}mlp.inner": raw["inner"],
            f"{prefix}mlp.output": raw["mlp"],
            f"{prefix}output": output,
        }
        return found


def add_deepstack(hidden: Tensor, levels: Tensor, layer: int, visual_rows: Tensor) -> Tensor:
    """``hidden [S, H]`` after decoder layer ``layer``, with its level of ``levels [L, N, H]`` on
    the visual rows.
    """
    if layer >= len(levels) or not visual_rows.any():
        return hidden
    hidden = hidden.clone()
    hidden[visual_rows] += levels[layer].to(hidden)
    return hidden


@contextmanager
def _opened(ref: TensorRef) -> Iterator[tuple[Any, str]]:
    """The file of a tensor, mapped by safetensors' own reader only while it is needed."""
    with safe_open(ref.file, framework="pt") as file:
        yield file, ref.name


def _keep(module: nn.Module, into: dict[str, Tensor], name: str, *, of_input: bool = False) -> Any:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        into[name] = (inputs[0] if of_input else output)[0]

    return module.register_forward_hook(keep)


def _float64_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: rms_norm(x, module.weight, module.variance_epsilon)


def _is_streamed(name: str) -> bool:
    """The parts of the tower that load and go one by one."""
    parts = name.split(".")
    lists = {"blocks", "deepstack_merger_list"}
    return name in {"patch_embed", "pos_embed", "merger"} or (len(parts) == 2 and parts[0] in lists)


def _tap_vision(tower: Any, name: str, found: dict[str, Tensor]) -> None:
    """Keep the tensor that the vision graph calls ``name`` (``blocks.3.attn.qkv``)."""
    owner, _, part = name.rpartition(".")
    block = (
        tower.get_submodule(owner.removesuffix(".attn").removesuffix(".mlp")) if owner else tower
    )
    places: dict[str, tuple[str, bool]] = {
        "embeddings": ("blocks.0", True),
        "patch_embed": ("patch_embed", False),
        "norm1": ("norm1", False),
        "qkv": ("attn.qkv", False),
        "attention_residual": ("norm2", True),
        "norm2": ("norm2", False),
        "fc1": ("mlp.linear_fc1", False),
        "fc2": ("mlp.linear_fc2", False),
        "output": ("attn.proj" if owner.endswith(".attn") else "", False),
    }
    place, of_input = places[part]
    module = block.get_submodule(place) if place else block

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[name] = (inputs[0] if of_input else output).cpu()

    module.register_forward_hook(keep)


def _split_grids(
    kinds: Tensor, grid_thw: Tensor, merge: int
) -> tuple[Tensor | None, Tensor | None]:
    """Grids in prompt order, as those of images and those of videos; their runs of pads say
    which is which.
    """
    visual = kinds[kinds > 0].tolist()
    images: list[list[int]] = []
    videos: list[list[int]] = []
    for grid in grid_thw.tolist():
        (images if visual[0] == 1 else videos).append(grid)
        visual = visual[grid[0] * grid[1] * grid[2] // merge**2 :]
    return torch.tensor(images) if images else None, torch.tensor(videos) if videos else None
