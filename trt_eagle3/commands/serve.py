"""Deploy a bundle to Triton, TensorRT-LLM or vLLM, and serve OpenAI clients."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import click

from trt_eagle3.commands.console import (
    built_bundle,
    bundle_argument,
    cache_option,
    draft_option,
    json_option,
    print_json,
    set_option,
    show,
    target_argument,
    tensor_parallel_option,
)
from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.errors import UserError
from trt_eagle3.io.child_environment import API_KEY_VARIABLE
from trt_eagle3.io.log_levels import LOG_LEVELS

__all__ = ["deploy", "serve"]


@click.command()
@bundle_argument
@click.option(
    "--repository", required=True, type=click.Path(path_type=Path), help="Write to this folder."
)
@click.option(
    "--target",
    type=click.Choice(["triton", "tensorrt-llm", "vllm"]),
    default="triton",
    show_default=True,
    help="Write for this server.",
)
@click.option("--name", help="triton: name of the model in requests.  [default: the bundle's name]")
@click.option(
    "--env",
    "environment",
    help="triton: run the model in this Python: server, interpreter, or a packed .tar.gz.",
)
@click.option("--image", help="triton: base image of the containers.")
@set_option("triton: set a limit on requests, such as max_media=4; may be repeated.")
@click.option("--runtime-version", help="tensorrt-llm: write for this version, 1.2 or 1.4.")
@click.option(
    "--tensor-parallel-size",
    type=int,
    help="tensorrt-llm, vllm: split each copy of the target over this many GPUs.",
)
@click.option("--data-parallel-size", type=int, help="vllm: run this many copies of the target.")
@json_option
def deploy(bundle: Path, repository: Path, target: str, as_json: bool, **options: Any) -> None:
    """Deploy BUNDLE to Triton, TensorRT-LLM or vLLM.

    Writes a Triton model repository with BUNDLE in it, or the input of another runtime.
    """
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.runtimes.tensorrt_llm.bundle import deploy as to_tensorrt_llm
    from trt_eagle3.runtimes.vllm.bundle import deploy as to_vllm
    from trt_eagle3.triton.repository import deploy as to_triton

    options["serving"] = parse_assignments(options.pop("settings"))
    given = {name: value for name, value in options.items() if value not in (None, {})}
    targets: dict[str, Callable[..., Any]] = {
        "triton": to_triton,
        "tensorrt-llm": to_tensorrt_llm,
        "vllm": to_vllm,
    }
    run = targets[target]
    if foreign := sorted(given.keys() - signature(run).parameters.keys()):
        raise UserError(f"--target {target}: does not use {foreign[0]}. Leave it out.")
    result = run(bundle, repository, **given)
    if as_json:
        print_json(result.to_dict())
    else:
        show(*result.lines())


_BUILD_KEYS = ("target", "draft", "engine", "limits", "speculation", "prompts")
"""Keys of --set that a build takes; the others are limits on requests."""


@click.command()
@target_argument
@draft_option
@cache_option
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address; 0.0.0.0 accepts every client.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Listen on this port.",
)
@click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help="Answer only clients that send this key; TRT_EAGLE3_API_KEY is safer.",
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name of the model in requests, instead of the bundle's; may be repeated.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    help="Fetch images from this host, such as *.example.com; may be repeated.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Accept requests from web pages of this origin, or * for all; may be repeated.",
)
@click.option(
    "--forwarded-allow-ips",
    default="",
    help="Trust X-Forwarded-For of these proxies, such as 10.0.0.0/8, or * for any.",
)
@click.option(
    "--allow-host-header",
    "host_headers",
    multiple=True,
    help="Accept requests with this Host header, or * for any; may be repeated.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="Serve HTTPS with the certificate chain in this PEM file.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path),
    help="Read the certificate's key from this PEM file.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="Log messages of this level and above.",
)
@click.option("--access-log/--no-access-log", default=True, help="Log one line per request.")
@click.option("--chat-page/--no-chat-page", default=True, help="Serve a chat page at /.")
@click.option(
    "--strict-fields",
    is_flag=True,
    help="Refuse unknown fields of requests instead of ignoring them.",
)
@click.option(
    "--generation-config/--no-generation-config",
    default=True,
    help="Use the checkpoint's generation_config.json for unset sampling parameters.",
)
@click.option(
    "--tool-format",
    type=click.Choice(["auto", "hermes", "qwen3_xml", "qwen3_coder", "llama3_json", "llama3"]),
    default="auto",
    show_default=True,
    metavar="FORMAT",
    help="Format of tool calls: hermes, qwen3_xml, qwen3_coder, llama3_json, llama3, or auto, the "
    "format in the chat template.",
)
@tensor_parallel_option
@click.option(
    "--max-step-ms",
    type=float,
    help="Target for the time between tokens while prompts of others run.  "
    f"[default: {MAX_STEP_MS:g}]",
)
@set_option(
    "Set a limit on requests, such as max_media=4. TARGET is a checkpoint: also a key of the build "
    "config, such as engine.dtype=float16. May be repeated."
)
def serve(
    target: str,
    draft: str | None,
    cache: Path | None,
    settings: tuple[str, ...],
    hosts: tuple[str, ...],
    host: str,
    port: int,
    log_level: str,
    strict_fields: bool,
    generation_config: bool,
    tool_format: str,
    tensor_parallel: int | None,
    max_step_ms: float | None,
    **http: Any,
) -> None:
    """Serve TARGET to OpenAI clients, with a chat page at /.

    TARGET is a bundle, or a checkpoint (a folder or a Hub id), which is built into a cache folder
    and reused while nothing changes. Without --set a checkpoint runs on a GPU with torch in
    bfloat16, and without a GPU on the CPU with onnxruntime.
    """
    from trt_eagle3.io.assignments import parse_assignments
    from trt_eagle3.serving import ServingConfig
    from trt_eagle3.serving.http_options import HttpOptions
    from trt_eagle3.serving.server import serve as run

    chosen: dict[str, Any] = parse_assignments(settings)
    built = {key: chosen.pop(key) for key in _BUILD_KEYS if key in chosen}
    if hosts:
        chosen["allowed_hosts"] = [*chosen.get("allowed_hosts", []), *hosts]
    if strict_fields:
        chosen["strict_fields"] = True
    if not generation_config:
        chosen["generation_config"] = False
    if tool_format != "auto":
        chosen["tool_format"] = tool_format
    if max_step_ms is not None:
        chosen["max_step_ms"] = max_step_ms
    options = HttpOptions(**http)
    serving = ServingConfig.from_mapping(chosen, "--set")
    bundle = built_bundle(target, draft, built, cache)
    run(
        bundle,
        serving=serving,
        http=options,
        host=host,
        port=port,
        log_level=log_level,
        tensor_parallel=tensor_parallel,
    )
