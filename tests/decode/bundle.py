"""A random pair in the published layouts, to be built and loaded as a user would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.reference.checkpoint import random_draft
from tests.reference.target import random_target
from trt_eagle3.config import BuildConfig, config_from_dict

PROCESSOR = Path(__file__).parents[1] / "multimodal" / "goldens" / "processor"
SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def save_pair(
    directory: Path,
    *,
    text: dict[str, Any] | None = None,
    sections: tuple[int, int, int] = (2, 1, 1),
    seed: int = 0,
    **vision: Any,
) -> None:
    """Write ``target/`` and ``draft/``: transformers' layout and SpecForge's; ``text`` and
    ``vision`` of the target.
    """
    target, draft = directory / "target", directory / "draft"
    shutil.copytree(PROCESSOR, target)
    draft.mkdir()
    tokenizer = Tokenizer.from_file(str(PROCESSOR / "tokenizer.json"))
    vocab = -(-tokenizer.get_vocab_size() // 8) * 8
    made = random_target(
        target,
        text={"vocab_size": vocab, "num_hidden_layers": 6, **(text or {})},
        vision={"patch_size": 16, **vision},
        sections=sections,
        seed=seed,
    )
    (target / "target.safetensors").unlink()
    save_file(
        {n: p.detach().contiguous() for n, p in made.model.named_parameters()},
        target / "model.safetensors",
    )
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    config = {
        **made.model.config.to_dict(),
        **ids,
        "architectures": ["Qwen3VLForConditionalGeneration"],
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id("<|im_end|>")]})
    )
    _save_draft(draft, vocab, made.spec.hidden_size, seed)


def _save_draft(directory: Path, vocab: int, hidden: int, seed: int) -> None:
    sizes = {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab // 2,
    }
    draft = random_draft(directory, seed=seed, **sizes)
    m = draft.manifest
    (directory / "draft.safetensors").unlink()
    unwanted = (
        "bias",
        "q_norm.weight",
        "k_norm.weight",
        "embed_tokens.weight",
        "input_norm.weight",
    )
    kept = {
        name.replace("layers.0", "midlayer"): tensor.contiguous()
        for name, tensor in draft.weights.items()
        if not name.endswith(unwanted) and not name.startswith("fc_norm")
    }
    save_file(kept, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_kv_heads,
        "head_dim": m.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": m.rms_norm_eps,
        "vocab_size": vocab,
        "draft_vocab_size": m.draft_vocab_size,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    }
    (directory / "config.json").write_text(json.dumps(config))


def config_of(directory: Path, **changes: object) -> BuildConfig:
    """A build config of the pair in ``directory``."""
    raw = {
        "name": "random",
        "target": {"checkpoint": str(directory / "target")},
        "draft": {"checkpoint": str(directory / "draft")},
        "engine": {"prefill_chunk": 32},
        "limits": {"max_seq_len": 200, "max_visual_tokens": 64},
        "speculation": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 8},
        "output": str(directory / "engines"),
    }
    return config_from_dict({**raw, **changes}, "test")
