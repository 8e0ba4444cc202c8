"""Define the names of TensorRT-LLM's configuration, by version; unknown names are refused there.

Sources: ``tensorrt_llm/llmapi/llm_args.py`` of the 1.1 to 1.2 line, and the LLM API reference of
1.4.0rc1 (``Eagle3DecodingConfig``). Between them ``speculative_model_dir`` became
``speculative_model``, static trees and the two-model switch were removed, and dynamic trees became
usable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_eagle3.errors import UserError

__all__ = ["VERSIONS", "Version", "resolve_version"]

_LLM_ARGS = frozenset(
    {
        "model",
        "backend",
        "tensor_parallel_size",
        "max_batch_size",
        "max_seq_len",
        "kv_cache_config",
        "speculative_config",
    }
)
_KV_CACHE = frozenset({"enable_block_reuse", "free_gpu_memory_fraction", "dtype", "max_tokens"})
_SPECULATIVE = frozenset(
    {
        "decoding_type",
        "max_draft_len",
        "max_total_draft_tokens",
        "max_concurrency",
        "load_format",
        "use_dynamic_tree",
        "dynamic_tree_max_topK",
        "num_eagle_layers",
        "max_non_leaves_per_layer",
        "eagle3_layers_to_capture",
    }
)


@dataclass(frozen=True)
class Version:
    """One line of releases.

    Attributes:
        speculative: fields of ``speculative_config``. decoding_type: its name for EAGLE-3.
        draft_field: the field with the draft's path. dynamic_trees: whether they work.
        config_option: option of ``trtllm-serve``. triton: further fields of ``triton_config`` for
            its Triton model.
    """

    name: str
    decoding_type: str
    draft_field: str
    dynamic_trees: bool
    config_option: str
    speculative: frozenset[str]
    triton: Mapping[str, bool] = field(default_factory=dict)

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse a config with a field that this version does not have.

        Raises:
            UserError: an unknown field, by its full name.
        """
        known = {
            "": _LLM_ARGS,
            "kv_cache_config.": _KV_CACHE,
            "speculative_config.": self.speculative,
        }
        for prefix, fields in known.items():
            section = config if not prefix else config.get(prefix[:-1], {})
            unknown = sorted(set(section) - fields)
            if unknown:
                raise UserError(
                    f"TensorRT-LLM {self.name} has no field {prefix}{unknown[0]}. Known: "
                    f"{sorted(fields)}."
                )


VERSIONS: Mapping[str, Version] = {
    "1.2": Version(
        name="1.2",
        decoding_type="Eagle",
        draft_field="speculative_model_dir",
        dynamic_trees=False,
        config_option="--extra_llm_api_options",
        speculative=_SPECULATIVE
        | {
            "speculative_model_dir",
            "acceptance_window",
            "acceptance_length_threshold",
            "eagle_choices",
            "greedy_sampling",
            "posterior_threshold",
            "eagle3_one_model",
        },
    ),
    "1.4": Version(
        name="1.4",
        decoding_type="Eagle3",
        draft_field="speculative_model",
        dynamic_trees=True,
        triton={"multimodal": True},
        config_option="--config",
        speculative=_SPECULATIVE
        | {
            "speculative_model",
            "moe_backend",
            "draft_len_schedule",
            "acceptance_rate_window_size",
            "acceptance_rate_threshold",
            "use_rejection_sampling",
            "allow_advanced_sampling",
            "advanced_sampling_mode",
            "enable_penalty",
            "spec_dec_variant",
            "eagle3_model_arch",
            "sa_config",
        },
    ),
}


def resolve_version(text: str) -> Version:
    """Return the schema of a release such as ``1.2``, ``1.2.1`` or ``1.4.0rc1``.

    Raises:
        UserError: a release whose schema is unknown.
    """
    found = re.fullmatch(r"(\d+\.\d+)(\.\d+)?(rc\d+)?(\.post\d+)?", text)
    if found is None or found[1] not in VERSIONS:
        raise UserError(f"--runtime-version {text}: unknown version. Known: {', '.join(VERSIONS)}.")
    return VERSIONS[found[1]]
