"""Read drafts of vLLM speculators: EAGLE-3 and P-EAGLE.

Facts from speculators 0.9.0, models/eagle3 and models/peagle, and from vLLM 0.33's reader of its
configs.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["SPECULATORS"]


_ARCHITECTURES = ("Eagle3DraftModel", "Eagle3Speculator")


def _evidence(files: DraftFiles) -> str:
    kind = files.find("speculators_model_type", "text")
    if kind in {"eagle3", "peagle"}:
        return f"speculators_model_type {kind}"
    return f"architecture {files.architecture}" if files.architecture in _ARCHITECTURES else ""


def _read_rope(config: RopeConfig, _: ResolvedFields) -> RopeReading:
    warning = ""
    if config.sections:
        warning = (
            "rope: mrope_section is ignored, as in speculators' training, which has 1-D "
            "positions only"
        )
    kind = "default" if config.kind() == "mrope" else config.kind()
    source = (
        Source("config", f"transformer_layer_config {config.where}")
        if config.base
        else Source("default", "1e4")
    )
    return RopeReading(kind, config.base or DEFAULT_BASE, source, warning=warning)


def _quirks(fields: ResolvedFields) -> None:
    normed = fields.files.find("norm_before_residual", "flag")
    if normed is not None:
        fields.put("residual", "normed" if normed else "hidden", "config", "norm_before_residual")
    fields.put("residual", "normed", "convention", "norm_before_residual is absent: vLLM uses true")
    post = fields.files.find("norm_output", "flag")
    detail = "norm_output" if post is not None else "norm_output is absent"
    fields.put(
        "feedback",
        "post_norm" if post else "pre_norm",
        "config" if post is not None else "default",
        detail,
    )


SPECULATORS = Producer(
    name="speculators",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=("eagle_aux_hidden_state_layer_ids",),
    aux_ids="state",
    aux_pre_deepstack=False,  # its training data come from vLLM
    positions="linear",
    position_shift=1,
    whole_heads=True,
    quirks=_quirks,
)
