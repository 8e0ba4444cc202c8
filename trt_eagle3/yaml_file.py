"""YAML files as people write them: a key that stands twice is a mistake, not a choice of the last."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

__all__ = ["read_yaml"]


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> Any:
    """What is in ``file``.

    Raises:
        OSError, ValueError: unreadable. yaml.YAMLError, RecursionError: not YAML, or a key of a mapping stands twice.
    """
    return yaml.load(file.read_text(encoding="utf-8"), _Loader)
