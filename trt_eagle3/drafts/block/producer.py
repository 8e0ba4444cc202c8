"""The conventions of the trainers of block drafts, as data.

z-lab's and SpecForge's DFlash files are alike, and their code agrees on all that is read from them.
Facts from the ``dflash`` 0.1.0 package (z-lab), DeepSpec, SpecForge 0.2, speculators 0.9,
ModelOpt 0.47 and AngelSlim 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["PRODUCERS", "BlockProducer"]


@dataclass(frozen=True)
class BlockProducer:
    """One trainer's conventions.

    Attributes:
        evidence: describes the evidence in the files for this producer; empty if there is none.
        aux_key: the key of the target's layer ids.
        aux_ids: meaning of an id. ``out`` k = output of decoder layer k. ``state`` j = hidden state
            after j layers, which is out(j - 1).
        final_norm: whether the state of the last layer is the one after the target's final norm.
        aux_pre_deepstack: as in ``DraftManifest``.
        window_rule: as in ``BlockManifest``.
        plain_rope: whether it trains without the scaling that its exporter writes.
    """

    name: str
    evidence: Callable[[DraftFiles], str]
    aux_key: str = "target_layer_ids"
    aux_ids: Literal["out", "state"] = "out"
    final_norm: bool = True
    aux_pre_deepstack: bool = True
    window_rule: Literal["row", "anchor"] = "row"
    plain_rope: bool = False

    def read_rope(self, config: RopeConfig, _: ResolvedFields) -> RopeReading:
        """Read the draft's own rope: one axis over whole heads, as in Qwen3."""
        source = (
            Source("config", config.where)
            if config.values or config.base
            else Source("default", "no rope key: transformers' Qwen3 uses 1e4")
        )
        base, kind, warning = config.base or DEFAULT_BASE, config.kind(), ""
        if config.sections:
            warning = (
                "rope: mrope_section is ignored: positions of a block draft are sequence indices"
            )
        if self.plain_rope:
            warning = (
                f"rope: base {base:g} is the target's, which {self.name}'s exporter writes. Under "
                "transformers 5 it trains with 1e4 unless the draft's config sets a base. If that "
                "trained it: draft.overrides.rope: {base: 1e4}; probe measures which fits"
            )
            if kind != "default":
                warning += (
                    f". rope_type {kind} is of the export only and not used. To use it: "
                    f"draft.overrides.rope: {{kind: {kind}}}"
                )
            kind = "default"
        return RopeReading("default" if kind == "mrope" else kind, base, source, warning=warning)


def _speculators(files: DraftFiles) -> str:
    kind = files.find("speculators_model_type", "text")
    if kind:
        return f"speculators_model_type {kind}"
    return f"architecture {files.architecture}" if "Speculator" in files.architecture else ""


def _deepspec(files: DraftFiles) -> str:
    return f"architecture {files.architecture}" if files.architecture == "Qwen3DSparkModel" else ""


def _specforge(files: DraftFiles) -> str:
    return f"architecture {files.architecture}" if files.architecture == "DSparkDraftModel" else ""


def _angelslim(files: DraftFiles) -> str:
    named = files.architecture == "QwenDFlashDraftModel"
    return f"architecture {files.architecture}" if named else ""


def _modelopt(files: DraftFiles) -> str:
    for key in ("use_confidence_head", "causal", "use_swa"):
        if files.find(f"dflash_config.{key}", "flag") is not None:
            return f"architecture {files.architecture} with dflash_config.{key}"
    return ""


def _zlab(files: DraftFiles) -> str:
    return f"architecture {files.architecture}"


PRODUCERS = (
    BlockProducer(
        "speculators",
        _speculators,
        aux_key="aux_hidden_state_layer_ids",
        aux_ids="state",
        final_norm=False,  # its training data come from vLLM
        aux_pre_deepstack=False,
        window_rule="anchor",
    ),
    BlockProducer("deepspec", _deepspec),
    BlockProducer("specforge", _specforge),
    BlockProducer("angelslim", _angelslim),
    BlockProducer("modelopt", _modelopt, plain_rope=True),
    BlockProducer("z-lab", _zlab),
)
"""Producers in the order in which they are tested. The last accepts every draft."""
