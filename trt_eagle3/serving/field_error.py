"""FieldError: a refusal that names the field of the request which is wrong."""

from __future__ import annotations

from trt_eagle3.errors import UserError

__all__ = ["FieldError"]


class FieldError(UserError):
    """A field of a request is wrong; ``param`` names it as OpenAI's error objects do."""

    def __init__(self, message: str, param: str, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
