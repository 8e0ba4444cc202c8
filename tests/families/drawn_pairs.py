"""A random pair of each family, of an odd geometry that TensorRT's plugins support, and drafts of
each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.checkpoint.drafts import Geometry, write_specforge_draft
from tests.drafts.block.files import Geometry as BlockGeometry
from tests.drafts.block.files import write as write_block
from tests.drafts.mtp.head import add_head
from tests.families.deepseek_vl.random_pair import save_deepseek
from tests.families.internvl.random_pair import save_internvl
from tests.families.llama.random_pair import save_llama
from tests.families.qwen2.random_pair import TEMPLATE as TEXT_TEMPLATE
from tests.families.qwen2.random_pair import save_qwen2
from tests.families.qwen2_5_vl.random_pair import (
    IMAGE_FILE,
    TEMPLATE,
    TOKENS,
    VIDEO_FILE,
    save_qwen25,
)
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.families.qwen3_next.random_pair import save_qwen3_next
from tests.families.qwen3_omni_moe.random_pair import save_omni
from tests.families.random_pairs import save_target, token_ids
from tests.families.text_pairs import quantise
from tests.moe import with_layout
from tests.multimodal.record_goldens import train_tokenizer

__all__ = ["PAIRS", "DrawnPair", "draw_mixture", "draw_pair"]


@dataclass(frozen=True)
class DrawnPair:
    """Where a pair lies.

    Attributes:
        drafts: kind (``eagle3``, ``mtp``, ``block``) -> ``draft.checkpoint``.
        dense: whether no layer has experts, which TensorRT has in 16 bits alone.
        multimodal: whether the target has a tower. videos: whether it takes videos.
    """

    target: Path
    drafts: Mapping[str, str]
    dense: bool
    multimodal: bool
    videos: bool = True


@dataclass(frozen=True)
class _Heads:
    """Query heads, key heads, and channels of a head; ``sections``: its pairs by axis."""

    heads: int
    kv_heads: int
    dim: int
    sections: tuple[int, int, int]

    def text(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
        }


_HEADS = (
    _Heads(3, 1, 16, (4, 2, 2)),
    _Heads(5, 1, 24, (6, 3, 3)),
    _Heads(6, 2, 20, (4, 3, 3)),
    _Heads(7, 7, 12, (2, 2, 2)),
)
LAYERS = 3
"""Of a decoder: a builder's time is that of its layers."""
KINDS = ["linear_attention", "full_attention", "linear_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def _text(random: Random, heads: _Heads, *, moe: bool = False) -> dict[str, Any]:
    """Sizes of a decoder: no power of two among them."""
    sizes: dict[str, Any] = {
        "hidden_size": random.choice([48, 80, 112]),
        "intermediate_size": random.choice([56, 88, 104]),
        "num_hidden_layers": LAYERS,
        **heads.text(),
        "max_position_embeddings": 2048,
    }
    if moe:
        sizes |= {
            "moe_intermediate_size": random.choice([24, 40]),
            "num_experts": random.choice([5, 6, 9]),
            "num_experts_per_tok": random.choice([2, 3]),
        }
    return sizes


def _tower(random: Random, *head_dims: int) -> dict[str, int]:
    """Sizes of a tower; ``head_dims``: those to choose from."""
    heads = random.choice([1, 2, 3])
    return {
        "hidden_size": heads * random.choice(head_dims),
        "num_heads": heads,
        "intermediate_size": random.choice([36, 52]),
    }


def _eagle3(folder: Path, text: Any, rope: dict[str, Any] | None = None) -> dict[str, str]:
    geometry = replace(
        Geometry(),
        hidden=text.hidden_size,
        target_hidden=text.hidden_size,
        head_dim=_dim(text),
        vocab=text.vocab_size,
        draft_vocab=text.vocab_size // 2,
        target_layers=LAYERS,
        base=1e6,
    )
    options = {} if rope is None else {"rope": rope}
    write_specforge_draft(folder / "eagle3", geometry, aux=[0, 1, 2], **options)
    return {"eagle3": str(folder / "eagle3")}


def _dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _block(folder: Path, text: Any) -> dict[str, str]:
    """A block draft with windows."""
    geometry = BlockGeometry(
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        draft_vocab=text.vocab_size,
        target_layers=LAYERS,
        num_aux=2,
    )
    write_block(folder / "block", "z-lab dflash2", geometry, nested={"target_layer_ids": [0, 1]})
    return {"block": str(folder / "block")}


def _qwen3(folder: Path, random: Random, *, moe: bool, **sizes: int) -> DrawnPair:
    heads, tokenizer = random.choice(_HEADS), train_tokenizer()
    text = _text(random, heads, moe=moe) | {"rope_parameters": _ROPE} | sizes
    text |= {"vocab_size": _padded(tokenizer), "tie_word_embeddings": random.choice([False, True])}
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, norm_topk_prob=True))
        if moe
        else Qwen3ForCausalLM(Qwen3Config(**text))
    )
    target = save_target(folder / "target", model.eval(), tokenizer, {}, TEXT_TEMPLATE)
    return DrawnPair(target, _eagle3(folder, model.config), not moe, multimodal=False)


def _padded(tokenizer: Any) -> int:
    return -(-len(tokenizer) // 8) * 8


def _qwen3_vl(folder: Path, random: Random, *, moe: bool) -> DrawnPair:
    heads, tokenizer = random.choice(_HEADS), train_tokenizer()
    rope = {**_ROPE, "mrope_interleaved": True, "mrope_section": list(heads.sections)}
    text = _text(random, heads, moe=moe) | {"rope_parameters": rope}
    vision = _tower(random, 20, 64, 72) | {
        "depth": 2,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        "out_hidden_size": text["hidden_size"],
    }
    of_config, of_model = (
        (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
        if moe
        else (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    )
    config = of_config(
        text_config=text | {"vocab_size": _padded(tokenizer), "norm_topk_prob": True},
        vision_config=vision,
        tie_word_embeddings=False,
        **token_ids(tokenizer, TOKENS),
    )
    model = of_model(config).eval()
    files = {"preprocessor_config.json": IMAGE_FILE, "video_preprocessor_config.json": VIDEO_FILE}
    target = save_target(folder / "target", model, tokenizer, files, TEMPLATE)
    return DrawnPair(target, _eagle3(folder, config.text_config), not moe, multimodal=True)


def _qwen2_5_vl(folder: Path, random: Random) -> DrawnPair:
    heads, dim, sections = random.choice(
        [(3, 16, [2, 3, 3]), (5, 16, [4, 2, 2]), (2, 40, [8, 6, 6])]
    )
    text = {
        "hidden_size": heads * dim,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "intermediate_size": random.choice([56, 88]),
    }
    vision = _tower(random, 20, 64, 80) | {"depth": 2, "window_size": random.choice([16, 24, 40])}
    model = save_qwen25(folder / "target", text=text, vision=vision, sections=sections)
    rope = {"rope_type": "mrope", "mrope_section": sections}
    drafts = _eagle3(folder, model.config.text_config, rope)
    return DrawnPair(folder / "target", drafts, dense=True, multimodal=True)


def _deepseek(folder: Path, random: Random, family: str) -> DrawnPair:
    text = {
        "hidden_size": random.choice([48, 96]),
        "intermediate_size": random.choice([56, 88]),
        "num_hidden_layers": LAYERS,
    }
    model = save_deepseek(folder / "target", family, text=text)
    drafts = _eagle3(folder, model.config.text_config)
    return DrawnPair(folder / "target", drafts, dense=True, multimodal=True, videos=False)


def _internvl(folder: Path, random: Random) -> DrawnPair:
    text = _text(random, random.choice(_HEADS))
    vision = _tower(random, 20, 64, 128)
    vision |= {"num_attention_heads": vision.pop("num_heads"), "num_hidden_layers": 2}
    model = save_internvl(folder / "target", text=text, vision=vision)
    drafts = _eagle3(folder, model.config.text_config)
    return DrawnPair(folder / "target", drafts, dense=True, multimodal=True)


def _hybrid(folder: Path, random: Random, *, moe: bool) -> DrawnPair:
    text: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "layer_types": KINDS,
        "hidden_size": random.choice([48, 80]),
        "linear_key_head_dim": random.choice([12, 20]),
        "linear_value_head_dim": random.choice([20, 28]),
        "linear_conv_kernel_dim": random.choice([3, 4]),
    }
    if moe:
        text |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    model = save_hybrid(folder / "target", moe=moe, **text)
    add_head(folder / "target")
    own = model.config.text_config
    drafts = {**_eagle3(folder, own), "mtp": "mtp", **_block(folder, own)}
    return DrawnPair(folder / "target", drafts, not moe, multimodal=True)


def _qwen3_next(folder: Path, random: Random) -> DrawnPair:
    text = {
        "hidden_size": random.choice([48, 80]),
        "num_hidden_layers": LAYERS,
        "layer_types": KINDS,
        "max_position_embeddings": 2048,
        "linear_key_head_dim": random.choice([12, 20]),
        "linear_value_head_dim": random.choice([20, 28]),
        "moe_intermediate_size": random.choice([24, 40]),
        "num_experts": random.choice([5, 6, 9]),
    }
    model = save_qwen3_next(folder / "target", **text)
    add_head(folder / "target")
    drafts = {**_eagle3(folder, model.config), "mtp": "mtp"}
    return DrawnPair(folder / "target", drafts, dense=False, multimodal=False)


def _omni(folder: Path, random: Random) -> DrawnPair:
    heads = random.choice(_HEADS)
    rope = {**_ROPE, "interleaved": True, "mrope_section": list(heads.sections)}
    text = _text(random, heads, moe=True) | {"rope_parameters": rope}
    model = save_omni(folder / "target", **text)
    drafts = _eagle3(folder, model.config.thinker_config.text_config)
    return DrawnPair(folder / "target", drafts, dense=False, multimodal=True)


def _llama(folder: Path, random: Random) -> DrawnPair:
    heads = random.choice(_HEADS)
    text = _text(random, heads) | {"attention_bias": random.choice([False, True])}
    text["hidden_size"] = 16 * heads.heads  # transformers wants a multiple
    model = save_llama(folder / "target", **text)
    return DrawnPair(folder / "target", _eagle3(folder, model.config), dense=True, multimodal=False)


def _qwen2(folder: Path, random: Random) -> DrawnPair:
    heads = random.choice(_HEADS)
    text = _text(random, heads) | {"hidden_size": heads.heads * heads.dim}
    del text["head_dim"]  # Qwen2 has none of its own
    model = save_qwen2(folder / "target", **text)
    return DrawnPair(folder / "target", _eagle3(folder, model.config), dense=True, multimodal=False)


PAIRS: Mapping[str, Callable[[Path, Random], DrawnPair]] = {
    "deepseek_vl": lambda folder, random: _deepseek(folder, random, "deepseek_vl"),
    "deepseek_vl_hybrid": lambda folder, random: _deepseek(folder, random, "deepseek_vl_hybrid"),
    "internvl": _internvl,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3": lambda folder, random: _qwen3(folder, random, moe=False),
    "qwen3_5": lambda folder, random: _hybrid(folder, random, moe=False),
    "qwen3_5_moe": lambda folder, random: _hybrid(folder, random, moe=True),
    "qwen3_moe": lambda folder, random: _qwen3(folder, random, moe=True),
    "qwen3_next": _qwen3_next,
    "qwen3_omni_moe": _omni,
    "qwen3_vl": lambda folder, random: _qwen3_vl(folder, random, moe=False),
    "qwen3_vl_moe": lambda folder, random: _qwen3_vl(folder, random, moe=True),
}
"""Family -> what draws a pair of it. The text-only twins of Qwen3.5 have its graphs."""


def draw_pair(family: str, folder: Path, seed: int = 0) -> DrawnPair:
    """Write the pair of ``family`` that ``seed`` gives into ``folder``."""
    return PAIRS[family](folder, Random(f"{family} {seed}"))


def draw_mixture(folder: Path, layout: str, seed: int = 0) -> DrawnPair:
    """Write a Qwen3-MoE whose experts, stored in format ``layout``, kernels multiply as stored."""
    sizes = {
        **_Heads(6, 2, 32, (6, 5, 5)).text(),
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 6,
    }
    pair = _qwen3(folder, Random(seed), moe=True, **sizes)
    model = Qwen3MoeForCausalLM.from_pretrained(pair.target, dtype="float32")
    with_layout(pair.target, model, "single")
    quantise(pair.target, layout)
    return pair
