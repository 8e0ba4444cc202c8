"""Default sampling of a checkpoint, from a bundle's ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.processor_files import read_processor_json

__all__ = ["default_sampling"]

_FILTERS = ("top_k", "top_p", "min_p")


def default_sampling(bundle: Path) -> SamplingParams:
    """Read temperature, filters and repetition penalty from ``generation_config.json``.

    As in transformers, sampling is greedy without ``do_sample``, and a missing temperature is 1.
    Missing filters are off. Sampling is greedy if the bundle has no such file.

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
