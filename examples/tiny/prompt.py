"""Text side of the tiny pair: tokenizer, chat template, and examples as token ids with three-axis
positions.

# Shapes: L prompt and answer tokens, N temporal patches (one per image, one per two frames)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tasks import Example, examples
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL",
    "Encoded",
    "encode",
    "prompt_text",
    "timestamps",
    "train_bpe",
]

PATCH, MERGE = 16, 2
VOCAB_SIZE = 640
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen2's pre-tokenizer: words with their leading space, single digits, punctuation runs.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# For messages without tools this renders what the Qwen3-VL instruct template renders.
CHAT_TEMPLATE = """\
{%- set count = namespace(image=0, video=0) -%}
{%- macro body(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set count.image = count.image + 1 -%}
{%- if add_vision_id %}{{- 'Picture ' ~ count.image ~ ': ' -}}{% endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set count.video = count.video + 1 -%}
{%- if add_vision_id %}{{- 'Video ' ~ count.video ~ ': ' -}}{% endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ body(message.content) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Encoded:
    """One example as the target sees it.

    Attributes:
        ids: prompt then answer then <|im_end|>; int64 [L].
        positions: temporal, height and width rope positions; int64 [3, L].
        prompt_len: tokens before the answer.
        patches: uint8 [2, height, width, 3] per temporal patch, in the order of their tokens.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    prompt_len: int
    patches: tuple[NDArray[np.uint8], ...]


def train_bpe(seed: int, num_examples: int = 20000) -> Tokenizer:
    """Byte-level BPE on training prompts and answers; the special tokens take the last ids, as
    Qwen's do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    roles = "system\nuser\nassistant\nYou are a helpful assistant.<0.2 seconds>"
    texts = (f"{roles} {e.prompt} {e.answer}" for e in examples("train", seed, num_examples))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer


def timestamps(num_frames: int, fps: float) -> list[float]:
    """Seconds of each pair of frames: the mean of its first and last frame; an odd last frame is
    paired with itself.
    """
    seconds = [i / fps for i in range(num_frames)]
    seconds += seconds[-1:] * (num_frames % 2)
    return [(a + b) / 2 for a, b in list(pairwise(seconds))[::2]]


def temporal_patches(example: Example) -> tuple[NDArray[np.uint8], ...]:
    """uint8 [2, height, width, 3] per image (shown twice) or pair of frames (an odd last frame
    is shown twice).
    """

    def pair(first: Image.Image, second: Image.Image) -> NDArray[np.uint8]:
        return np.stack([np.asarray(first, dtype=np.uint8), np.asarray(second, dtype=np.uint8)])

    frames = example.frames + example.frames[-1:] * (len(example.frames) % 2)
    pairs = list(zip(frames[::2], frames[1::2], strict=True)) or [
        (image, image) for image in example.images
    ]
    return tuple(pair(a, b) for a, b in pairs)


def prompt_text(
    example: Example, fps: float = 2.0, *, wrapped: bool = True, system: str | None = None
) -> str:
    """The prompt with one placeholder per merged patch, as the Qwen3-VL processor expands it.

    Args:
        wrapped: keep the template's own <|vision_start|>...<|vision_end|> around the per-frame
            groups, as the transformers 5 processor does; the 4.57 processor replaces it.
    """

    def pads(image: Image.Image) -> int:
        return (image.width // (PATCH * MERGE)) * (image.height // (PATCH * MERGE))

    vision = "".join(
        f"<|vision_start|>{'<|image_pad|>' * pads(image)}<|vision_end|>" for image in example.images
    )
    if example.frames:
        frame = f"<|vision_start|>{'<|video_pad|>' * pads(example.frames[0])}<|vision_end|>"
        vision = "".join(f"<{t:.1f} seconds>{frame}" for t in timestamps(len(example.frames), fps))
        vision = f"<|vision_start|>{vision}<|vision_end|>" if wrapped else vision
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{vision}{example.prompt}<|im_end|>\n<|im_start|>assistant\n"


def rope_positions(
    ids: list[int], vision_ids: frozenset[int], grids: list[tuple[int, int]]
) -> NDArray[np.int64]:
    """int64 [3, L]: what ``Qwen3VLModel.get_rope_index`` gives; ``grids`` is (rows, columns) of
    each run of pads.
    """
    parts, start, index = [], 0, 0
    remaining = iter(grids)
    while index < len(ids):
        if ids[index] in vision_ids:
            rows, columns = next(remaining)
            cell = np.arange(rows * columns)
            parts.append(np.stack([0 * cell, cell // columns, cell % columns]) + start)
            index, start = index + rows * columns, start + max(rows, columns)
        else:
            end = index
            while end < len(ids) and ids[end] not in vision_ids:
                end += 1
            parts.append(np.tile(np.arange(end - index) + start, (3, 1)))
            index, start = end, start + end - index
    return np.concatenate(parts, axis=1)


def encode(tokenizer: Tokenizer, example: Example, prompt: str) -> Encoded:
    """``prompt`` (from ``prompt_text``) and the example's answer as ids, positions and pixels."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids = prompt_ids + tokenizer.encode(f"{example.answer}<|im_end|>").ids
    patches = temporal_patches(example)
    grids = [(p.shape[1] // (PATCH * MERGE), p.shape[2] // (PATCH * MERGE)) for p in patches]
    vision_ids = frozenset(tokenizer.token_to_id(t) for t in ("<|image_pad|>", "<|video_pad|>"))
    positions = rope_positions(ids, vision_ids, grids)
    return Encoded(np.array(ids, dtype=np.int64), positions, len(prompt_ids), patches)
