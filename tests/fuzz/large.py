"""Cases too large for a file of the corpus: they fit into a request or a checkpoint's file, and may
cost more than they should.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from tests.tiny import TARGET

__all__ = ["LARGE"]


def _references_times_parts() -> bytes:
    """8,000 references to the root, each in a list of 48,000 parts."""
    parts: list[Any] = [{}] * 40_000 + [{"$ref": f"#{i}"} for i in range(8_000)]
    return _text({"allOf": parts})


def _definitions_in_a_row() -> bytes:
    """Each refers to the next one, the last to the first."""
    count = 4_000
    found = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{(i + 1) % count}"}]} for i in range(count)}
    return _text({"$ref": "#/$defs/d0", "$defs": found})


def _definitions_that_double() -> bytes:
    """A tree of 2**40 leaves in 40 definitions."""
    names = [f"d{i}" for i in range(40)]
    found: dict[str, Any] = {
        a: {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{b}"}] * 2, "minItems": 2}
        for a, b in pairwise(names)
    }
    return _text({"$ref": "#/$defs/d0", "$defs": {**found, names[-1]: {"type": "null"}}})


def _long_enumeration() -> bytes:
    return _text({"enum": [f"value {i}" for i in range(16_000)]})


def _many_patterns() -> bytes:
    return _text({"patternProperties": {f"^(a{i}|b)*c{{500}}$": {} for i in range(2_000)}})


def _doubling_decoder() -> bytes:
    """A character of the text becomes 2,048."""
    step = {"type": "Replace", "pattern": {"String": "x"}, "content": "xx"}
    return _tokenizer(decoder={"type": "Sequence", "decoders": [step] * 11})


def _many_added_tokens() -> bytes:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokens = [{"id": 640 + i, "content": "x" * (1 + i % 900), **flags} for i in range(3_000)]
    return _tokenizer(added_tokens=[*_tiny_tokenizer()["added_tokens"], *tokens])


def _tokenizer(**changes: Any) -> bytes:
    return _text({**_tiny_tokenizer(), **changes})


def _tiny_tokenizer() -> dict[str, Any]:
    """But for its vocabulary."""
    fields: dict[str, Any] = json.loads((TARGET / "tokenizer.json").read_text())
    del fields["model"]
    return fields


def _many_ignored_modules() -> bytes:
    return _text({**_QUANTISATION, "ignore": [f"re:.*x{i}.*y.*z.*" for i in range(5_000)]})


_QUANTISATION: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        }
    },
}


def _text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_SCHEMAS = {
    "references-times-parts": _references_times_parts,
    "definitions-in-a-row": _definitions_in_a_row,
    "definitions-that-double": _definitions_that_double,
    "long-enumeration": _long_enumeration,
    "many-patterns": _many_patterns,
}
LARGE: Mapping[str, Callable[[], bytes]] = {
    **{
        f"{target}/{name}": made
        for target in ("schema", "guided", "tool")
        for name, made in _SCHEMAS.items()
    },
    "tokenizer/doubling-decoder": _doubling_decoder,
    "tokenizer/many-added-tokens": _many_added_tokens,
    "quantised/many-ignored-modules": _many_ignored_modules,
}
"""Target and name, as files of the corpus have them -> what makes the text."""
