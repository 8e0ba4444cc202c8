"""Which family a checkpoint or a bundle belongs to."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from trt_eagle3.checkpoint.model_config import read_model_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.family import Family, FamilyVision
from trt_eagle3.spec import TargetSpec

__all__ = ["FAMILIES", "family_named", "family_of", "read_target", "tower_of"]

FAMILIES = {
    "internvl": "trt_eagle3.families.internvl:FAMILY",
    "qwen2_5_vl": "trt_eagle3.families.qwen2_5_vl:FAMILY",
    "qwen3": "trt_eagle3.families.qwen3:FAMILY",
    "qwen3_5": "trt_eagle3.families.qwen3_5:FAMILY",
    "qwen3_5_moe": "trt_eagle3.families.qwen3_5_moe:FAMILY",
    "qwen3_5_moe_text": "trt_eagle3.families.qwen3_5_moe:TEXT_FAMILY",
    "qwen3_5_text": "trt_eagle3.families.qwen3_5:TEXT_FAMILY",
    "qwen3_moe": "trt_eagle3.families.qwen3_moe:FAMILY",
    "qwen3_omni_moe": "trt_eagle3.families.qwen3_omni_moe:FAMILY",
    "qwen3_vl": "trt_eagle3.families.qwen3_vl:FAMILY",
    "qwen3_vl_moe": "trt_eagle3.families.qwen3_vl_moe:FAMILY",
}
"""``model_type`` of a checkpoint -> where its family is."""

_FOREIGN = {
    "mllama": "Llama 3.2 Vision",
    "llama4": "Llama 4",
    "gemma": "Gemma",
    "paligemma": "PaliGemma",
    "deepseek_vl": "DeepSeek-VL",
    "glm4": "GLM-4",
    "llava": "LLaVA",
}
"""How ``model_type`` begins -> families that people ask for and that are not read."""


def read_target(directory: Path) -> TargetCheckpoint:
    """Read a target checkpoint: its config, and the places of its tensors, which must agree.

    Raises:
        UserError: no checkpoint of a known family, a kind of it that is not supported, or tensors
            that are missing, surplus, misshapen or quantised, each by name.
    """
    config = read_model_config(directory)
    model_type = config.get("model_type", "text")
    if model_type not in FAMILIES:
        architecture = (config.get("architectures", "texts") or [None])[0]
        raise UserError(
            f"{directory}: {_foreign(str(model_type))}model_type {quote(model_type, 80)}, "
            f"architecture {quote(architecture, 80)}: not supported. Targets that are read: "
            f"{', '.join(FAMILIES)}."
        )
    return family_named(model_type).read(config)


def _foreign(model_type: str) -> str:
    """What people call a family that is not read, where it is known."""
    titles = (title for start, title in _FOREIGN.items() if model_type.startswith(start))
    return next((f"{title}, " for title in titles), "")


def family_of(spec: TargetSpec) -> Family:
    """The family that ``spec`` was read by.

    Raises:
        UserError: this version knows no such family.
    """
    return family_named(spec.family)


def tower_of(spec: TargetSpec) -> FamilyVision:
    """The tower of a target that has one."""
    tower = family_of(spec).vision
    assert tower is not None, f"{spec.family}: images without a tower"
    return tower


@cache
def family_named(model_type: str) -> Family:
    """A family by ``model_type``.

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
