"""Stands where vLLM would in a peer's process: the interfaces of 0.25 that the driver uses, over
prompts that are counted in words.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["write_fake_vllm"]


def write_fake_vllm(folder: Path, version: str = "0.25.1") -> Path:
    """Write a package ``vllm`` and return a Python that has it; every ``LLM`` writes its arguments
    and most requests in flight to ``folder/seen.json``.
    """
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text(_PACKAGE)
    (folder / "vllm/sampling_params.py").write_text(_SAMPLING)
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nSEEN={folder}/seen.json PYTHONPATH="$PYTHONPATH:{folder}" '
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


_SAMPLING = """
class RequestOutputKind:
    DELTA = "delta"
"""

_PACKAGE = '''
import json, os
from types import SimpleNamespace as Values

class SamplingParams(Values):
    pass

class Engine:
    """A step adds two tokens to every request: its number of words, and 7."""
    def __init__(self, arguments):
        self.running, self.most, self.arguments = {}, 0, arguments

    def add_request(self, name, prompt, sampling):
        assert sampling.output_kind == "delta"
        if "prompt_token_ids" in prompt:
            count = len(prompt["prompt_token_ids"])
        else:
            parts = prompt["messages"][0]["content"]
            count = len(parts[-1]["text"].split()) + 100 * (len(parts) - 1)
        self.running[name] = [count, sampling.max_tokens]
        self.most = max(self.most, len(self.running))
        with open(os.environ["SEEN"], "w") as file:
            seen = {"most": self.most, "arguments": self.arguments}
            seen["multiprocessing"] = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
            json.dump(seen, file)

    def step(self):
        found = []
        for name, state in list(self.running.items()):
            tokens = [state[0], 7][: state[1]]
            state[1] -= len(tokens)
            if not state[1]:
                del self.running[name]
            output = Values(token_ids=tokens)
            found.append(Values(request_id=name, outputs=[output], finished=not state[1]))
        return found

class LLM:
    def __init__(self, **arguments):
        self.llm_engine = Engine(arguments)

    def _preprocess_chat_one(self, messages):
        print("chatter on stdout")
        return {"messages": messages}
'''
