"""Read an EAGLE-3 draft of an unknown producer as most servers do, with a warning."""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import AUX_KEYS, DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig
from trt_eagle3.errors import quote

__all__ = ["GENERIC"]


def _evidence(files: DraftFiles) -> str:
    return f"EAGLE-3 tensors; architecture {quote(files.architecture)} is of no known producer"


def _read_rope(config: RopeConfig, _: ResolvedFields) -> RopeReading:
    """Read the rope by mrope_section, as sglang and vLLM do, not by its kind."""
    base = config.base or DEFAULT_BASE
    source = (
        Source("config", config.where)
        if config.values or config.base
        else Source("default", "no rope key: 1e4")
    )
    kind = "default" if config.kind() == "mrope" else config.kind()
    if config.sections:
        layout: RopeReading = RopeReading(kind, base, source, "chunked", config.sections)
        interleaved = RopeReading(kind, base, source, "interleaved", config.sections)
        return interleaved if config.interleaved else layout
    return RopeReading(kind, base, source)


def _quirks(fields: ResolvedFields) -> None:
    fields.warn(
        "unknown producer: fields that its files leave open are read as most servers do. Run "
        "probe on it"
    )
    if fields.files.find("norm_before_residual", "flag"):
        fields.put("residual", "normed", "config", "norm_before_residual")
    if fields.files.find("norm_output", "flag") or fields.files.find(
        "eagle_config.norm_output", "flag"
    ):
        fields.put("feedback", "post_norm", "config", "norm_output")


GENERIC = Producer(
    name="generic",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=AUX_KEYS,
    aux_ids="out",
    aux_pre_deepstack=False,
    quirks=_quirks,
)
