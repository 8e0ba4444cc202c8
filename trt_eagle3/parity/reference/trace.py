"""The tensors of a transformers decoder layer, by their names in the target graph.

Shapes: S rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerTrace"]

ApplyRope = Callable[..., tuple[Tensor, Tensor]]

_SHARED_INNER, _SHARED = (f"shared_expert.mlp.{name}" for name in ("inner", "output"))
_SHARED_GATE = "shared_expert.gate_logit"
_OF_MLP = ("router_logits", "inner", _SHARED_INNER, _SHARED, _SHARED_GATE, "output")


class LayerTrace:
    """Records the tensors of one call of a layer: enter it before the call, read it after."""

    def __init__(self, layer: Any, index: int, apply_rope: ApplyRope) -> None:
        self._layer, self._prefix, self._apply_rope = layer, f"layers.{index}.", apply_rope
        self._raw: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerTrace:
        layer, raw = self._layer, self._raw
        linear = hasattr(layer, "linear_attn")
        self._hooks = [
            _keep(layer.input_layernorm, raw, "input_layernorm"),
            *(_delta_hooks(layer.linear_attn, raw) if linear else _hooks(layer.self_attn, raw)),
            _keep(layer.post_attention_layernorm, raw, "attention_residual", of_input=True),
            _keep(layer.post_attention_layernorm, raw, "post_attention_layernorm"),
            *_mlp_hooks(layer.mlp, raw),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def tensors(self, rope: tuple[Tensor, Tensor], output: Tensor) -> dict[str, Tensor]:
        """Return [S, ...] of each tensor in computation order; ``output``: the layer's."""
        raw = self._raw
        norms = ("attention_residual", "post_attention_layernorm")
        found = {"input_layernorm": raw["input_layernorm"]}
        if hasattr(self._layer, "linear_attn"):
            found |= {f"linear_attn.{name}": x for name, x in _delta_tensors(raw).items()}
        else:
            attended = self._attention_tensors(raw, rope)
            found |= {f"self_attn.{name}": x for name, x in attended.items()}
        found |= {name: raw[name] for name in norms}
        if "gate" in raw:
            found["mlp.gate_up"] = torch.cat([raw["gate"], raw["up"]], dim=-1)
        found |= {f"mlp.{name}": raw[name] for name in _OF_MLP if name in raw}
        found["output"] = output
        return {self._prefix + name: x for name, x in found.items()}

    def _attention_tensors(
        self, raw: Mapping[str, Tensor], rope: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        dim = self._layer.self_attn.head_dim
        heads = [raw.get(f"{p}_norm", raw[p].unflatten(-1, (-1, dim))) for p in "qk"]
        turned = self._apply_rope(*(x[None].transpose(1, 2) for x in heads), *rope)
        q, k = (x[0].transpose(0, 1).flatten(1) for x in turned)
        found = {"qkv": torch.cat([raw["q"], raw["k"], raw["v"]], dim=-1), "q": q, "k": k}
        gated = raw["q"].shape[-1] > q.shape[-1]  # the input of o_proj is already gated
        joined = {"gated" if gated else "out": raw["mixed"], "output": raw["mixer"]}
        return {**found, "v": raw["v"], **joined}


def _hooks(attention: Any, raw: dict[str, Tensor]) -> list[Any]:
    return [
        *(_keep(getattr(attention, f"{p}_proj"), raw, p) for p in "qkv"),
        *(_keep(getattr(attention, n), raw, n) for n in _head_norms(attention)),
        _keep(attention.o_proj, raw, "mixed", of_input=True),
        _keep(attention.o_proj, raw, "mixer"),
    ]


def _head_norms(attention: Any) -> list[str]:
    """Return the names of the norms of q and k that the attention has."""
    return [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def _delta_hooks(mixer: Any, raw: dict[str, Tensor]) -> list[Any]:
    return [
        *(_keep(getattr(mixer, f"in_proj_{p}"), raw, p) for p in ("qkv", "z", "b", "a")),
        _keep(mixer.out_proj, raw, "mixed", of_input=True),
        _keep(mixer.out_proj, raw, "mixer"),
    ]


def _delta_tensors(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        "qkvz": torch.cat([raw["qkv"], raw["z"]], dim=-1),
        "ba": torch.cat([raw["b"], raw["a"]], dim=-1),
        "out": raw["mixed"],
        "output": raw["mixer"],
    }


def _mlp_hooks(mlp: Any, raw: dict[str, Tensor]) -> list[Any]:
    """Hook a dense MLP, or a mixture of experts, whose router returns logits [S, E] first."""
    if hasattr(mlp, "experts"):
        hooks = [_keep_router(mlp.gate, raw), _keep(mlp, raw, "output")]
        return hooks + _shared_hooks(mlp, raw)
    return [
        *(_keep(getattr(mlp, f"{p}_proj"), raw, p) for p in ("gate", "up")),
        _keep(mlp.down_proj, raw, "inner", of_input=True),
        _keep(mlp.down_proj, raw, "output"),
    ]


def _shared_hooks(mlp: Any, raw: dict[str, Tensor]) -> list[Any]:
    """Hook the shared expert, if there is one; its rows have no batch axis."""
    if not hasattr(mlp, "shared_expert"):
        return []
    shared, gate = mlp.shared_expert, mlp.shared_expert_gate
    return [
        _keep(shared.down_proj, raw, _SHARED_INNER, of_input=True, by_sequence=False),
        _keep(shared, raw, _SHARED, by_sequence=False),
        _keep(gate, raw, _SHARED_GATE, by_sequence=False),
    ]


def _keep_router(router: nn.Module, into: dict[str, Tensor]) -> Any:
    def keep(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        into["router_logits"] = output[0]

    return router.register_forward_hook(keep)


def _keep(
    module: nn.Module,
    into: dict[str, Tensor],
    name: str,
    *,
    of_input: bool = False,
    by_sequence: bool = True,
) -> Any:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found = inputs[0] if of_input else output
        into[name] = found[0] if by_sequence else found

    return module.register_forward_hook(keep)
