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
    "qwen3": "trt_eagle3.families.qwen3:FAMILY",
    "qwen3_vl": "trt_eagle3.families.qwen3_vl:FAMILY",
}
"""``model_type`` of a checkpoint -> where its family is."""


def read_target(directory: Path) -> TargetCheckpoint:
    """Read a target checkpoint: its config, and the places of its tensors, which must agree.

    Raises:
        UserError: no checkpoint of a known family, a kind of it that is not supported, or tensors
            that are missing, surplus, misshapen or quantised, each by name.
    """
    config = read_model_config(directory)
    model_type = config.get("model_type", "text")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        architecture = (config.get("architectures", "texts") or [None])[0]
        hint = " Mixture-of-experts targets are not supported." if "moe" in str(model_type) else ""
        raise UserError(
            f"{directory}: expected a target of model_type {known}, got "
            f"{quote(model_type, 80)}, architecture {quote(architecture, 80)}.{hint}"
        )
    return family_named(model_type).read(config)


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
