"""Prepare DeepSeek-VL prompts with ``transformers``: its processor over Pillow's images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trt_eagle3.families.deepseek_vl.reference import DeepseekVLReference
from trt_eagle3.multimodal.image import load_image
from trt_eagle3.parity.reference.processor import ReferenceInputs, check_transformers, decoded_text
from trt_eagle3.prompts.prompt_file import Question

__all__ = ["DeepseekVLProcessorReference", "patches_of"]


class DeepseekVLProcessorReference:
    """Implements ``parity.processor.ProcessorReference`` for a DeepSeek-VL checkpoint."""

    processor_type: Any = transformers.DeepseekVLProcessor
    image_type: Any = transformers.DeepseekVLImageProcessorPil

    def __init__(self, checkpoint: Path, target: DeepseekVLReference) -> None:
        check_transformers()
        self._checkpoint, self._target = checkpoint, target

    def __call__(self, question: Question) -> ReferenceInputs:
        """Prepare ``question``."""
        images = [load_image(source) for source in question.images]
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question.prompt}]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        media: dict[str, Any] = {"images": images} if images else {}
        out = self._processor(text=[text], return_tensors="pt", **media)
        token_ids = out["input_ids"][0]
        vision = self._target.config.vision_config
        side = vision.image_size // vision.patch_size
        grid_thw = torch.tensor([[1, side, side]] * len(images), dtype=torch.int64)
        positions, delta = self._target.rope_index(token_ids, grid_thw, torch.zeros(len(images)))
        return ReferenceInputs(
            token_ids=token_ids,
            position_ids=positions.int(),
            rope_delta=delta,
            patches=self.patches(out) if images else torch.empty(0, 0),
            grid_thw=grid_thw.reshape(-1, 3),
            visual_rows=token_ids == self._target.config.image_token_id,
        )

    def patches(self, out: Any) -> Tensor:
        """Return the patches [n, D] of the processor's output ``out``."""
        return patches_of(out["pixel_values"], self._target.config.vision_config.patch_size)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens of an answer with ``transformers``, without special tokens."""
        return decoded_text(self._processor.tokenizer, token_ids)

    @cached_property
    def _processor(self) -> Any:
        folder, options = str(self._checkpoint), {"local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        values, _ = self.processor_type.get_processor_dict(folder, **options)
        return self.processor_type(
            image_processor=self.image_type.from_pretrained(folder, **options),
            tokenizer=tokenizer,
            chat_template=values.get("chat_template") or tokenizer.chat_template,
            num_image_tokens=values.get("num_image_tokens", 576),
        )


def patches_of(pixels: Any, patch: int) -> Tensor:
    """Cut images [F, 3, S, S] row by row into patches [n, 3 * p * p]."""
    images = torch.as_tensor(pixels)
    side = images.shape[-1] // patch
    cut = images.view(len(images), 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(-1, 3 * patch**2)
