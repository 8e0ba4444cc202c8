"""What is fuzzed: each reader of foreign text as a function of one text, run in a folder of its
own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.checkpoint.tensor_index import open_index, read_tensor
from trt_eagle3.config import load_config
from trt_eagle3.decode.sampling_params import GREEDY
from trt_eagle3.engine.bundle import BUNDLE_FILE, read_bundle
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.registry import read_target
from trt_eagle3.io.assignments import parse_assignments
from trt_eagle3.io.json_file import parse_json
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.prompts.prompt_file import read_questions
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.errors import RefusedError
from trt_eagle3.serving.json_reader import parse_request_json
from trt_eagle3.serving.openai.call import ReadCall
from trt_eagle3.serving.openai.chat import read_chat
from trt_eagle3.serving.openai.completions import read_completion
from trt_eagle3.serving.openai.responses import read_response
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.triton.request import read_order
from trt_eagle3.triton.tensors import INPUTS

__all__ = ["CORPUS", "TARGETS", "built_bundle"]

CORPUS = Path(__file__).parent / "corpus"
"""A folder per target, a file per case; ``sound...`` must be taken, the others taken or refused."""
_TYPES = {
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_BOOL": np.bool_,
}


def _safetensors(text: bytes, folder: Path) -> None:
    """A header, and 64 bytes of data."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    for ref in list(open_index(folder).values())[:3]:
        read_tensor(ref)


def _index(text: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(text)
    _link(DRAFT / "model.safetensors", folder / "one.safetensors")
    open_index(folder)


def _target(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    _link(TARGET / "model.safetensors", folder / "model.safetensors")
    read_target(folder)


def _patterns(text: bytes, _: Path) -> None:
    """Patterns of modules in a quantisation config, a list of JSON."""
    given = parse_json(text, "ignore")
    texts = given if isinstance(given, list) else [given]
    claim = Claim("compressed-tensors", {}, Path("config.json"), "quantization_config")
    patterns = ModulePatterns([t for t in texts if isinstance(t, str)], claim)
    for module in ("lm_head", "model.language_model.layers.10.mlp.experts.127.down_proj"):
        patterns.first(module)


def _draft(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    _link(DRAFT / "model.safetensors", folder / "model.safetensors")
    read_draft(folder, _target_spec(), cache=folder)


def _yaml(text: bytes, folder: Path) -> None:
    (folder / "c.yaml").write_bytes(text)
    load_config(folder / "c.yaml")


def _override(text: bytes, _: Path) -> None:
    parse_assignments([text.decode(errors="surrogateescape")])


def _template(text: bytes, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_bytes(text)
    ChatTemplate.from_directory(folder, processor=True).render([{"role": "user", "content": "hi"}])


def _prompts(text: bytes, folder: Path) -> None:
    (folder / "prompts.json").write_bytes(text)
    read_questions(folder / "prompts.json")


def _bundle(text: bytes, folder: Path) -> None:
    """``bundle.json`` of a bundle of the tiny target whose other files are as they were built."""
    for entry in built_bundle().iterdir():
        if entry.name == BUNDLE_FILE:
            (folder / BUNDLE_FILE).write_bytes(text)
        elif entry.is_dir():
            shutil.copytree(entry, folder / entry.name, copy_function=os.link, dirs_exist_ok=True)
        else:
            os.link(entry, folder / entry.name)
    read_bundle(folder)


@cache
def built_bundle() -> Path:
    """A bundle without a draft, built once."""
    folder = tempfile.TemporaryDirectory(dir=tempfile.gettempdir())
    atexit.register(folder.cleanup)
    return build_tiny(Path(folder.name), draft=None)


def _chat(text: bytes, _: Path) -> None:
    _read_call(read_chat, text)


def _completion(text: bytes, _: Path) -> None:
    _read_call(read_completion, text)


def _response(text: bytes, _: Path) -> None:
    _read_call(read_response, text)


def _read_call(read: ReadCall, text: bytes) -> None:
    body = parse_request_json(text, "body", ServingConfig())
    try:
        read(body, _served(), ServingConfig())
    except RefusedError as error:  # another model is asked for
        raise UserError(str(error)) from error


def _triton(text: bytes, _: Path) -> None:
    """A JSON object of inputs; one that the server itself would refuse is none."""
    values = parse_json(text, "request")
    if not isinstance(values, dict):
        raise UserError("request: expected an object")
    tensors, parameters = {}, {}
    for name, value in values.items():
        if name in INPUTS:
            tensors[name] = _tensor(name, value)
        else:
            parameters[name] = value
    read_order(tensors, parameters, ServingConfig(), _served())


def _tensor(name: str, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    kind = INPUTS[name].data_type
    try:
        if kind == "TYPE_STRING":
            return np.array([v.encode("utf-8", "surrogatepass") for v in values], dtype=np.object_)
        return np.array(values, dtype=_TYPES[kind])
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError("request: refused by Triton") from error


def _messages(text: bytes, _: Path) -> None:
    """Parts of a conversation, up to the graphs' inputs."""
    messages = parse_json(text, "messages")
    if not isinstance(messages, list):
        raise UserError("messages: expected a list")
    _processor().messages(messages)


TARGETS: Mapping[str, Callable[[bytes, Path], None]] = {
    "safetensors": _safetensors,
    "index": _index,
    "target": _target,
    "patterns": _patterns,
    "draft": _draft,
    "yaml": _yaml,
    "override": _override,
    "template": _template,
    "prompts": _prompts,
    "bundle": _bundle,
    "chat": _chat,
    "completion": _completion,
    "response": _response,
    "triton": _triton,
    "messages": _messages,
}
"""Name -> a reader that either takes a text or raises ``UserError``."""


def _link(source: Path, place: Path) -> None:
    if not place.exists():
        place.symlink_to(source)


@cache
def _served() -> ServedModel:
    return ServedModel(("tiny",), 1024, GREEDY, _processor())


@cache
def _target_spec() -> Any:
    return read_target(TARGET)


@cache
def _processor() -> Processor:
    media = ServingConfig(max_media=4, max_pixels=1 << 16).media()
    return FAMILY.processor(TARGET, _target_spec(), max_prompt_len=4096, media=media)
