"""Find the family of a checkpoint or a bundle."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from trt_eagle3.checkpoint.draft import describe_draft
from trt_eagle3.checkpoint.model_config import ModelConfig, read_model_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.family import Family, FamilyVision
from trt_eagle3.spec import TargetSpec

__all__ = ["FAMILIES", "family_named", "family_of", "read_target", "tower_of"]

FAMILIES = {
    "deepseek_vl": "trt_eagle3.families.deepseek_vl:FAMILY",
    "deepseek_vl_hybrid": "trt_eagle3.families.deepseek_vl_hybrid:FAMILY",
    "internvl": "trt_eagle3.families.internvl:FAMILY",
    "llama": "trt_eagle3.families.llama:FAMILY",
    "qwen2": "trt_eagle3.families.qwen2:FAMILY",
    "qwen2_5_vl": "trt_eagle3.families.qwen2_5_vl:FAMILY",
    "qwen3": "trt_eagle3.families.qwen3:FAMILY",
    "qwen3_5": "trt_eagle3.families.qwen3_5:FAMILY",
    "qwen3_5_moe": "trt_eagle3.families.qwen3_5_moe:FAMILY",
    "qwen3_5_moe_text": "trt_eagle3.families.qwen3_5_moe:TEXT_FAMILY",
    "qwen3_5_text": "trt_eagle3.families.qwen3_5:TEXT_FAMILY",
    "qwen3_moe": "trt_eagle3.families.qwen3_moe:FAMILY",
    "qwen3_next": "trt_eagle3.families.qwen3_next:FAMILY",
    "qwen3_omni_moe": "trt_eagle3.families.qwen3_omni_moe:FAMILY",
    "qwen3_vl": "trt_eagle3.families.qwen3_vl:FAMILY",
    "qwen3_vl_moe": "trt_eagle3.families.qwen3_vl_moe:FAMILY",
}
"""``model_type`` of a checkpoint -> the place of its family."""

_FOREIGN = {
    "mllama": "Llama 3.2 Vision",
    "llama4": "Llama 4",
    "gemma": "Gemma",
    "paligemma": "PaliGemma",
    "multi_modality": "DeepSeek-VL or Janus in DeepSeek's own layout",
    "glm4": "GLM-4",
    "llava": "LLaVA",
    "qwen4_exp": "Qwen4-Exp",
}
"""Prefix of ``model_type`` -> title of a family that is not supported but in demand."""


def read_target(directory: Path) -> TargetCheckpoint:
    """Read a target checkpoint: its config, and the places of its tensors, which must agree.

    Raises:
        UserError: the family is unknown, the kind is not supported, or tensors are missing,
            surplus, misshapen or quantised. The message names each.
    """
    config = read_model_config(directory)
    try:
        return _read(config)
    except UserError:
        # drafts share the model_type llama with targets
        if found := describe_draft(directory):
            raise UserError(
                f"{directory}: {found}, expected a target. Name the draft in draft.checkpoint or "
                "--draft."
            ) from None
        raise


def _read(config: ModelConfig) -> TargetCheckpoint:
    model_type = config.get("model_type", "text")
    if model_type not in FAMILIES:
        architecture = (config.get("architectures", "texts") or [None])[0]
        raise UserError(
            f"{config.file.parent}: {_foreign(str(model_type))}model_type {quote(model_type, 80)}, "
            f"architecture {quote(architecture, 80)}: not supported. Supported: "
            f"{', '.join(FAMILIES)}."
        )
    return family_named(model_type).read(config)


def _foreign(model_type: str) -> str:
    """Return the title of a known unsupported family; empty if it is unknown."""
    titles = (title for start, title in _FOREIGN.items() if model_type.startswith(start))
    return next((f"{title}, " for title in titles), "")


def family_of(spec: TargetSpec) -> Family:
    """Return the family that read ``spec``.

    Raises:
        UserError: this version has no such family.
    """
    return family_named(spec.family)


def tower_of(spec: TargetSpec) -> FamilyVision:
    """Return the tower of a target that has one."""
    tower = family_of(spec).vision
    assert tower is not None, f"{spec.family}: images without a tower"
    return tower


@cache
def family_named(model_type: str) -> Family:
    """Return a family by ``model_type``.

    Raises:
        UserError: there is no such family.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"target family: expected one of {', '.join(FAMILIES)}, got {quote(model_type, 80)}. "
            "Rebuild the bundle, or update trt-eagle3."
        )
    module, name = FAMILIES[model_type].split(":")
    family: Family = getattr(import_module(module), name)
    return family
