"""DeepSeek-VL with two towers as ``transformers`` computes it, its parts loaded one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.models.deepseek_vl_hybrid import modeling_deepseek_vl_hybrid as hf

from trt_eagle3.families.deepseek_vl.reference import DeepseekVLReference, pixels_from_patches
from trt_eagle3.multimodal.squares import num_pieces

__all__ = ["DeepseekVLHybridReference"]


class DeepseekVLHybridReference(DeepseekVLReference):
    """A DeepSeek-VL target with two towers."""

    whole = hf.DeepseekVLHybridModel

    def pixels(self, patches: Tensor) -> tuple[Tensor, ...]:
        """Return the smaller and the larger squares of packed ``patches [n, D]``."""
        small, large = self.config.vision_config, self.config.high_res_vision_config
        side, area = small.image_size // small.patch_size, small.patch_size**2
        own, pieces = patches.split([3 * area, patches.shape[1] - 3 * area], dim=1)
        assert pieces.shape[1] == 3 * area * num_pieces(small.image_size, large.image_size)
        by_colour = pieces.view(-1, side**2, 3, pieces.shape[1] // 3).transpose(1, 2)
        planes = by_colour.flatten(2)[..., : large.image_size**2]
        detail = planes.unflatten(2, (-1, large.patch_size**2)).transpose(1, 2)
        return (
            pixels_from_patches(own, side),
            pixels_from_patches(
                detail.reshape(-1, 3 * large.patch_size**2), large.image_size // large.patch_size
            ),
        )

    def parts(self, model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        """Yield the parts of both towers and the prefix of their tensors."""
        yield from super().parts(model)
        whole: Any = model
        whole.high_res_vision_alpha = self._parameter("visual.sam_alpha")
        tower = whole.high_res_vision_model.vision_encoder
        if tower.pos_embed is not None:
            tower.pos_embed = self._parameter("visual.sam.pos_embed")
        yield tower.patch_embed, "visual.sam.patch_embed."
        for index, layer in enumerate(tower.layers):
            yield layer, f"visual.sam.layers.{index}."
        yield tower.neck, "visual.sam.neck."
        yield whole.high_res_vision_neck, "visual.sam_neck."
        yield whole.high_res_vision_proj, "visual.sam_proj."

    def _parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._tensor(self._tensors[name]), requires_grad=False)
