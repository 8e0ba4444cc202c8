"""A draft's config and tensors under canonical names, before its producer is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind, config_value
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.pickle_file import read_pickle
from trt_eagle3.checkpoint.tensor_file import cached_file, write_tensors
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_index, weight_files
from trt_eagle3.errors import UserError, clip

__all__ = ["DraftFiles", "open_draft"]

_ALIASES = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
# prefixes of modules around a draft, on all or some tensors; servers drop them too
_WRAPPERS = re.compile(r"^((draft_)?model\.|(eagle_)?module\.)+")
# used only in training
_DROPPED = re.compile(r"(verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class DraftFiles:
    """The contents of a draft's folder.

    Attributes:
        tensors: canonical name (see ``Eagle3Manifest``; also ``t2d``) -> place.
        layer_prefix: ``midlayer`` or ``layers``, as in the file; empty if it has neither.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorRef] = field(repr=False)
    layer_prefix: str

    @property
    def architecture(self) -> str:
        """The first of the config's architectures, or an empty text."""
        names = self.find("architectures", "texts")
        return str(names[0]) if names else ""

    @property
    def config_file(self) -> Path:
        """Path of the config."""
        return self.directory / "config.json"

    def find(self, key: str, kind: Kind) -> Any:
        """Return the value at a dotted key of the config, or None (see ``config_value``)."""
        return config_value(self.config, key, kind, self.config_file)


def open_draft(directory: Path, cache: Path | None = None) -> DraftFiles:
    """Open a draft's folder.

    A ``pytorch_model.bin`` is converted into ``cache`` first, without running its code.

    Raises:
        UserError: the config or the weights are missing or broken.
    """
    config = read_json(directory / "config.json")
    raw = _index(directory, cache)
    tensors: dict[str, TensorRef] = {}
    for name, ref in raw.items():
        bare = _WRAPPERS.sub("", name)
        if _DROPPED.match(bare):
            continue
        old, new = next(((o, n) for o, n in _ALIASES if bare.startswith(o)), ("", ""))
        canonical = new + bare.removeprefix(old)
        if canonical in tensors:
            raise UserError(
                f"{directory}: {clip(name)} and {clip(tensors[canonical].name)} are the same "
                "weight under two names"
            )
        tensors[canonical] = ref
    prefixes = {_WRAPPERS.sub("", name).split(".")[0] for name in raw}
    prefix = next((p for p in ("midlayer", "layers") if p in prefixes), "")
    return DraftFiles(directory, config, tensors, prefix)


def _index(directory: Path, cache: Path | None) -> Mapping[str, TensorRef]:
    pickles = sorted(directory.glob("pytorch_model*.bin"))
    if pickles and not weight_files(directory):
        return open_index(_converted(pickles, cache))
    return open_index(directory)


def _converted(pickles: list[Path], cache: Path | None) -> Path:
    """Convert each of ``pickles`` to safetensors and return the folder of the copies."""
    folder = cached_file(pickles, "", cache)
    for pickle in pickles:
        file = folder / f"{pickle.stem}.safetensors"
        if not file.is_file():
            write_tensors(file, read_pickle(pickle))
    return folder
