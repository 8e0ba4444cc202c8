"""How a checkpoint's authors sample from it: the ``generation_config.json`` of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.processor_files import read_processor_json

__all__ = ["default_sampling"]

_FILTERS = ("top_k", "top_p", "min_p")


def default_sampling(bundle: Path) -> SamplingParams:
    """Temperature, filters and repetition penalty as ``generation_config.json`` has them.

    As with transformers: without ``do_sample`` it is greedy, and a temperature that is not named
    is 1. Filters that are not named do nothing. Greedy where a bundle has no such file.

    Raises:
        UserError: the file is broken, or a value is outside its range.
    """
    path = bundle / "processor" / "generation_config.json"
    if not path.is_file():
        return GREEDY
    found = read_processor_json(path)
    values: dict[str, Any] = {"repetition_penalty": found.get("repetition_penalty")}
    if found.get("do_sample"):
        values["temperature"] = found.get("temperature", 1.0)
        values |= {name: found.get(name) for name in _FILTERS}
    try:
        return SamplingParams(**{name: v for name, v in values.items() if v is not None})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
