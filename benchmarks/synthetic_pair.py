"""A pair of a published geometry that every engine can load: ``python -m
benchmarks.synthetic_pair FOLDER --size 8b --processor examples/tiny/target``.

Weights are random, so no draft is accepted: a speculative cycle is a cost, not a speed. Tokenizer,
chat template and image processor are those of a given checkpoint. Its vocabulary is filled up with
tokens ``<t...>`` to the geometry's size, and prompts of exact lengths consist of these tokens.
Build the bundle with ``trt-eagle3 build --config FOLDER/pair.yaml``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open

from benchmarks.drawn_weights import device_option, draw_weight
from benchmarks.synthetic import SIZES, write_draft, write_target
from trt_eagle3.errors import UserError
from trt_eagle3.io.run_command import run_command

__all__ = ["main", "pair_config", "write_pair", "write_prompts"]

_FILES = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_WORDS = 2048  # number of the tokens ``<t...>`` that a text can contain
_MAX_PIXELS = 1 << 20


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(list(SIZES)), default="8b", show_default=True)
@click.option("--layers", type=click.IntRange(5), help="Decoder layers, if fewer than published.")
@click.option("--processor", required=True, type=click.Path(path_type=Path, exists=True))
@device_option
@click.option("--batch", default=128, show_default=True, help="limits.max_batch_size of pair.yaml.")
@click.option("--seq-len", default=36864, show_default=True, help="limits.max_seq_len.")
@click.option("--kv-tokens", default=147456, show_default=True, help="limits.max_kv_tokens.")
@click.option("--steps", default=3, show_default=True, help="speculation.steps.")
def main(folder: Path, size: str, processor: Path, **options: Any) -> None:
    """Write FOLDER/target, FOLDER/draft, FOLDER/pair.yaml and FOLDER/prompts-LENGTH.json."""
    limits = {n: options.pop(n) for n in ("batch", "seq_len", "kv_tokens", "steps")}
    write_pair(folder, size, processor, **options)
    for length in (1024, 8192, 32768):
        count = limits["batch"] if length == 1024 else 3
        write_prompts(folder / f"prompts-{length}.json", length, count)
    (folder / "pair.yaml").write_text(json.dumps(pair_config(folder.absolute(), size, limits)))


def write_pair(
    folder: Path, size: str, processor: Path, *, layers: int | None = None, device: str = "cuda"
) -> None:
    """Write ``target/`` and ``draft/``; ``processor``: a checkpoint of the family.

    Raises:
        UserError: ``processor`` has no tokenizer.json.
    """
    target, draft = folder / "target", folder / "draft"
    write_target(target, size, num_layers=layers)
    write_draft(draft, size, num_layers=layers)
    files = [*sorted(target.glob("*.safetensors")), draft / "model.safetensors"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda file: _draw(file, device), files))
    for name in _FILES:
        shutil.copy(processor / name, target / name)
    _take_token_ids(target / "config.json", processor / "config.json")
    added = _fill_vocabulary(target / "tokenizer.json", processor, _vocab_size(target))
    _set(target / "tokenizer_config.json", added_tokens_decoder=added)
    _set(target / "preprocessor_config.json", size=_pixels(_MAX_PIXELS))


def write_prompts(file: Path, length: int, count: int) -> None:
    """Write ``count`` texts of ``length`` tokens each, without those of the chat template."""
    draw = random.Random(length)
    texts = ["".join(f"<t{draw.randrange(_WORDS)}>" for _ in range(length)) for _ in range(count)]
    file.write_text(json.dumps([{"prompt": text} for text in texts]))


def _draw(file: Path, device: str) -> None:
    """Write random values into the bfloat16 tensors of a sparse file."""
    with safe_open(str(file), framework="pt") as stored:
        names = [n for n in stored.keys() if stored.get_slice(n).get_dtype() == "BF16"]  # noqa: SIM118
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        for name in names:
            shape, (begin, end) = header[name]["shape"], header[name]["data_offsets"]
            flat = shape if len(shape) < 2 else [shape[0], -(-(end - begin) // (2 * shape[0]))]
            raw = draw_weight(name, flat, device).contiguous().view(torch.uint8).flatten()
            stream.seek(8 + size + begin)
            stream.write(raw.cpu().numpy().tobytes())


def _take_token_ids(config: Path, given: Path) -> None:
    """Set the ids of control tokens to the tokenizer's."""
    ours, theirs = (json.loads(file.read_text()) for file in (config, given))
    ours |= {name: theirs[name] for name in _IDS}
    for name in ("bos_token_id", "eos_token_id"):
        ours["text_config"][name] = theirs["text_config"][name]
        if name in ours:
            ours[name] = theirs["text_config"][name]
    config.write_text(json.dumps(ours, indent=2))


def _fill_vocabulary(file: Path, processor: Path, vocab_size: int) -> dict[str, Any]:
    """Write the given tokenizer with an entry for every id.

    Returns:
        Entries of ``tokenizer_config.json`` for tokens that texts can contain, by id.
    """
    given = processor / "tokenizer.json"
    if not given.is_file():
        raise UserError(f"{given}: no such file. Give --processor a checkpoint with tokenizer.json")
    tokenizer = json.loads(given.read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    # added tokens missing from the vocabulary would get new ids after all others
    vocab |= {entry["content"]: entry["id"] for entry in added}
    taken = set(vocab.values())
    free = (number for number in range(vocab_size) if number not in taken)
    for index, number in enumerate(free):
        vocab[f"<t{index}>"] = number
        if index < _WORDS:
            added.append({**added[0], "id": number, "content": f"<t{index}>", "special": False})
    added.sort(key=lambda entry: int(entry["id"]))
    file.write_text(json.dumps(tokenizer))
    return {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in added}


def _vocab_size(target: Path) -> int:
    size: int = json.loads((target / "config.json").read_text())["text_config"]["vocab_size"]
    return size


def _pixels(most: int) -> Mapping[str, int]:
    return {"shortest_edge": 65536, "longest_edge": most}


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}, indent=2))


def pair_config(folder: Path, size: str, limits: Mapping[str, int]) -> Mapping[str, Any]:
    """Return a build config for JSON, which is YAML."""
    return {
        "name": size,
        "target": {"checkpoint": str(folder / "target")},
        "draft": {"checkpoint": str(folder / "draft")},
        "engine": {"backend": "torch", "device": "cuda", "dtype": "bfloat16"},
        "limits": {
            "max_batch_size": limits["batch"],
            "max_seq_len": limits["seq_len"],
            "max_kv_tokens": limits["kv_tokens"],
            "max_visual_tokens": 2048,
            "max_waiting": 1024,
        },
        "speculation": {"mode": "chain", "steps": limits["steps"], "adaptive": False},
        "output": str(folder),
    }


if __name__ == "__main__":
    run_command(main)
