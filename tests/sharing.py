"""What engines of one test process share, since each would take half a second of it anew: the
processes that decode images, and ONNX Runtime's sessions of the same graph and weights.

A session of ONNX Runtime keeps nothing between runs: what is bound belongs to its binding, of
which each engine has its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from trt_eagle3.decode import loaded_bundle
from trt_eagle3.engine.onnxruntime import session as ort_session
from trt_eagle3.multimodal.decoder_pool import DecoderPool

__all__ = ["shared_decoders", "shared_sessions"]

_KEPT = 12
"""Sessions of ONNX Runtime: those of the pairs of a test file."""


class _OpenPool(DecoderPool):
    """Stays open when an engine that uses it closes."""

    def close(self) -> None:
        pass


@contextmanager
def shared_decoders(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """One pool of decoder processes for all engines."""
    pool = _OpenPool()
    patch.setattr(loaded_bundle, "DecoderPool", lambda: pool)
    yield
    DecoderPool.close(pool)


class _Sessions:
    """Sessions by what they are made of: a changed byte of graph or weights makes another."""

    def __init__(self) -> None:
        self._made: OrderedDict[bytes, ort.InferenceSession] = OrderedDict()
        self._digests: dict[tuple[int, ...], bytes] = {}
        self._next = threading.local()

    def options(self, proto: onnx.ModelProto, root: Path, handed: int) -> ort.SessionOptions:
        """Note what the next session is of; one that is handed weights is nobody else's."""
        self._next.key = None if handed else self._key(proto, root)
        return _OPTIONS(proto, root, handed)

    def session(self, model: bytes, options: ort.SessionOptions, **kw: Any) -> ort.InferenceSession:
        key = self._next.key
        made = self._made.pop(key, None) or ort.InferenceSession(model, options, **kw)
        if key is not None:
            self._made[key] = made
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return made

    def _key(self, proto: onnx.ModelProto, root: Path) -> bytes:
        files = {
            e.value for i in proto.graph.initializer for e in i.external_data if e.key == "location"
        }
        found = blake2b(proto.SerializeToString(deterministic=True))
        for name in sorted(files):
            found.update(self._digest(root / name))
        return found.digest()

    def _digest(self, file: Path) -> bytes:
        stat = file.stat()
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key not in self._digests:
            self._digests[key] = blake2b(file.read_bytes()).digest()
        return self._digests[key]


_OPTIONS = ort_session._options


def shared_sessions(patch: pytest.MonkeyPatch) -> None:
    """One session of ONNX Runtime for all engines of the same graph and weights."""
    sessions = _Sessions()
    names = {name: getattr(ort, name) for name in ("OrtValue", "SessionOptions")}
    patch.setattr(ort_session, "_options", sessions.options)
    patch.setattr(ort_session, "ort", SimpleNamespace(InferenceSession=sessions.session, **names))
