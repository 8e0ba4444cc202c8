"""Read drafts of NVIDIA ModelOpt.

Facts from nvidia-modelopt 0.47.0, torch/export/plugins/hf_spec_export.py and torch/speculative.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.draft_files import DraftFiles
from trt_eagle3.checkpoint.manifest import Source
from trt_eagle3.checkpoint.producer import DEFAULT_BASE, Producer, RopeReading
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.checkpoint.rope_schedule import RopeConfig

__all__ = ["MODELOPT", "OWN_KEY"]

OWN_KEY = "eagle_config.use_last_layernorm"
"""A key that only ModelOpt's exporter writes."""

_INJECTED = {"factor": 32.0, "original_max_position_embeddings": 2048}


def _evidence(files: DraftFiles) -> str:
    named = files.architecture == "LlamaForCausalLMEagle3" and files.layer_prefix == "layers"
    if named and files.find(OWN_KEY, "any") is not None:
        return f"LlamaForCausalLMEagle3 with {OWN_KEY}"
    return (
        "LlamaForCausalLMEagle3 with layers.N tensors and no t2d"
        if named and "t2d" not in files.tensors
        else ""
    )


def _read_rope(config: RopeConfig, _: ResolvedFields) -> RopeReading:
    base = config.base or DEFAULT_BASE
    kind = config.kind()
    numbers = {
        key: value
        for key, value in config.values.items()
        if key not in {"rope_type", "type", "rope_theta"}
    }
    if kind == "yarn" and numbers == _INJECTED:
        return RopeReading(
            "default",
            base,
            Source(
                "convention", "the exporter writes yarn (32, 2048) over the plain rope of training"
            ),
            warning=(
                "rope: config.json has yarn, factor 32, which ModelOpt's exporter writes over the "
                "plain rope of "
                "training. To use yarn for contexts past 2048: draft.overrides.rope: {kind: "
                "yarn}"
            ),
        )
    source = (
        Source("config", config.where)
        if config.values or config.base
        else Source("default", "no rope key")
    )
    return RopeReading("default" if kind == "mrope" else kind, base, source)


def _quirks(fields: ResolvedFields) -> None:
    if fields.files.find("eagle_config.use_last_layernorm", "flag") is False:
        raise fields.error(
            "eagle_config.use_last_layernorm is false: a draft without a final norm: not supported"
        )
    keys = ("eagle_config.return_hidden_post_norm", "eagle_config.norm_output", "norm_output")
    post = next((key for key in keys if fields.files.find(key, "flag")), None)
    if post:
        fields.put("feedback", "post_norm", "config", post)
    if (
        fields.files.find("eagle_config.use_input_layernorm_in_first_layer", "flag")
        and "first_norm" not in fields.overrides
    ):
        fields.warn(
            "first_norm: ModelOpt 0.47 trains with hidden_norm(input_layernorm(h)). Earlier "
            "revisions and every server use hidden_norm(h), as here. For the former: "
            "draft.overrides.first_norm: double; probe measures which fits"
        )


MODELOPT = Producer(
    name="modelopt",
    evidence=_evidence,
    read_rope=_read_rope,
    aux_keys=("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    aux_ids="out",
    aux_pre_deepstack=True,
    image_rows="vision",
    positions="linear",
    quirks=_quirks,
)
