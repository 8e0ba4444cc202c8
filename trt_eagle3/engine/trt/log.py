"""TensorRT's messages, and the objects that are made with its logger."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from trt_eagle3.engine.trt.versions import tensorrt
from trt_eagle3.errors import EnvironmentMissingError, UserError

__all__ = ["Log", "create_builder", "create_refitters", "create_runtime", "log"]


def create_builder() -> Any:
    """A ``Builder``."""
    return _create("Builder")


def create_runtime() -> Any:
    """A ``Runtime``."""
    return _create("Runtime")


def create_refitters(engine: Any) -> tuple[Any, Any]:
    """A ``Refitter`` of ``engine``, and what reads weights for it from an ONNX file; TensorRT 10
    and later.
    """
    refitter = _create("Refitter", engine)
    return refitter, _create("OnnxParserRefitter", refitter)


def _create(kind: str, *parents: Any) -> Any:
    """An object of TensorRT that takes our logger.

    Raises:
        EnvironmentMissingError: TensorRT gives none: CUDA does not start, or the driver is too old
            for it.
    """
    trt, messages = tensorrt(), log()
    messages.errors.clear()
    try:
        return getattr(trt, kind)(*parents, messages.logger)
    except TypeError as error:  # how its bindings tell of a null pointer
        raise EnvironmentMissingError(
            f"TensorRT {trt.__version__}: cannot make a {kind}: {messages.take_reason()}. Check "
            "with nvidia-smi that the driver serves the CUDA that this TensorRT was built for."
        ) from error


class Log:
    """What TensorRT says: errors are kept for ours, the rest goes nowhere."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.logger = _make_logger(self.errors)

    def fail(self, what: str, fix: str) -> NoReturn:
        """Raise a ``UserError`` about ``what``, with TensorRT's first reason."""
        raise UserError(f"{what}: TensorRT: {self.take_reason()}. {fix}")

    def take_reason(self) -> str:
        """The first error since the last call, on one line."""
        reason = " ".join(self.errors[0].split()) if self.errors else "it gave no reason"
        self.errors.clear()
        return reason[:400]


@cache
def log() -> Log:
    """The process's log: TensorRT keeps the first logger that it is given."""
    return Log()


def _make_logger(errors: list[str]) -> Any:
    trt = tensorrt()
    kept = {trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR}

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in kept:
                errors.append(msg)

    return Logger()
