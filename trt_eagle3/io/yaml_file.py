"""Read YAML files with bounds on size, nodes and depth, and without duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.bounded_read import read_text_bounded

__all__ = ["MAX_YAML_BYTES", "MAX_YAML_DEPTH", "MAX_YAML_NODES", "parse_yaml", "read_yaml"]

MAX_YAML_BYTES = 1 << 20
MAX_YAML_NODES = 20_000
"""Maximum number of keys and values in a text, with aliases expanded."""
MAX_YAML_DEPTH = 64


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds on nodes and depth.

    Each node is counted before it is kept, each alias before it is expanded.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = self._depth = 0
        self._sizes: dict[int, int] = {}  # size of each finished node, by id, aliases expanded

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Bound the bracket depth while scanning: the scanner's look-ahead takes quadratic time."""
        if self.flow_level > MAX_YAML_DEPTH:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(
                None, None, f"nested deeper than {MAX_YAML_DEPTH} levels", mark
            )
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node. An alias to an unfinished node would contain itself."""
        alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before = self._num_nodes
        self._depth += 1
        if self._depth > MAX_YAML_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {MAX_YAML_DEPTH} levels", mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias to what contains it", mark)
        self._num_nodes += self._sizes[id(node)] if alias else 1
        if self._num_nodes > MAX_YAML_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MAX_YAML_NODES} keys and values", mark
            )
        if not alias:
            self._sizes[id(node)] = self._num_nodes - before
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                problem = f"key {clip(key.value, 80)} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, name: object) -> Any:
    """Parse a YAML text of one document; ``name`` is its name in errors.

    Raises:
        UserError: this is not YAML, is longer than ``MAX_YAML_BYTES``, has more than
            ``MAX_YAML_NODES`` with aliases expanded, is nested deeper than ``MAX_YAML_DEPTH``, or
            repeats a key in a mapping.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UserError(f"{name}: {len(text)} characters long, expected at most {MAX_YAML_BYTES}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{name}: not YAML: {_reason(error)}") from error
    except yaml.YAMLError as error:
        # for characters outside of YAML; the message's second line has no place
        raise UserError(f"{name}: not YAML: {clip(' '.join(str(error).split()))}") from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        # PyYAML's constructors do not catch these: 2020-13-45, !!timestamp x, !!bool x, !!float x
        raise UserError(f"{name}: not YAML: {clip(error)}") from error


def read_yaml(file: Path) -> Any:
    """Read a YAML file.

    Raises:
        UserError: as for ``parse_yaml``; or the file is not regular or not UTF-8.
        OSError: the file is missing or unreadable.
    """
    return parse_yaml(read_text_bounded(file, MAX_YAML_BYTES), file)


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Describe the error and its place, without PyYAML's copy of the line."""
    words = clip(" ".join(f"{error.context or ''} {error.problem or ''}".split()))
    mark = error.problem_mark or error.context_mark
    return f"{words}, line {mark.line + 1}, column {mark.column + 1}" if mark else words
