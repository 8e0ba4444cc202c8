"""Qwen3.5's decoder: layers of linear attention between layers of gated full attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trt_eagle3.checkpoint.config_value import config_value
from trt_eagle3.checkpoint.quantised.read import StoredWeights
from trt_eagle3.checkpoint.rope_schedule import RopeConfig, read_rope_config
from trt_eagle3.checkpoint.target import MtpHead
from trt_eagle3.errors import quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, NormSpec, RopeSpec

__all__ = ["MTP", "HybridConfig"]

MTP = "mtp."
"""Prefix of the tensors of the MTP head. Some uses of a checkpoint do not read it; transformers
skips it.
"""

_LINEAR, _FULL = "linear_attention", "full_attention"
_TENSORS = {_LINEAR: "linear_attn.", _FULL: "self_attn."}
_PART = "partial_rotary_factor"
_ROTARY = 0.25  # transformers' default of it


@dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """The decoder in a section of a config."""

    @property
    def head_dim(self) -> int:
        """Channels of a head; transformers' default is 256."""
        return self._whole("head_dim", 256)

    @property
    def norm(self) -> NormSpec:
        """The norm of all places except the linear attention's output.

        Its weights are stored minus one.
        """
        return replace(super().norm, weight_offset=1.0)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The mixer of each layer.

        Raises:
            UserError: their number differs from the layers', one is unknown, or none is full
                attention.
        """
        found = tuple(self.config.get(f"{self.section}layer_types", "texts", ()))
        if not found:
            every = self._whole("full_attention_interval", 4)
            found = tuple(_LINEAR if (k + 1) % every else _FULL for k in range(self.num_layers))
        where = f"{self.section}layer_types"
        if len(found) != self.num_layers:
            raise self.config.error(
                f"{where}: expected {self.num_layers} of them, got {len(found)}"
            )
        unknown = next((kind for kind in found if kind not in _TENSORS), None)
        if unknown is not None:
            known = " or ".join(_TENSORS)
            raise self.config.error(f"{where}: expected {known}, got {quote(unknown, 80)}")
        if _FULL not in found:
            raise self.config.error(f"{where}: expected a layer of {_FULL}, got none")
        return found

    def check(self) -> None:
        """Check that this program can compute the decoder."""
        super().check()
        key = f"{self.section}attn_output_gate"
        if not self.config.get(key, "flag", True):
            raise self.config.error(f"{key}: expected true, got false: not supported")

    def check_layer_types(self, names: Collection[str]) -> None:
        """Check that the tensors ``names`` match the kinds of layers in ``layer_types``."""
        kinds = self.layer_types
        for name in names:
            parts = name.split(".")
            if parts[0] != "layers" or not parts[1].isdigit() or int(parts[1]) >= len(kinds):
                continue
            kind = kinds[int(parts[1])]
            own = next((k for k, stem in _TENSORS.items() if parts[2] == stem[:-1]), kind)
            if own != kind:
                raise self.config.error(
                    f"{self.section}layer_types: layer {parts[1]} is {kind}, and the checkpoint "
                    f"has {name}. Correct the list, or use the checkpoint's own config.json."
                )

    def layers(self, rope: RopeSpec) -> tuple[LayerSpec, ...]:
        """Return the layers, of both kinds."""
        delta = self._delta()
        return tuple(
            replace(layer, mixer=delta if kind == _LINEAR else _gated(layer.mixer))
            for layer, kind in zip(super().layers(rope), self.layer_types, strict=True)
        )

    def rotary(self) -> tuple[RopeConfig, int]:
        """Return the unscaled rope, and the channels of a head that it rotates.

        Raises:
            UserError: theta is missing, a schedule is configured, or the part is not even.
        """
        section = self.config.get(self.section[:-1], "object") if self.section else None
        values = self.config.values if section is None else section
        rope = read_rope_config(self._without_default(values), self.config.file)
        where = f"{self.section}rope_parameters"
        if rope.base is None or rope.base <= 1:
            raise self.config.error(
                f"{where}.rope_theta: expected a number above 1, got {rope.base}"
            )
        if rope.kind() != "default":
            raise self.config.error(f"{where}: rope_type {quote(rope.kind())}: not supported")
        part = rope.values.get(_PART, _ROTARY)
        turned = 0 if part is None else self.head_dim * part
        if not 0 < turned <= self.head_dim or turned % 2:
            raise self.config.error(
                f"{where}.{_PART}: expected an even part of {self.head_dim} channels, got {part}"
            )
        return rope, int(turned)

    def mtp_head(self, layers: Sequence[LayerSpec], stored: StoredWeights) -> MtpHead | None:
        """Return the MTP head: a layer of full attention with an MLP like the target's.

        Args:
            stored: the tensors under ``MTP``. Without any there is no head.
        """
        if not stored.tensors:
            return None
        layer = next(x for x in reversed(layers) if isinstance(x.mixer, AttentionSpec))
        return MtpHead(layer, stored, self.config, self.section, self.fp8_block())

    def _without_default(self, section: Mapping[str, Any]) -> Mapping[str, Any]:
        """Remove the section's own ``partial_rotary_factor`` if ``rope_parameters`` has one.

        transformers uses the latter. Version 5.17 writes its default to the former.
        """
        told = config_value(section, f"rope_parameters.{_PART}", "any", self.config.file)
        return section if told is None else {k: v for k, v in section.items() if k != _PART}

    def _delta(self) -> GatedDeltaSpec:
        spec = GatedDeltaSpec(
            num_k_heads=self._whole("linear_num_key_heads", 16),
            num_v_heads=self._whole("linear_num_value_heads", 32),
            key_dim=self._whole("linear_key_head_dim", 128),
            value_dim=self._whole("linear_value_head_dim", 128),
            conv_width=self._whole("linear_conv_kernel_dim", 4),
            norm=NormSpec(super().norm.eps),
        )
        if spec.num_v_heads % spec.num_k_heads:
            raise self.config.error(
                f"{self.section}linear_num_value_heads: expected a multiple of "
                f"linear_num_key_heads {spec.num_k_heads}, got {spec.num_v_heads}"
            )
        if spec.conv_width < 2:
            raise self.config.error(
                f"{self.section}linear_conv_kernel_dim: expected 2 or more, got {spec.conv_width}"
            )
        return spec


def _gated(mixer: AttentionSpec | GatedDeltaSpec) -> AttentionSpec:
    assert isinstance(mixer, AttentionSpec)
    return replace(mixer, output_gate=True)
