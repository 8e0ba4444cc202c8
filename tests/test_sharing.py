"""Engines of one process share what is the same to the last byte, and nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import build_tiny
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession


def opened(bundle: Path, *intermediates: str) -> object:
    session = OnnxRuntimeSession(bundle / "draft/model.onnx", bundle, intermediates)
    return session._session


def test_sessions_of_equal_bytes_are_shared_and_others_are_not(tmp_path: Path) -> None:
    bundle, equal = build_tiny(tmp_path / "a"), build_tiny(tmp_path / "b")
    ours = opened(bundle)
    assert opened(equal) is ours
    assert opened(bundle, "layers.0.self_attn.out") is not ours
    weights = equal / "weights/draft/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()  # the file is the checkpoint's own
    weights.write_bytes(data)
    assert opened(equal) is not ours
    assert opened(bundle) is ours


def test_engines_share_one_pool_of_decoders(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path)
    pools = [LoadedBundle.open(bundle).processor.decoders for _ in range(2)]
    assert pools[0] is pools[1]
