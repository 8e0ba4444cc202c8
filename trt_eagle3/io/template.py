"""Render files from templates in a package's ``templates`` folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2

__all__ = ["render"]


def render(package: str, template: str, values: Mapping[str, Any]) -> bytes:
    """Render ``templates/<template>`` of ``package`` with ``values``; missing names raise."""
    source = files(package).joinpath("templates", template).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(source).render(values).encode()
