"""Write the pair as published checkpoints lie:

Qwen3-VL's layout for the target, SpecForge's for the draft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from block import BlockDraft
from model import AUX_LAYERS, EPS, HEAD_DIM, ROPE_THETA, SECTIONS, Draft
from prompt import CHAT_TEMPLATE, MERGE, PATCH, SPECIAL
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

__all__ = [
    "as_bfloat16",
    "rounded",
    "save_dflash",
    "save_draft",
    "save_dspark",
    "save_prompt_files",
    "save_target",
    "write_json",
]

COMMON_PROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "processor_class": "Qwen3VLProcessor",
}


def rounded(model: nn.Module) -> nn.Module:
    """Its weights as they are saved, in bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval().requires_grad_(requires_grad=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _target_config(
    model: Qwen3VLForConditionalGeneration, ids: dict[str, int], moe: dict[str, Any]
) -> dict[str, Any]:
    """config.json in the published (transformers 4.57) spelling, which 5.x reads as well."""
    family = "qwen3_vl_moe" if moe else "qwen3_vl"
    text, vision = model.config.text_config, model.config.vision_config
    text_keys = (
        "attention_bias attention_dropout head_dim hidden_act hidden_size initializer_range "
        "intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
        "num_key_value_heads rms_norm_eps use_cache vocab_size"
    )
    vision_keys = (
        "deepstack_visual_indexes depth hidden_act hidden_size in_channels initializer_range "
        "intermediate_size num_heads num_position_embeddings out_hidden_size patch_size "
        "spatial_merge_size temporal_patch_size"
    )
    rope = {"mrope_interleaved": True, "mrope_section": list(SECTIONS), "rope_type": "default"}
    return {
        "architectures": [f"Qwen3VL{'Moe' if moe else ''}ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": family,
        "text_config": {
            **{key: getattr(text, key) for key in text_keys.split()},
            "bos_token_id": ids["<|endoftext|>"],
            "dtype": "bfloat16",
            "eos_token_id": ids["<|im_end|>"],
            "model_type": f"{family}_text",
            **moe,
            "rope_scaling": rope,
            "rope_theta": int(ROPE_THETA),
        },
        "tie_word_embeddings": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            **{key: getattr(vision, key) for key in vision_keys.split()},
            "model_type": family,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _save_processor(folder: Path, tokenizer: Tokenizer, ids: dict[str, int]) -> None:
    image = {"size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}}
    video = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 8 * 128 * 128},
        "fps": 2,
        "do_sample_frames": True,
    }
    image_type = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video_type = {
        "min_frames": 4,
        "max_frames": 768,
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    write_json(folder / "preprocessor_config.json", image | COMMON_PROCESSOR | image_type)
    write_json(folder / "video_preprocessor_config.json", video | COMMON_PROCESSOR | video_type)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(ids[token]): {"content": token, **flags} for token in SPECIAL},
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    vocab = json.loads(tokenizer.to_str())["model"]
    write_json(folder / "vocab.json", vocab["vocab"])
    merges = "\n".join(" ".join(pair) for pair in vocab["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")


def as_bfloat16(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: t.detach().to("cpu", torch.bfloat16).contiguous()
        for name, t in module.state_dict().items()
    }


def save_target(
    folder: Path,
    model: Qwen3VLForConditionalGeneration,
    tokenizer: Tokenizer,
    moe: Mapping[str, Any] | None = None,
) -> None:
    """Weights rounded to bfloat16, configs, tokenizer and processor files.

    ``moe``: what the config says of a mixture of experts, whose weights published checkpoints
    have as [E, in, out].
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in as_bfloat16(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _target_config(model, ids, dict(moe or {})))
    save_prompt_files(folder, tokenizer)


def save_prompt_files(folder: Path, tokenizer: Tokenizer) -> None:
    """What a target has beside its weights and config: how to end, tokenizer and processor."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    write_json(folder / "generation_config.json", generation)
    _save_processor(folder, tokenizer, ids)


def save_draft(
    folder: Path,
    draft: Draft,
    target_ids: Tensor,
    vocab_size: int,
    ids: dict[str, int],
    aux_layers: tuple[int, ...] = AUX_LAYERS,
    target_type: str = "qwen3_vl",
) -> None:
    """SpecForge's tensors and config; ``target_ids`` are the draft vocabulary's target ids,
    ascending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target_ids = target_ids.cpu()
    tensors = as_bfloat16(draft)
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, value=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    attn, hidden = draft.midlayer.self_attn, draft.fc.out_features
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": ids["<|endoftext|>"],
        "draft_vocab_size": len(target_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
            "use_aux_hidden_state": True,
        },
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": draft.midlayer.mlp.gate_proj.out_features,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": attn.q_proj.out_features // HEAD_DIM,
        "num_hidden_layers": 1,
        "num_key_value_heads": attn.k_proj.out_features // HEAD_DIM,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "target_model_type": target_type,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }
    write_json(folder / "config.json", config)


def _block_config(draft: BlockDraft, num_target_layers: int) -> dict[str, Any]:
    """Return what z-lab's and DeepSpec's configs share: a Qwen3 config and the block's size."""
    shape = draft.shape
    types = ["sliding_attention" if window else "full_attention" for window in shape.windows]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": types,
        "max_position_embeddings": 4096,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": len(shape.windows),
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": num_target_layers,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "sliding_window": max(shape.windows) or None,
        "tie_word_embeddings": False,
        "use_sliding_window": any(shape.windows),
        "vocab_size": shape.vocab_size,
    }


def save_dflash(folder: Path, draft: BlockDraft, target: Any) -> None:
    """Save a DFlash or DFlash2 draft in z-lab's layout. Embeddings and head are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(as_bfloat16(draft), folder / "model.safetensors", metadata={"format": "pt"})
    shape = draft.shape
    own: dict[str, Any] = {
        "mask_token_id": shape.mask_id,
        "target_layer_ids": list(shape.aux_layers),
    }
    if shape.selector_rank:
        own |= {
            "conv_group_size": shape.conv_group,
            "conv_kernel_size": shape.conv_kernel,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_top_k,
        }
    name = "DFlash2DraftModel" if shape.selector_rank else "DFlashDraftModel"
    config = _block_config(draft, target.config.get_text_config().num_hidden_layers)
    config |= {"architectures": [name], "dflash_config": own, "is_causal": False}
    write_json(folder / "config.json", dict(sorted(config.items())))


def save_dspark(folder: Path, draft: BlockDraft, target: Any) -> None:
    """Save a DSpark draft in DeepSpec's layout, with copies of the target's embeddings and head."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen = {
        "embed_tokens.weight": target.model.language_model.embed_tokens.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    copies = {name: t.detach().cpu().bfloat16().contiguous() for name, t in frozen.items()}
    tensors = as_bfloat16(draft) | copies
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = draft.shape
    config = _block_config(draft, target.config.text_config.num_hidden_layers) | {
        "architectures": ["Qwen3DSparkModel"],
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": shape.markov_rank,
        "mask_token_id": shape.mask_id,
        "num_anchors": 512,
        "target_layer_ids": list(shape.aux_layers),
    }
    write_json(folder / "config.json", dict(sorted(config.items())))
