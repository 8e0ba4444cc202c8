"""Find the quantisation that a checkpoint's files claim, and the file and key of the claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind, config_value
from trt_eagle3.checkpoint.model_config import ModelConfig, read_json
from trt_eagle3.errors import UserError, quote

__all__ = ["Claim", "find_claim"]

_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files beside ``config.json`` -> the ``quant_method`` of those that name none."""


@dataclass(frozen=True)
class Claim:
    """A quantisation config: its method, its values, and its place for messages."""

    method: str
    values: Mapping[str, Any]
    file: Path
    key: str

    @property
    def directory(self) -> Path:
        """The checkpoint's folder."""
        return self.file.parent

    @property
    def told(self) -> str:
        """The claimed format: the method, and ModelOpt's algorithm."""
        algorithm = self.values.get("quant_algo")
        return f"{self.method} {algorithm}" if isinstance(algorithm, str) else self.method

    @property
    def place(self) -> str:
        """File and key, for messages."""
        return f"{self.file.name}: {self.key}" if self.key else self.file.name

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return the value at a dotted key, or ``default`` if it is absent or null."""
        value = config_value(self.values, key, kind, self.file)
        return default if value is None else value

    def error(self, message: str) -> UserError:
        """Create an error about this config."""
        return UserError(f"{self.file}: {self.key + ': ' if self.key else ''}{message}")

    def expect(self, key: str, got: object, *known: object) -> None:
        """Check that a value is one of ``known``."""
        if got not in known:
            names = ", ".join(map(str, known))
            raise self.error(f"{key}: expected {names}, got {quote(got)}: not supported")


def find_claim(config: ModelConfig, sections: tuple[str, ...] = ("",)) -> Claim | None:
    """Find the quantisation that the files of a checkpoint claim; None if they claim none.

    Raises:
        UserError: they claim two formats.
    """
    claims = [*_config_claims(config, sections), *_file_claims(config.file.parent)]
    told = dict.fromkeys(claim.told for claim in claims)
    if len(told) > 1:
        both = " and ".join(f"{quote(c.told, 60)} in {c.place}" for c in claims[:2])
        raise UserError(
            f"{config.file.parent}: two formats are claimed at once: {both}. Remove the claim that "
            "does not match its weights."
        )
    return claims[0] if claims else None


def _config_claims(config: ModelConfig, sections: tuple[str, ...]) -> list[Claim]:
    keys = [*(f"{section}quantization_config" for section in sections), "compression_config"]
    found = [(key, config.get(key, "object")) for key in dict.fromkeys(keys)]
    return [Claim(_method(values), values, config.file, key) for key, values in found if values]


def _file_claims(directory: Path) -> list[Claim]:
    files = [(directory / name, method) for name, method in _FILES.items()]
    read = [(file, method, read_json(file)) for file, method in files if file.exists()]
    return [
        Claim(_method({"quant_method": method, **values}), _inner(values), file, "")
        for file, method, values in read
    ]


def _inner(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the ``quantization`` section of ModelOpt's own file into the top level."""
    inner = values.get("quantization")
    return {**values, **inner} if isinstance(inner, dict) else values


def _method(values: Mapping[str, Any]) -> str:
    method = values.get("quant_method")
    if method is None and "config_groups" in values:
        method = "compressed-tensors"
    return method if isinstance(method, str) else "unknown"
