"""Compare this recipe's shortcuts with transformers: forward, rope positions, prompt text and
pixels.

    python examples/tiny/check.py [--folder examples/tiny]

The processor comparison needs torchvision (videos); without it that part is skipped and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from batch import collate
from evaluate import HERE, Pair, load_pair
from prompt import encode, prompt_text
from tasks import KINDS, Example, examples

__all__ = ["check_forward", "check_processor"]


def _inputs(pair: Pair, example: Example) -> tuple[dict[str, torch.Tensor], torch.Tensor, object]:
    """Arguments of the transformers model, the recipe's positions [3, 1, L], and the recipe's
    batch.
    """
    batch = collate(
        [encode(pair.tokenizer, example, prompt_text(example))], pair.vision_ids, pair.end_id
    )
    image_id, video_id = pair.vision_ids
    inputs = {
        "input_ids": batch.ids,
        "mm_token_type_ids": ((batch.ids == image_id).int() + 2 * (batch.ids == video_id).int()),
    }
    pixels = batch.patches.float() / 127.5 - 1
    if example.images:
        sides = [(1, i.height // 16, i.width // 16) for i in example.images]
        inputs |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(sides)}
    if example.frames:
        first = example.frames[0]
        grid = [(len(example.frames) + 1) // 2, first.height // 16, first.width // 16]
        inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
    return (
        {name: value.to(pair.device) for name, value in inputs.items()},
        batch.positions,
        batch.to(pair.device),
    )


@torch.inference_mode()
def check_forward(pair: Pair, count: int = 6) -> float:
    """Largest difference of logits and pre-deepstack features from transformers; positions must
    be equal.
    """
    worst = 0.0
    for example in examples("heldout", 3, count * len(KINDS)):
        inputs, positions, batch = _inputs(pair, example)
        if example.kind != "text":
            grids = {k: v for k, v in inputs.items() if k.endswith("thw")}
            theirs, _ = pair.target.model.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], **grids
            )
            assert torch.equal(theirs.cpu(), positions), example.prompt
        expected = pair.target(**inputs, output_hidden_states=True)
        out = pair.forward(batch)
        aux = torch.cat([expected.hidden_states[k + 1] for k in pair.aux_layers], dim=-1)
        logits = pair.target.lm_head(out.hidden)
        worst = max(
            worst, float((logits - expected.logits).abs().max()), float((aux - out.aux).abs().max())
        )
    assert worst < 2e-3, worst
    return worst


def check_processor(pair: Pair, folder: Path, count: int = 6) -> float:
    """Largest pixel difference from ``AutoProcessor``; the prompt ids must be equal."""
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    processor = AutoProcessor.from_pretrained(folder / "target")
    worst = 0.0
    for example in examples("heldout", 4, count * len(KINDS)):
        content = [{"type": "image"} for _ in example.images] + [{"type": "video"}] * bool(
            example.frames
        )
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": example.prompt}]}
        ]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        media = {"images": list(example.images)} if example.images else {}
        if example.frames:
            n = len(example.frames)
            metadata = VideoMetadata(total_num_frames=n, fps=2.0, frames_indices=list(range(n)))
            media = {
                "videos": [list(example.frames)],
                "video_metadata": [metadata],
                "do_sample_frames": False,
            }
        theirs = processor(text=[text], return_tensors="pt", **media)
        ours = encode(pair.tokenizer, example, prompt_text(example))
        got = theirs["input_ids"][0].tolist()
        assert got == ours.ids[: ours.prompt_len].tolist(), (
            example.kind,
            processor.tokenizer.decode(got),
        )
        batch = collate([ours], pair.vision_ids, pair.end_id)
        for key in ("pixel_values", "pixel_values_videos"):
            if key in theirs:
                worst = max(
                    worst, float((theirs[key] - (batch.patches.float() / 127.5 - 1)).abs().max())
                )
    assert worst < 1e-5, worst
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="holds target/ and draft/")
    folder = parser.parse_args().folder
    pair = load_pair(folder, torch.device("cpu"))
    print(f"forward: largest difference {check_forward(pair):.2e}")
    if importlib.util.find_spec("torchvision") is None:
        print("processor: skipped, torchvision is not installed")
        return
    print(f"processor: ids equal, largest pixel difference {check_processor(pair, folder):.2e}")


if __name__ == "__main__":
    main()
