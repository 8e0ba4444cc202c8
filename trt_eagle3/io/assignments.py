"""Parse ``KEY=VALUE`` words of a command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.yaml_file import parse_yaml

__all__ = ["parse_assignments"]

_EXAMPLES = {"--override": "aux_layers=[2,18,33]", "--set": "limits.max_batch_size=8"}


def parse_assignments(words: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Parse the values of ``option`` to a mapping. Values are YAML; dots make sections.

    Raises:
        UserError: a word has no ``=``, a value is not YAML, or a key is set both as a value and as
            a section.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UserError(
                f"{option} {clip(word)}: expected KEY=VALUE, for example "
                f"{option} {_EXAMPLES.get(option, 'key=1')}"
            )
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(
                    f"{option} {clip(word)}: {clip(section)} has the value {quote(place)} already. "
                    "Set it, or its parts."
                )
        try:
            place[last] = parse_yaml(text, "value")
        except UserError as error:
            reason = clip(str(error).removeprefix("value: not YAML: "), 120)
            raise UserError(
                f"{option} {clip(word)}: the value is not YAML: {reason}. Quote texts with "
                "*, & or :."
            ) from error
    return found
