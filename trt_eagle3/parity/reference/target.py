"""The target as ``transformers`` computes it, with weights streamed from the checkpoint by layer.

The modules are transformers' own, of the target's family. Only the loop that calls them is ours, so
that one layer at a time is in memory. Shapes: S rows of a sequence, H hidden, V vocab, N visual
rows, L visual levels, n patches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trt_eagle3.checkpoint.experts import ExpertsRef
from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.families.registry import family_of
from trt_eagle3.parity.ops import full_float32, rms_norm
from trt_eagle3.parity.reference.dequantise import read_values
from trt_eagle3.parity.reference.fp8_kv import RoundedKV
from trt_eagle3.parity.reference.rounded_activations import round_inputs
from trt_eagle3.parity.reference.routing import RouterChoice, Routes, routed
from trt_eagle3.parity.reference.trace import LayerTrace

__all__ = [
    "DecoderModules",
    "Rope",
    "TargetLayer",
    "TargetReference",
    "VisionStates",
    "add_visual_level",
    "load_reference",
    "stored_tensor",
]

Rope = tuple[Tensor, Tensor]
"""cos and sin [1, S, D]."""

_HEAD_ROWS = 16384  # rows of the head per slice: 16384 x 4096 in float32 are 268 MB


@dataclass(frozen=True)
class DecoderModules:
    """transformers' classes of a family's decoder.

    Attributes:
        layer: called with config and index.
        norm: called with width and ``eps``.
        rope: called with the config; returns cos and sin of positions.
        apply_rope: rotates q and k.
        axes: whether ``rope`` takes 3 position axes; else it takes positions without axes.
        norm_offset: added to the stored weights of ``norm``.
    """

    layer: Callable[[Any, int], nn.Module]
    norm: Any
    rope: Callable[[Any], nn.Module]
    apply_rope: Callable[..., tuple[Tensor, Tensor]]
    axes: bool
    norm_offset: float = 0.0


@dataclass(frozen=True)
class VisionStates:
    """Outputs of the vision tower.

    visual_embeds [N, H], deepstack [L, N, H], and tensors [n, ...] by graph name.
    """

    visual_embeds: Tensor
    visual_levels: Tensor
    intermediates: Mapping[str, Tensor]


class TargetReference(ABC):
    """A checkpoint's target; subclasses of a family supply the modules and the vision tower.

    Args:
        config: of the decoder.
        tensors: canonical name -> place (``TargetCheckpoint``).

    Attributes:
        kv_scales: of the layers whose keys and values are rounded to FP8; empty by default.
        activations: rounding of the inputs of quantised weights; none by default.
    """

    def __init__(
        self,
        config: Any,
        modules: DecoderModules,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.kv_scales: Mapping[int, KVScales] = {}
        self.activations = "compute"
        config._attn_implementation = "sdpa"
        config._experts_implementation = "eager"
        self._decoder, self._modules, self._tensors = config, modules, tensors
        self._rotary = modules.rope(config).to(self.device)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self._decoder.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self._decoder.hidden_size)

    @property
    @abstractmethod
    def num_visual_levels(self) -> int:
        """Number of visual levels, which the first decoder layers receive."""

    def rope_index(
        self, token_ids: Tensor, _grid_thw: Tensor, _grid_seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Return transformers' positions [3, S] and rope_delta of a prompt.

        Here 0, 1, 2, ... on each axis. Families whose positions depend on the grids override it.
        The grids are in prompt order. ``grid_seconds``: as in ``ModelInputs``.
        """
        return torch.arange(len(token_ids)).repeat(3, 1), 0

    @abstractmethod
    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = (), /
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``.

        ``intermediates``: names of tensors in the vision graph.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings [S, H]; only these rows of the table are read."""
        return self._table[token_ids.cpu()].to(self.device, self.dtype)

    @cached_property
    def _table(self) -> Tensor:
        """The memory-mapped token table [V, H]; cached, since it is read often."""
        with stored_tensor(self._tensors["embed_tokens.weight"]) as (file, name):
            table: Tensor = file.get_tensor(name)
            return table

    def rope(self, positions: Tensor) -> Rope:
        """cos and sin of rows at ``positions [3, S]``."""
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        rows = positions[:, None] if self._modules.axes else positions[:1]
        cos, sin = self._rotary(x, rows.to(self.device))
        return cos, sin

    def layers(self, indices: Sequence[int] | None = None) -> Iterator[TargetLayer]:
        """Yield the decoder layers; each is loaded on use and released before the next."""
        for k in range(self.num_layers) if indices is None else indices:
            with torch.device("meta"):
                module = self._modules.layer(self._decoder, k)
            self.fill(module, f"layers.{k}.")
            round_inputs(module, f"layers.{k}.", self._tensors, self.activations)
            rounding = RoundedKV(self.kv_scales[k]) if k in self.kv_scales else None
            yield TargetLayer(k, module.eval(), self._modules, rounding)
            del module

    @torch.no_grad()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [S, H]."""
        with torch.device("meta"):
            module = self._modules.norm(self.hidden_size, eps=self._decoder.rms_norm_eps)
        self.fill(module, "norm.")
        found: Tensor = module(hidden)
        return found

    @torch.no_grad()
    @full_float32()
    def head(self, normed: Tensor) -> Tensor:
        """Logits [R, V] on the CPU of normed rows [R, H]; the head is loaded in slices."""
        ref, parts = self._tensors["lm_head.weight"], []
        if isinstance(ref, QuantisedRef):
            return (normed @ self._tensor(ref).T).cpu()
        with stored_tensor(ref) as (file, name):
            rows = file.get_slice(name)
            for start in range(0, rows.get_shape()[0], _HEAD_ROWS):
                weight = rows[start : start + _HEAD_ROWS].to(self.device, self.dtype)
                parts.append((normed @ weight.T).cpu())
        return torch.cat(parts, dim=1)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load the weights of a module on the meta device."""
        state = {}
        for name in module.state_dict():
            state[name] = self._tensor(self._tensors[prefix + name])
        module.load_state_dict(state, assign=True)
        if self.dtype == torch.float64:  # transformers' norms use float32 for any dtype
            for part in module.modules():
                if isinstance(part, self._modules.norm):
                    part.forward = _float64_norm(part, self._modules.norm_offset)

    def _tensor(self, ref: TensorRef) -> Tensor:
        """Load a weight into its own memory; dequantise it if it is quantised."""
        if isinstance(ref, QuantisedRef | ExpertsRef):
            return read_values(ref).to(self.device, self.dtype)
        with stored_tensor(ref) as (file, stored):
            tensor: Tensor = file.get_tensor(stored)
            return tensor.to(self.device, self.dtype, copy=True)


def load_reference(
    spec: TargetCheckpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_scales: Mapping[int, KVScales] | None = None,
) -> TargetReference:
    """Return the target of ``spec``; reads no weight yet. ``kv_scales``: layers with FP8 caches."""
    reference = family_of(spec).reference(spec, dtype, device)
    reference.kv_scales = kv_scales or {}
    return reference


class TargetLayer:
    """One loaded decoder layer."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        modules: DecoderModules,
        kv_rounding: RoundedKV | None = None,
    ) -> None:
        self.index = index
        self._kv_rounding = kv_rounding
        self._module: Any = module
        self._modules = modules

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(p.numel() * p.element_size() for p in self._module.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return its weights by canonical name."""
        prefix = f"layers.{self.index}."
        return {prefix + name: p.detach() for name, p in self._module.named_parameters()}

    @property
    def num_chosen(self) -> int:
        """Experts per row; 0 for a dense layer."""
        mlp = self._module.mlp
        return int(mlp.gate.top_k) if hasattr(mlp, "experts") else 0

    def routed(self, routes: Routes | None) -> AbstractContextManager[Sequence[RouterChoice]]:
        """``routing.routed`` for a mixture; a null context for a dense layer."""
        return routed(self._module.mlp, routes) if self.num_chosen else nullcontext(())

    @torch.no_grad()
    @full_float32()
    def __call__(self, hidden: Tensor, rope: Rope) -> Tensor:
        """Run rows [S, H] of a whole sequence; returns [S, H], before any visual level."""
        found: Tensor = self._module(
            hidden[None], position_embeddings=rope, past_key_values=self._kv_rounding
        )
        return found[0]

    def trace(self, hidden: Tensor, rope: Rope) -> dict[str, Tensor]:
        """Return the layer's tensors [S, ...] by name in the target graph, in computation order."""
        with LayerTrace(self._module, self.index, self._modules.apply_rope) as trace:
            output = self(hidden, rope)
        return trace.tensors(rope, output)


def add_visual_level(hidden: Tensor, levels: Tensor, layer: int, visual_rows: Tensor) -> Tensor:
    """Add the level of ``levels [L, N, H]`` to the visual rows of ``hidden [S, H]``.

    ``hidden`` is the output of decoder layer ``layer``.
    """
    if layer >= len(levels) or not visual_rows.any():
        return hidden
    hidden = hidden.clone()
    hidden[visual_rows] += levels[layer].to(hidden)
    return hidden


@contextmanager
def stored_tensor(ref: TensorRef) -> Iterator[tuple[Any, str]]:
    """Open the file of a tensor with safetensors' reader, mapped only while it is needed."""
    with safe_open(ref.file, framework="pt") as file:
        yield file, ref.name


def _float64_norm(module: Any, offset: float) -> Callable[[Tensor], Tensor]:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return lambda x: rms_norm(x, module.weight + offset, epsilon)
