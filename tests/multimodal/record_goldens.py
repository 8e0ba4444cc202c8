"""Record what the Hugging Face processor makes of videos, on a machine that has torchvision.

    python tests/multimodal/record_goldens.py --output tests/multimodal/goldens

Everything is built here, offline: a byte-level tokenizer, processor configs, frames from an integer
pattern. Pixel values are kept as one byte each plus the table of the (at most 256) float32 values
that they take, so that the files stay small and the comparison stays exact.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- macro write(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' or 'video' in part -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- write(message.content) }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

PUBLISHED = {"shortest_edge": 4096, "longest_edge": 25165824}
TIGHT = {"shortest_edge": 4096, "longest_edge": 16384}

# name, frames, height, width, fps of the metadata (None: none given), sample frames?, size limits,
# keep pixels?
CASES: tuple[tuple[str, int, int, int, float | None, bool, dict[str, int], bool], ...] = (
    ("one_frame", 1, 64, 64, 2.0, False, PUBLISHED, True),
    ("two_frames_fit", 2, 64, 96, 2.0, False, PUBLISHED, True),
    ("three_frames_odd_size", 3, 50, 70, 2.0, False, PUBLISHED, True),
    ("five_frames_down", 5, 90, 120, 1.0, False, TIGHT, True),
    ("eight_frames_down", 8, 130, 61, 24.0, False, TIGHT, False),
    ("two_frames_up", 2, 20, 45, 2.0, False, PUBLISHED, True),
    ("two_frames_narrow", 2, 5, 200, 2.0, False, PUBLISHED, False),
    ("no_metadata", 4, 64, 64, None, False, PUBLISHED, False),
    ("sampled_from_24_fps", 50, 40, 64, 24.0, True, TIGHT, False),
    ("sampled_from_30_fps", 95, 33, 47, 29.97, True, TIGHT, False),
    ("sampled_few", 3, 40, 64, 30.0, True, PUBLISHED, False),
    ("sampled_at_minimum", 12, 40, 64, 30.0, True, PUBLISHED, False),
    ("large_up", 2, 37, 53, 2.0, False, {"shortest_edge": 65536, "longest_edge": 25165824}, False),
    ("large_down", 4, 480, 640, 7.5, False, {"shortest_edge": 4096, "longest_edge": 262144}, False),
)


def pattern(seed: int, frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Frames with ramps and hard edges, from integer arithmetic alone: uint8 [frames, height,
    width, 3].
    """
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    ramp = (x * (3 + c) + y * (5 + seed) + t * 17 * (c + 1)) % 256
    blocks = np.where((x // 7 + y // 5 + t) % 3 == 0, 200, 0)
    return np.asarray((ramp + blocks) % 256, dtype=np.uint8)


def train_tokenizer() -> Any:
    """A byte-level BPE with Qwen3-VL's special tokens; about 400 entries."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    corpus = [
        "user\nassistant\nsystem\n",
        "<0.5 seconds> <1.2 seconds>",
        "Describe this image and the video, please.",
    ]
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )


def build_processor(video_size: dict[str, int]) -> Any:
    """Qwen3VLProcessor with its torchvision video processor; image size limits are tiny."""
    import transformers

    shared = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = transformers.Qwen2VLImageProcessor(
        size={"shortest_edge": 1024, "longest_edge": 16384}, **shared, **norm
    )
    video = transformers.Qwen3VLVideoProcessor(size=dict(video_size), **shared, **norm)
    return transformers.Qwen3VLProcessor(
        image_processor=image,
        tokenizer=train_tokenizer(),
        video_processor=video,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Any) -> Any:
    """A Qwen3VLModel just large enough to ask for position ids."""
    import transformers

    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 1,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return transformers.Qwen3VLModel(config)


def encode_pixels(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(codes, table) with table[codes] == values exactly."""
    table, codes = np.unique(values, return_inverse=True)
    assert table.size <= 256, f"{table.size} distinct pixel values"
    return codes.reshape(values.shape).astype(np.uint8), table


def run_case(
    model: Any, case: tuple[Any, ...], seed: int
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """One video in one prompt -> what to keep as JSON, what to keep as arrays."""
    name, frames, height, width, fps, sample, size, keep = case
    facts: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "frames": frames,
        "height": height,
        "width": width,
    }
    facts |= {"fps": fps, "sample": sample, "size": size}
    processor = build_processor(size)
    messages = [
        {
            "role": "user",
            "content": [{"type": "video"}, {"type": "text", "text": "Describe the video."}],
        }
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    video = pattern(seed, frames, height, width)
    metadata = {"fps": fps, "total_num_frames": frames, "frames_indices": list(range(frames))}
    keywords = {} if fps is None else {"video_metadata": [metadata]}
    try:
        out = processor(
            text=[text], videos=[video], do_sample_frames=sample, return_tensors="pt", **keywords
        )
    except ValueError as error:
        return facts | {"error": str(error)}, {}
    arrays, facts = keep_outputs(model, processor, out, facts)
    if not keep:
        arrays = {key: value for key, value in arrays.items() if key not in ("codes", "table")}
    return facts, arrays


def keep_outputs(
    model: Any, processor: Any, out: Any, facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids, grids, positions and pixels of one processor call."""
    positions, deltas = model.get_rope_index(
        out["input_ids"],
        mm_token_type_ids=out["mm_token_type_ids"],
        image_grid_thw=out.get("image_grid_thw"),
        video_grid_thw=out.get("video_grid_thw"),
    )
    pixels = np.ascontiguousarray(out["pixel_values_videos"].numpy().astype(np.float32))
    codes, table = encode_pixels(pixels)
    arrays = {
        "token_ids": out["input_ids"][0].numpy().astype(np.int32),
        "position_ids": positions[:, 0].numpy().astype(np.int32),
        "video_grid_thw": out["video_grid_thw"].numpy(),
        "codes": codes,
        "table": table,
    }
    facts = facts | {
        "rope_delta": int(deltas[0]),
        "pixels_sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
        "text": collapse_pads(processor.tokenizer.decode(out["input_ids"][0])),
    }
    return arrays, facts


def collapse_pads(text: str) -> str:
    """Runs of one pad token as pad*count, to be read by people."""
    for pad in ("<|image_pad|>", "<|video_pad|>"):
        parts = text.split(pad)
        kept, count = [parts[0]], 0
        for part in parts[1:]:
            count += 1
            if part:
                kept.append(f"{pad}*{count}{part}")
                count = 0
        text = "".join(kept)
    return text


def run_mixed(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Text, two images and two videos in one conversation of several turns."""
    from PIL import Image

    processor = build_processor(TIGHT)
    image, video = {"type": "image"}, {"type": "video"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": "text", "text": "First."}, video, image]},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [video, {"type": "text", "text": "And now?"}]},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    out = processor(
        text=[text],
        images=[
            Image.fromarray(pattern(91, 1, 48, 80)[0]),
            Image.fromarray(pattern(92, 1, 70, 33)[0]),
        ],
        videos=[pattern(93, 4, 40, 64), pattern(94, 3, 64, 40)],
        video_metadata=[
            {"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]},
            {"fps": 1.5, "total_num_frames": 3, "frames_indices": [0, 1, 2]},
        ],
        do_sample_frames=False,
        return_tensors="pt",
    )
    arrays, facts = keep_outputs(model, processor, out, {"name": "mixed"})
    arrays["image_grid_thw"] = out["image_grid_thw"].numpy()
    return facts, {key: value for key, value in arrays.items() if key not in ("codes", "table")}


def main() -> None:
    """Write goldens.json, goldens.npz and processor/ (as save_pretrained writes it) into
    --output.
    """
    import torch
    import torchvision
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    processor = build_processor(PUBLISHED)
    processor.save_pretrained(output / "processor")
    model = build_model(processor.tokenizer)
    records, arrays = [], {}
    for seed, case in enumerate(CASES):
        facts, kept = run_case(model, case, seed)
        records.append(facts)
        arrays |= {f"{facts['name']}.{key}": value for key, value in kept.items()}
    facts, kept = run_mixed(model)
    arrays |= {f"mixed.{key}": value for key, value in kept.items()}
    versions = {
        module.__name__: module.__version__ for module in (torch, torchvision, transformers, np)
    }
    document = {"versions": versions, "videos": records, "mixed": facts}
    (output / "goldens.json").write_text(json.dumps(document, indent=1) + "\n")
    np.savez_compressed(output / "goldens.npz", **arrays)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
