"""Convert SmolLM2-135M-Instruct from a GGUF file to an ordinary checkpoint in bfloat16.

    python examples/smollm2/convert.py GGUF engines/smollm2/target

The folder gets ``model.safetensors``, ``config.json``, ``generation_config.json``,
``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``. Any GGUF file of the
Llama architecture with a byte-level BPE works whose pre-tokenizer is SmolLM's. Needs the package
``gguf``, and no compiler.

# Shapes: O output rows, I input columns, V vocabulary
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

__all__ = ["convert"]

CONTROL = 3  # GGUF's token type of special tokens
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Metadata:
    """The keys of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self.fields = reader.fields

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise SystemExit(f"the GGUF file has no key {key}: convert a file of a Llama model.")
        return self.fields[key].contents()


def half_rope(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the channels of each head.

    llama.cpp rotates neighbours (2i, 2i + 1); transformers rotates halves (i, i + half).
    ``rows``: [O, I] of q or k.
    """
    paired = rows.reshape(heads, -1, 2, rows.shape[-1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def tensors(reader: GGUFReader, meta: Metadata) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by transformers' name, in bfloat16."""
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}"
            if parts[2] in heads:
                values = half_rope(values, heads[parts[2]])
        else:
            name = NAMES[parts[0]]
        yield f"{name}.weight", torch.from_numpy(values.copy()).bfloat16()


def config(meta: Metadata, *, tied: bool) -> dict[str, Any]:
    """Return config.json."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF holds it as float32: 1e-5 comes as 9.9999997e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "vocab_size": meta["llama.vocab_size"],
    }


def tokenizer(meta: Metadata) -> Tokenizer:
    """Return the tokenizer, with the pre-tokenizer that the file names.

    SmolLM's splits every digit off, then splits as GPT-2 does.
    """
    kind = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"tokenizer {kind}: expected ('gpt2', 'smollm'), the one known here.")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return made


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    roles = {
        f"{ours}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for ours, key in names.items()
    }
    return roles | {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint of ``gguf`` to ``folder``.

    Raises:
        SystemExit: the file is of another architecture or has another tokenizer.
    """
    reader = GGUFReader(gguf)
    meta = Metadata(reader)
    if meta["general.architecture"] != "llama":
        raise SystemExit(
            f"{gguf}: expected the architecture llama, got {meta['general.architecture']}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tensors(reader, meta))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    eos, pad = meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.padding_token_id"]
    files = {
        "config.json": config(meta, tied="lm_head.weight" not in weights),
        "generation_config.json": {"eos_token_id": eos, "pad_token_id": pad},
        "tokenizer_config.json": tokenizer_config(meta),
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="gets the checkpoint")
    args = parser.parse_args()
    convert(args.gguf, args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
