"""The canonical names of a block draft's tensors, and the method that its config names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trt_eagle3.checkpoint.config_value import config_value
from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["SECTIONS", "Method", "canonical", "names_block", "named_method"]

Method = Literal["dflash", "dflash2", "dspark"]

SECTIONS = ("dflash_config", "dspark_config", "")
"""Config sections that may hold the method's keys; the last is the top level."""

# Names by pattern: early SpecForge nests the heads under ``logit_head.``, ModelOpt has them flat.
# Codebooks are published without ``.weight``; a copy that transformers saved has it.
_ALIASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"logit_head\.", ""),
        (r"(markov_w[12]|gate_proj|joint_proj)(\.|$)", r"markov_head.\1\2"),
        (r"confidence_proj\.", "confidence_head.proj."),
        (r"(markov_head\.markov_w[12])$", r"\1.weight"),
        (r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$", r"\1"),
        (r"mask_embedding\.weight$", "mask_embedding"),
    )
)
_ARCHITECTURES: Mapping[str, Method] = {
    "DFlashDraftModel": "dflash",
    "QwenDFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlash2Speculator": "dflash2",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "Qwen3DSparkModel": "dspark",
}
_TYPES: Mapping[str, Method] = {"dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark"}
_NAMED = re.compile(r"dflash|dspark", re.IGNORECASE)


def names_block(folder: Path) -> bool:
    """Return whether the config in ``folder`` names DFlash or DSpark, or has one of their keys."""
    file = folder / "config.json"
    try:
        config = read_json(file)
        names = config_value(config, "architectures", "texts", file) or []
        kind = config_value(config, "speculators_model_type", "text", file) or ""
    except UserError:
        return False
    return any(_NAMED.search(name) for name in (*names, kind)) or any(
        isinstance(config.get(section), dict) for section in SECTIONS if section
    )


def named_method(files: DraftFiles) -> tuple[Method, str]:
    """Return the method that the config names, and its key.

    Raises:
        UserError: it names none, an unknown one, or several that contradict each other.
    """
    found = _ARCHITECTURES.get(files.architecture)
    if found is None:
        raise UserError(
            f"{files.directory}: architecture {quote(files.architecture, 80)}: not supported. Use "
            f"a block draft of one of {', '.join(_ARCHITECTURES)}."
        )
    place = f"architecture {files.architecture}"
    for key in ("dflash_config.projector_type", "speculators_model_type"):
        name = files.find(key, "text")
        if name is None:
            continue
        if name not in _TYPES:
            raise UserError(
                f"{files.directory}: {key}: expected one of {', '.join(_TYPES)}, got "
                f"{quote(name)}: not supported."
            )
        if found not in {"dflash", _TYPES[name]}:  # DFlashDraftModel may hold any of them
            raise UserError(
                f"{files.directory}: {place}, but {key} {quote(name)}. Correct config.json."
            )
        found, place = _TYPES[name], f"{key} {name}"
    return found, place


def canonical(files: DraftFiles) -> DraftFiles:
    """Rename the tensors to the names of ``BlockManifest``.

    Raises:
        UserError: two tensors have one name, or the mask's embedding is in a pickle.
    """
    tensors: dict[str, TensorRef] = {}
    for name, ref in files.tensors.items():
        for pattern, new in _ALIASES:
            name = pattern.sub(new, name, count=1) if pattern.match(name) else name
        if name in tensors:
            raise UserError(
                f"{files.directory}: {clip(ref.name)} and {clip(tensors[name].name)} are the same "
                "weight under two names"
            )
        tensors[name] = ref
    pickled = files.directory / "mask_embedding.pt"
    if pickled.exists() and "mask_embedding" not in tensors:
        raise UserError(
            f"{files.directory}: {pickled.name} is not read. Add its values to the safetensors as "
            "mask_embedding, one number per hidden channel."
        )
    return replace(files, tensors=tensors)
