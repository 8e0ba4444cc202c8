"""Name and reject drafters that are not supported, and drafts that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.draft_keys import foreign_key
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["refuse_other_drafters", "refuse_unsupported"]

# Pattern of a lower-case architecture or speculators_model_type -> the drafter. The first match
# counts.
_NAMES: Mapping[str, str] = {
    r"eagle_?-?[4-9]": "EAGLE-4 or later",
    r"parallel_?draft": "parallel drafting",
    r"dflare": "DFlare",
    r"jet_?spec": "JetSpec",
    r"domino": "Domino",
    r"xpress": "XPress",
    r"medusa": "Medusa",
    r"hydra": "Hydra",
    r"lilicorr": "LiLiCorr",
    r"^uno(draft|model|for|$)": "UNO",
    r"ngram|suffix_?decod": "an n-gram drafter",
    r"mlp_?speculator": "an MLP speculator",
    r"mtp|nextn|multi_?token_?pred": "multi-token prediction",
    r"eagle2|^eagle$|^eagle(llama|qwen)\w*|forcausallmeagle$": "EAGLE-1/2",
}
# The same, of drafters that another reader supports (``drafts/block``).
_BLOCK_NAMES: Mapping[str, str] = {r"dflash": "DFlash", r"dspark": "DSpark"}
_NAMING = (
    "speculators_model_type",
    "speculators_config.algorithm",
    "speculative_algorithm",
    "dflash_config.projector_type",
    "model_type",
)
# Pattern of a tensor's name -> the drafter that has it.
_TENSORS: Mapping[str, str] = {
    r"(.*\.)?medusa_heads?\.|\d+\.\d+\.linear\.": "Medusa",
    r"parallel_draft_heads\.": "ModelOpt's parallel draft heads",
    r"(.*\.)?(prefix_gru|embed_proj)\.": "Domino",
    r".*(k_proj_target|v_proj_target)\.|(.*\.)?layer_fusion_weights": "DFlare",
    r"(.*\.)?(efficient_lm_head|candidate_head|low_rank_head)": "EAGLE-4 or later",
    r".*self_attn\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj)\.": (
        "a draft with multi-head latent attention"
    ),
    r".*\.(experts|block_sparse_moe)\.": "a draft with a mixture of experts",
    r".*\.lora_[AB]\.": "a draft trained with adapters on its target (adapter_model.safetensors)",
}
_BLOCK_TENSORS: Mapping[str, str] = {r"(.*\.)?(markov_|confidence_head)": "DSpark"}
_QUANTISED = re.compile(
    r".*\.(weight_scale(_inv|_2)?|input_scale|[qkv]_scale|qweight|qzeros|scales|g_idx|weight_packed)$"
)


def refuse_unsupported(files: DraftFiles) -> None:
    """Check that ``files`` are not those of a drafter that no reader supports, nor quantised.

    Raises:
        UserError: they are. The message names the drafter.
    """
    where = files.directory
    kind = _quantised(files)
    if kind:
        raise UserError(
            f"{where}: a quantised draft ({kind}): not supported. Use the unquantised one."
        )
    kind = _named(files, _NAMES) or _by_tensors(files, _TENSORS)
    if kind:
        raise UserError(
            f"{where}: {kind}: not supported. Use an EAGLE-3, P-EAGLE, DFlash or DSpark draft."
        )


def refuse_other_drafters(files: DraftFiles) -> None:
    """Check that ``files`` may be an EAGLE-3 draft.

    Raises:
        UserError: this is another drafter, or quantised. The message names it.
    """
    where = files.directory
    refuse_unsupported(files)
    kind = _named(files, _BLOCK_NAMES) or _by_config(files) or foreign_key(files)
    kind = kind or _by_tensors(files, _BLOCK_TENSORS) or _of_one_state(files)
    if kind:
        raise UserError(f"{where}: {kind}: not supported. Use an EAGLE-3 draft.")
    missing = [
        n
        for n in ("fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")
        if n not in files.tensors
    ]
    if missing:
        what = (
            f"architecture {quote(files.architecture)}"
            if files.architecture
            else "no architecture in its config"
        )
        raise UserError(f"{where}: not an EAGLE-3 draft: {', '.join(missing)} missing ({what})")


def _named(files: DraftFiles, drafters: Mapping[str, str]) -> str:
    names = [("architecture", name) for name in files.find("architectures", "texts") or ()]
    names += [(key, files.find(key, "text") or "") for key in _NAMING]
    for key, name in names:
        for pattern, what in drafters.items():
            if re.search(pattern, name.lower()):
                return f"{what} ({key} {quote(name)})"
    return ""


def _by_config(files: DraftFiles) -> str:
    kind = files.find("speculators_model_type", "text")
    if kind not in {None, "eagle3", "peagle"}:
        return f"a speculator of another kind (speculators_model_type {quote(kind)})"
    if files.find("eagle_config.use_aux_hidden_state", "flag") is False:
        return "EAGLE-1/2 (eagle_config.use_aux_hidden_state is false)"
    if files.find("eagle_config.use_mtp_layernorm", "flag"):
        return "multi-token prediction (eagle_config.use_mtp_layernorm)"
    step = files.find("eagle_config.parallel_draft_step", "whole")
    return (
        f"parallel drafting (eagle_config.parallel_draft_step {step})"
        if step not in {None, 0, 1}
        else ""
    )


def _by_tensors(files: DraftFiles, drafters: Mapping[str, str]) -> str:
    for name, ref in files.tensors.items():
        for pattern, what in drafters.items():
            if re.match(pattern, name):
                return f"{what} ({clip(ref.name)})"
    return ""


def _of_one_state(files: DraftFiles) -> str:
    """Describe a draft whose fc takes an embedding and one hidden state; empty otherwise."""
    fc = files.tensors.get("fc.weight")
    if (
        fc is not None
        and len(fc.shape) == 2
        and fc.shape[1] == 2 * fc.shape[0]
        and not _has_wide_layer(files)
    ):
        return f"EAGLE-1/2 (fc.weight {list(fc.shape)} takes an embedding and one hidden state)"
    return ""


def _has_wide_layer(files: DraftFiles) -> bool:
    """Return whether layer 0 reads [embedding, hidden], as in every EAGLE-3 draft."""
    q, fc = files.tensors.get("layers.0.self_attn.q_proj.weight"), files.tensors["fc.weight"]
    return q is not None and q.shape[-1:] == (2 * fc.shape[0],)


def _method(config: Any) -> str:
    """Return the quantiser and its algorithm, as the config spells them."""
    if not isinstance(config, dict):
        return clip(config or "unnamed")
    return (
        " ".join(clip(config[key], 80) for key in ("quant_method", "quant_algo") if config.get(key))
        or "unnamed"
    )


def _quantised(files: DraftFiles) -> str:
    for key in ("quantization_config", "compression_config"):
        config = files.config.get(key)
        if config:
            return f"{key}: {_method(config)}"
    file = files.directory / "hf_quant_config.json"
    if file.exists():
        return f"{file.name}: {_method(read_json(file).get('quantization'))}"
    for name, ref in files.tensors.items():
        if _QUANTISED.match(name) or (
            name.endswith("_proj.weight") and ref.dtype not in FLOAT_DTYPES
        ):
            return f"{clip(ref.name)}, {ref.dtype}"
    return ""
