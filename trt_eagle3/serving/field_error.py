"""Define FieldError: an error that names the wrong field of a request."""

from __future__ import annotations

from trt_eagle3.errors import UserError

__all__ = ["FieldError"]


class FieldError(UserError):
    """A field of a request is wrong; ``param`` is its path, as in OpenAI's error objects."""

    def __init__(self, message: str, param: str, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
