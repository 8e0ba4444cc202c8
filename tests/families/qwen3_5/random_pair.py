"""Random Qwen3.5s of odd geometry as transformers writes them, dense and mixtures of experts, with
a tokenizer and processor files, and drafts of two producers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.decode.bundle import PROCESSOR, SPECIAL
from tests.families.random_pairs import NUM_LAYERS, draw_weights, save_draft
from tests.hybrid import new_qwen3_5

__all__ = ["save_hybrid", "save_hybrid_draft"]

HEAD_DIM = 32
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "layer_types": None,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
"""Three layers of linear attention, one of full attention, and one of linear attention."""
ROPES: dict[str, dict[str, Any] | None] = {
    "specforge": None,
    "speculators": {
        "rope_type": "default",
        "mrope_section": [8, 4, 4],
        "partial_rotary_factor": 1.0,
    },
}
"""As the producers write them for a Qwen3.5: SpecForge none, speculators the target's over whole
heads.
"""


def save_hybrid(folder: Path, *, moe: bool, **text: Any) -> PreTrainedModel:
    """Write a checkpoint with a tower."""
    shutil.copytree(PROCESSOR, folder)
    tokenizer = Tokenizer.from_file(str(PROCESSOR / "tokenizer.json"))
    vocab = -(-tokenizer.get_vocab_size() // 8) * 8
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    text = {**TEXT, "vocab_size": vocab, **text}
    model = new_qwen3_5(text, ids, moe=moe, vision={"patch_size": 16})
    draw_weights(model)
    model.save_pretrained(folder)
    end = tokenizer.token_to_id("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return model


def save_hybrid_draft(folder: Path, model: Any, producer: str = "specforge") -> Path:
    """A draft of ``model``, whose aux layers are of both kinds."""
    text = model.config.text_config
    sizes = {"hidden": text.hidden_size, "vocab": text.vocab_size, "head_dim": HEAD_DIM}
    return save_draft(folder, producer, **sizes, rope=ROPES[producer], base=1e7)
