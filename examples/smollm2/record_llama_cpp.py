"""Record what llama.cpp computes with the GGUF file, for ``check.py``.

    pip install xllamacpp==2026.10.11549        # llama.cpp as a wheel; check.py does not need it
    python examples/smollm2/record_llama_cpp.py GGUF

Writes ``llama_cpp.json``: the token ids of 200 texts by the file's own tokenizer, and the log
probabilities of the next token behind 20 held-out prompts. llama.cpp quantises the activations of
quantised weights; so the second is computed from a copy whose weights are float32, with the values
that ``convert.py`` writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from gguf import GGUFReader, GGUFWriter, dequantize
from texts import HERE, texts

TOP = 5


def plain_copy(gguf: Path, copy: Path) -> None:
    """Write ``gguf`` with float32 weights, rounded to bfloat16 values."""
    reader = GGUFReader(gguf)
    writer = GGUFWriter(copy, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        types = (field.types[0], field.types[1] if len(field.types) > 1 else None)
        writer.add_key_value(field.name, field.contents(), *types)
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        writer.add_tensor(tensor.name, values.bfloat16().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def served(gguf: Path) -> Iterator[Any]:
    """Serve a file with llama.cpp on this machine; yields a function that posts to it."""
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = str(gguf), ["127.0.0.1"], 18749
    params.n_ctx, params.n_parallel = 2048, 1
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(server.listening_address + path, data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    yield post


def prompt_of(text: str) -> str:
    """Return the text of a chat, as the chat template writes it without a system message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("gguf", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"xllamacpp": version("xllamacpp"), "tokens": [], "next": []}
    plain = {"add_special": False, "parse_special": True}
    with served(args.gguf) as post:
        for text in texts():
            ids = post("/tokenize", {"content": text} | plain)["tokens"]
            record["tokens"].append({"text": text, "ids": ids})
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "float32.gguf"
        plain_copy(args.gguf, copy)
        asked = {"n_predict": 1, "n_probs": TOP, "temperature": 0.0, "cache_prompt": False}
        with served(copy) as post:
            for text in texts()[:60:3]:
                ids = post("/tokenize", {"content": prompt_of(text)} | plain)["tokens"]
                reply = post("/completion", {"prompt": ids} | asked)
                best = reply["completion_probabilities"][0]["top_logprobs"]
                pairs = [[token["id"], round(token["logprob"], 5)] for token in best]
                record["next"].append({"ids": ids, "top": pairs})
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"))
    (HERE / "llama_cpp.json").write_text(
        text.replace('{"text"', '\n{"text"').replace('{"ids":[1,', '\n{"ids":[1,') + "\n"
    )


if __name__ == "__main__":
    main()
