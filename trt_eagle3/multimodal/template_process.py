"""Render chat templates in one separate process (``template_worker.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.worker_process import WorkerProcess
from trt_eagle3.multimodal import template_worker

__all__ = ["render_template"]


def render_template(source: str, renders: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render the template ``source`` once for each mapping of variables.

    Variables are JSON values; others are converted by ``str``. The process adds about 0.1 ms.

    Raises:
        UserError: the template does not parse, rejects the variables, or exceeds its limit of time
            or memory.
        EnvironmentMissingError: no process can be started.
    """
    request = json.dumps({"source": source, "renders": renders}, default=str).encode()
    answer = _PROCESS.ask(request)
    if answer is None:
        raise UserError(
            f"chat template: stopped, it took more than {template_worker.CPU_S:g} s or "
            f"{template_worker.MEMORY_BYTES >> 20} MiB. Copy it from the checkpoint again."
        )
    if "parse_error" in answer:
        raise UserError(
            f"chat template: does not parse ({clip(answer['parse_error'])}). Copy it from the "
            "checkpoint."
        )
    if "render_error" in answer:
        raise UserError(
            "messages: the checkpoint's chat template refuses them "
            f"({clip(answer['render_error'])})."
        )
    texts: list[str] = answer["texts"]
    return texts


_PROCESS = WorkerProcess(template_worker.__file__, "chat template")
