"""What is fuzzed: each reader of foreign text as a function of one text, run in a folder of its
own.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.drafts.block.files import target_spec, write
from tests.quantised import save_quantised
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.quantised.claim import Claim
from trt_eagle3.checkpoint.quantised.module_patterns import ModulePatterns
from trt_eagle3.checkpoint.tensor_index import open_index, read_tensor
from trt_eagle3.config import load_config
from trt_eagle3.decode.request.conversation import Conversation
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.grammar_compiler import GrammarCompiler
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.drafts.block.reader import read_block
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.bundle.record import BUNDLE_FILE
from trt_eagle3.errors import OverloadedError, UserError
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
from trt_eagle3.serving.openai.tokens import detokenize, read_tokenize
from trt_eagle3.serving.served_model import ServedModel
from trt_eagle3.triton.request import read_order
from trt_eagle3.triton.tensors import INPUTS

__all__ = ["TARGETS", "built_bundle", "case_files"]

_CORPUS = Path(__file__).parent / "corpus"
"""A folder per target, a file per case; ``sound...`` must be taken, the others taken or refused."""
_SHARED = {"tool": "schema", "guided": "schema"}
"""Targets that have the cases of another."""
_MEDIA = ServingConfig(max_media=4, max_pixels=1 << 16).media()
_QUESTION = [{"role": "user", "content": "hi"}]
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


def _quantised(text: bytes, folder: Path) -> None:
    """The quantisation config of a target whose weights are in FP8, a scale for each row."""
    target = _quantised_target()
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_bytes(_with(config, "quantization_config", text))
    _link(target / "model.safetensors", folder / "model.safetensors")
    read_target(folder)


def _tokenizer(text: bytes, folder: Path) -> None:
    """``tokenizer.json`` but for its vocabulary, on a text that is easy to multiply or to search
    for ever.
    """
    model = json.loads((TARGET / "tokenizer.json").read_text())["model"]
    head, brace, tail = text.rpartition(b"}")
    joined = head + b', "model": ' + json.dumps(model).encode() + brace + tail if brace else text
    (folder / "tokenizer.json").write_bytes(joined)
    for file in TARGET.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "vocab.json"):
            _link(file, folder / file.name)
    processor = FAMILY.processor(folder, _target_spec(), max_prompt_len=4096, media=_MEDIA)
    inputs = processor.messages([{"role": "user", "content": "x" * 3000 + " What?"}])
    processor.decode(inputs.token_ids.tolist())


def _draft(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    _link(DRAFT / "model.safetensors", folder / "model.safetensors")
    read_draft(folder, _target_spec(), cache=folder)


@cache
def _block_draft() -> Path:
    """A block draft of every part that one may have but for DFlash2's."""
    folder = _kept_folder()
    write(folder, "deepspec")
    return folder


def _block(text: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(text)
    _link(_block_draft() / "model.safetensors", folder / "model.safetensors")
    read_block(folder, target_spec(), cache=folder)


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
    for name in ("a.png", "b.png"):  # of the sound case
        (folder / name).touch()
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
    return build_tiny(_kept_folder(), draft=None)


@cache
def _quantised_target() -> Path:
    return save_quantised(_kept_folder(), "fp8-channel")


def _kept_folder() -> Path:
    """A folder that goes when the process ends."""
    folder = tempfile.TemporaryDirectory(dir=tempfile.gettempdir())
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _chat(text: bytes, _: Path) -> None:
    _read_call(read_chat, text)


def _completion(text: bytes, _: Path) -> None:
    _read_call(read_completion, text)


def _response(text: bytes, _: Path) -> None:
    _read_call(read_response, text)


def _read_call(read: ReadCall, text: bytes) -> tuple[Request, ...]:
    body = parse_request_json(text, "body", ServingConfig())
    try:
        return read(body, _served(), ServingConfig()).requests
    except RefusedError as error:  # another model is asked for
        raise UserError(str(error)) from error


def _schema(text: bytes, _: Path) -> None:
    """A JSON Schema that an answer must follow, as far as its first mask."""
    named = _with({"name": "x"}, "schema", text)
    form = _with({"type": "json_schema"}, "json_schema", named)
    _compile(_read_call(read_chat, _with({"messages": _QUESTION}, "response_format", form)))


def _guided(text: bytes, _: Path) -> None:
    """The same as a text, whose values no limit on a request's values counts."""
    schema = json.dumps(text.decode(errors="replace")).encode()
    _compile(_read_call(read_chat, _with({"messages": _QUESTION}, "guided_json", schema)))


def _tool(text: bytes, _: Path) -> None:
    """The schema of the arguments of a tool that must be called."""
    function = _with({"name": "f"}, "parameters", text)
    tool = _with({"type": "function"}, "function", function)
    choice = {"type": "function", "function": {"name": "f"}}
    body = {"messages": _QUESTION, "tool_choice": choice}
    _compile(_read_call(read_chat, _with(body, "tools", b"[" + tool + b"]")))


def _compile(requests: tuple[Request, ...]) -> None:
    for grammar in [request.sampling.grammar for request in requests]:
        if grammar is not None:
            try:
                _grammars().state(grammar)
            except OverloadedError as error:  # this machine is busy
                raise UserError(str(error)) from error


def _media(text: bytes, _: Path) -> None:
    """The parts of a message, images and videos among them, up to the graphs' inputs."""
    message = _with({"role": "user"}, "content", text)
    for request in _read_call(read_chat, b'{"messages": [' + message + b"]}"):
        assert isinstance(request.prompt, Conversation)
        _processor().messages(request.prompt.messages)


def _tokens(text: bytes, _: Path) -> None:
    """A body of ``/tokenize`` or ``/detokenize``."""
    body, serving = parse_request_json(text, "body", ServingConfig()), ServingConfig()
    read = detokenize if isinstance(body, dict) and "tokens" in body else read_tokenize
    try:
        read(body, _served(), serving)
    except RefusedError as error:  # another model is asked for
        raise UserError(str(error)) from error


def _with(values: Mapping[str, Any], key: str, text: bytes) -> bytes:
    """The JSON object ``values`` with one more value, whatever its ``text`` is."""
    return json.dumps(values).encode()[:-1] + b', "' + key.encode() + b'": ' + text + b"}"


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
    "quantised": _quantised,
    "tokenizer": _tokenizer,
    "draft": _draft,
    "block": _block,
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
    "media": _media,
    "schema": _schema,
    "guided": _guided,
    "tool": _tool,
    "tokens": _tokens,
}
"""Name -> a reader that either takes a text or raises ``UserError``."""


def case_files(target: str) -> Mapping[str, Path]:
    """The files of the corpus that ``target`` is given, by name."""
    folder = _CORPUS / _SHARED.get(target, target)
    return {file.name: file for file in sorted(folder.iterdir())}


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
    return FAMILY.processor(TARGET, _target_spec(), max_prompt_len=4096, media=_MEDIA)


@cache
def _grammars() -> GrammarCompiler:
    spec = _target_spec()
    made = GrammarCompiler(_processor().tokenizer, spec.vocab_size, spec.eos_token_ids)
    atexit.register(made.close)
    return made
