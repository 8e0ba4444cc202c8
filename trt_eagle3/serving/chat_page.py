"""The chat page, and the content security policy that it is served with."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

__all__ = ["chat_page", "content_hashes"]

_INLINE = r"<{0}>(.*?)</{0}>"


@cache
def chat_page() -> tuple[str, str]:
    """The page, and its ``Content-Security-Policy``.

    The browser runs the page's own script and applies its own style, both by their hashes. It
    loads nothing from other servers, and refuses to turn text into markup.
    """
    page = (files("trt_eagle3.serving") / "chat_page.html").read_text("utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": content_hashes(page, "script"),
        "style-src": content_hashes(page, "style"),
        "connect-src": "'self'",
        "img-src": "blob: data:",
        "media-src": "blob:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())


def content_hashes(page: str, tag: str) -> str:
    """Return CSP hashes of the contents of every ``tag`` without attributes."""
    contents = re.findall(_INLINE.format(tag), page, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
