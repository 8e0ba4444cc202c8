"""Options of vLLM, and what they are called here. ``docs/vllm.md`` has the same table."""

from __future__ import annotations

import re

__all__ = ["VLLM_NAMES", "called_here", "called_in_python"]

_NO_PIPELINE = (
    "no such option: engine.tensor_parallel shares a target. For several machines: "
    "trt-eagle3 deploy --target vllm"
)

VLLM_NAMES = {
    "model": "target.checkpoint",
    "revision": "target.revision",
    "speculative_config": "draft.checkpoint and speculation.steps; serve --draft",
    "speculative_model": "draft.checkpoint",
    "num_speculative_tokens": "speculation.steps",
    "max_model_len": "limits.max_seq_len",
    "max_num_seqs": "limits.max_batch_size",
    "gpu_memory_utilization": "limits.memory_fraction",
    "num_gpu_blocks_override": "limits.max_kv_tokens, in tokens",
    "enable_prefix_caching": "limits.prefix_cache",
    "no_enable_prefix_caching": "limits.prefix_cache=false",
    "enable_chunked_prefill": "no such option: prompts are always cut, by engine.prefill_chunk",
    "max_num_batched_tokens": "engine.prefill_chunk",
    "dtype": "engine.dtype",
    "kv_cache_dtype": "engine.kv_dtype",
    "calculate_kv_scales": "build --calibration",
    "quantization": "engine.weights",
    "cpu_offload_gb": "no such option: weights stay on the GPU. engine.weights makes them smaller",
    "block_size": "engine.page_size",
    "device": "engine.device",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": _NO_PIPELINE,
    "data_parallel_size": "no such option: start one server for each GPU, behind a router",
    "enforce_eager": "no such option: CUDA graphs are always used",
    "trust_remote_code": "no such option: code of a checkpoint is never run",
    "chat_template": "no such option: the checkpoint's own chat template is used",
    "tokenizer": "no such option: the checkpoint's own tokenizer is used",
    "enable_lora": "no such option: merge the adapter into the target's checkpoint",
    "max_logprobs": "no such option: a request may ask for 20 at most",
    "download_dir": "the environment variable HF_HOME",
    "limit_mm_per_prompt": "serve --set max_media=N",
    "mm_processor_kwargs": "mm_processor_kwargs of a request",
    "mm_processor_cache_gb": "serve --set image_cache_bytes=N",
    "allowed_media_domains": "serve --allow-host",
    "tool_call_parser": "serve --tool-format",
    "enable_auto_tool_choice": "no such option: tools are always on",
    "reasoning_parser": "no such option: reasoning is always parsed",
    "allowed_origins": "serve --cors-origin",
    "ssl_certfile": "serve --tls-cert",
    "ssl_keyfile": "serve --tls-key",
    "uvicorn_log_level": "serve --log-level",
    "disable_uvicorn_access_log": "serve --no-access-log",
}
"""vLLM's name -> a key of the build config, or what to do."""

_CONFIG_KEY = re.compile(r"([a-z]+)\.([a-z_]+)")
_IN_PYTHON = {
    "model": "bundle, the first argument",
    "speculative_config": "draft, and speculation.steps in settings",
    "speculative_model": "draft",
    "num_gpu_blocks_override": "settings={'limits': {'max_kv_tokens': VALUE}}, in tokens",
    "enable_prefix_caching": "prefix_cache",
    "no_enable_prefix_caching": "prefix_cache=False",
    "limit_mm_per_prompt": "max_items of media=MediaPolicy(...)",
    "mm_processor_cache_gb": "image_bytes of media_cache=MediaCacheSizes(...)",
    "allowed_media_domains": "allowed_hosts of media=MediaPolicy(...)",
    "tool_call_parser": "tool_format",
}
"""vLLM's name of an argument of ``LLM`` -> its name here, where it is no key of the config."""


def called_here(name: str) -> str | None:
    """Return what option ``name`` of vLLM is called here, for an error; None if it has no such.

    A flag (``--max-model-len``) becomes ``--set``. A section before a key is ignored.
    """
    ours = VLLM_NAMES.get(name.lstrip("-").replace("-", "_").rpartition(".")[2])
    if ours is None:
        return None
    if name.startswith("-") and _CONFIG_KEY.fullmatch(ours):
        return f"here it is called --set {ours}=VALUE, or {ours} in a build config"
    return ours if ours.startswith("no such option") else f"here it is called {ours}"


def called_in_python(name: str) -> str | None:
    """Return what vLLM's argument ``name`` of ``LLM`` is called here, for an error; else None.

    A key of the build config becomes a part of ``settings``.
    """
    if name in _IN_PYTHON:
        return f"here it is called {_IN_PYTHON[name]}"
    key = _CONFIG_KEY.fullmatch(VLLM_NAMES.get(name, ""))
    if key:
        section, field = key.groups()
        return f"here it is called settings={{'{section}': {{'{field}': VALUE}}}}"
    return called_here(name)
