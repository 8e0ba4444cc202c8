"""Record what transformers' own video processors make of videos, on a machine with torchvision.

    python -m tests.families.record_goldens

Pixels are kept as the SHA-256 of their float32 patches in merge-block order.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families.internvl.random_pair import save_internvl
from tests.families.qwen2_5_vl.random_pair import save_qwen25
from tests.multimodal.record_goldens import collapse_pads, pattern

GOLDENS = Path(__file__).with_name("goldens.json")

# name, frames, height, width, fps of the metadata
CASES = (
    ("one frame", 1, 24, 24, 2.0),
    ("fits", 4, 24, 40, 2.0),
    ("odd", 5, 50, 70, 7.0),
    ("down", 6, 130, 61, 24.0),
    ("up", 2, 9, 14, 1.0),
)
# frames, fps: which of them are used
SAMPLES = ((3, 30.0), (12, 30.0), (50, 24.0), (95, 29.97), (7, 1.0), (400, 25.0))


def digest(patches: Tensor) -> str:
    """Of float32 patches [n, D]."""
    return hashlib.sha256(patches.contiguous().numpy().tobytes()).hexdigest()


def _conversation(processor: Any) -> str:
    content = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    messages = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _qwen25(folder: Path) -> dict[str, Any]:
    import transformers

    model = save_qwen25(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor.from_pretrained(folder),
        chat_template=tokenizer.chat_template,
    )
    found: dict[str, Any] = {"videos": {}, "samples": []}
    for seed, (name, frames, height, width, fps) in enumerate(CASES):
        metadata = {"fps": fps, "total_num_frames": frames, "frames_indices": list(range(frames))}
        out = processor(
            text=[_conversation(processor)],
            videos=[pattern(seed, frames, height, width)],
            video_metadata=[metadata],
            return_tensors="pt",
        )
        positions, delta = model.model.get_rope_index(
            out["input_ids"],
            out["mm_token_type_ids"],
            video_grid_thw=out["video_grid_thw"],
            second_per_grid_ts=torch.as_tensor(out["second_per_grid_ts"]),
        )
        found["videos"][name] = {
            "grid": out["video_grid_thw"][0].tolist(),
            "patches": digest(out["pixel_values_videos"]),
            "positions": digest(positions[:, 0].int()),
            "delta": int(delta[0]),
            "text": collapse_pads(tokenizer.decode(out["input_ids"][0])),
        }
    video = processor.video_processor
    for total, fps in SAMPLES:
        taken = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=fps)
        found["samples"].append(video.sample_frames(taken, fps=2).tolist())
    return found


def _internvl(folder: Path) -> dict[str, Any]:
    import transformers

    from trt_eagle3.families.internvl.processor_reference import _patches

    save_internvl(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor.from_pretrained(folder),
        image_seq_length=9,
        chat_template=tokenizer.chat_template,
    )
    found: dict[str, Any] = {"videos": {}, "samples": []}
    for seed, (name, frames, height, width, _) in enumerate(CASES):
        out = processor(
            text=[_conversation(processor)],
            videos=[pattern(seed, frames, height, width)],
            return_tensors="pt",
        )
        found["videos"][name] = {
            "grid": [len(out["pixel_values"]), 6, 6],
            "patches": digest(_patches(out["pixel_values"], 4, 2)),
            "text": tokenizer.decode(out["input_ids"][0]).replace("<IMG_CONTEXT>" * 9, "*9"),
        }
    video = processor.video_processor
    for total, fps in SAMPLES:
        taken = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=fps)
        frames = min(8, total)
        found["samples"].append(video.sample_frames(taken, num_frames=frames).tolist())
    return found


def main() -> None:
    """Write ``goldens.json``."""
    import torchvision
    import transformers

    versions = {m.__name__: m.__version__ for m in (torch, torchvision, transformers)}
    with tempfile.TemporaryDirectory() as name:
        found = {
            "versions": versions,
            "qwen2_5_vl": _qwen25(Path(name) / "qwen25"),
            "internvl": _internvl(Path(name) / "internvl"),
        }
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
