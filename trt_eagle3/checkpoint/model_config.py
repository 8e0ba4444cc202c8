"""Read a target's ``config.json`` by dotted key, and the values that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind, config_value
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.io.json_file import read_json_object

__all__ = [
    "ModelConfig",
    "checked_token_id",
    "eos_token_ids",
    "mark_token_id",
    "read_json",
    "read_model_config",
    "tied_head",
]

_MAX_CONFIG_BYTES = 4 << 20  # a quantised config that lists its layers has about 100 KB


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is missing or holds another value (see ``json_file``).
    """
    try:
        return read_json_object(file, _MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"{file.parent}: not a checkpoint: it has no {file.name}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot read it: {error.strerror}") from error


@dataclass(frozen=True)
class ModelConfig:
    """A model's ``config.json`` and its path, for messages."""

    values: Mapping[str, Any]
    file: Path

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return the value at a dotted key, or ``default`` if it is absent or null."""
        value = config_value(self.values, key, kind, self.file)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number, required unless there is a default."""
        value = self.get(key, "whole", default)
        if value is None or value < least:
            raise self.error(f"{key}: expected a whole number of at least {least}, got {value}")
        return int(value)

    def error(self, message: str) -> UserError:
        """Create an error about this file."""
        return UserError(f"{self.file}: {message}")


def read_model_config(directory: Path) -> ModelConfig:
    """Read the ``config.json`` of a checkpoint.

    Raises:
        UserError: as for ``read_json``.
    """
    file = directory / "config.json"
    return ModelConfig(read_json(file), file)


def tied_head(
    config: ModelConfig, tensors: Mapping[str, TensorRef], sections: tuple[str, ...] = ("",)
) -> bool:
    """Return whether the head is tied, which it is if the checkpoint has no head tensor.

    The flag is unreliable. transformers 4.57 assumes True if it is absent, 5.x False. It is at the
    top or in text_config. If flag and a separate head disagree, 5.x uses the head. A flag that
    denies tying, without a head, indicates an incomplete checkpoint.
    """
    if "lm_head.weight" in tensors:
        return False
    flags = [config.get(f"{section}tie_word_embeddings", "flag") for section in sections]
    return True in flags or not any(flag is False for flag in flags)


def eos_token_ids(directory: Path, config: ModelConfig, section: str = "") -> tuple[int, ...]:
    """Return the end tokens of transformers' ``generate``; empty if no config names any."""
    file = directory / "generation_config.json"
    places = [(config, "eos_token_id"), *([(config, f"{section}eos_token_id")] if section else [])]
    if file.exists():
        places.insert(0, (ModelConfig(read_json(file), file), "eos_token_id"))
    for place, key in places:
        kind: Kind = (
            "wholes"
            if isinstance(config_value(place.values, key, "any", place.file), list)
            else "whole"
        )
        ids = place.get(key, kind)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def checked_token_id(config: ModelConfig, vocab_size: int, key: str, default: int) -> int:
    """Return the id of a prompt token after checking that the token table has its row.

    Args:
        default: default of transformers' config class.
    """
    token_id = config.whole(key, default, least=0)
    if token_id >= vocab_size:
        raise config.error(
            f"{key}: expected an id below the vocabulary's {vocab_size}, got {token_id}"
        )
    return token_id


def mark_token_id(config: ModelConfig, vocab_size: int, key: str) -> int | None:
    """Return the id of a token around images; None if the config has none.

    transformers then finds the token by its text.
    """
    return (
        checked_token_id(config, vocab_size, key, 0) if config.get(key, "any") is not None else None
    )
