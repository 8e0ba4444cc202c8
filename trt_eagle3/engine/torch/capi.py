"""Our CUDA kernels on torch tensors, through the C library that ``make plugins`` builds.

Every argument is checked by the library on the host; a call enqueues on torch's current stream,
allocates its outputs when ``out`` is not given, and never waits, so calls may be captured in a CUDA
graph.

Shapes: B rows, S new tokens per row, N = B * S, M masked tail, P pages per row, Hq / Hkv heads, D
head_dim, H hidden. T is float32, float16 or bfloat16, the same for all floating tensors of a call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.errors import EnvironmentMissingError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LIBRARY_VARIABLE",
    "AttentionPath",
    "add_layer_norm",
    "add_rms_norm",
    "available",
    "kv_move",
    "library_path",
    "linear",
    "qk_norm_mrope",
    "silu_mul",
    "tree_attention",
    "vision_attention",
]

LIBRARY_VARIABLE = "TRT_EAGLE3_CAPI"
MAX_KV_MOVES = 2048  # rows of one ``kv_move``
MAX_LINEAR_ROWS = 64  # of ``x`` in ``linear``
_LIBRARY_NAME = "libtrt_eagle3_capi.so"
_ABI_VERSION = 3
_MAX_RANK = 4
_DTYPES = {
    "torch.float32": 0,
    "torch.float16": 1,
    "torch.bfloat16": 2,
    "torch.int32": 3,
    "torch.bool": 4,
}


class AttentionPath(IntEnum):
    """How TreeAttention multiplies; anything but AUTO is for tests and measurements."""

    AUTO = 0
    SIMPLE = 1
    MMA = 2
    WGMMA = 3


class _Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * _MAX_RANK),
    )


def _tensors(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _Tensor) for name in names)


class _TreeAttentionArgs(Structure):
    _fields_ = (
        *_tensors(
            "q",
            "k",
            "v",
            "k_cache",
            "v_cache",
            "past_lengths",
            "query_lengths",
            "page_table",
            "tree_mask",
        ),
        ("out", _Tensor),
        ("page_size", c_int32),
        ("scale", c_float),
        ("mask", c_int32),
        ("path", c_int32),
        ("num_splits", c_int32),
        ("prefetch_safe", c_int32),
    )


class _QKNormMRopeArgs(Structure):
    _fields_ = (
        *_tensors(
            "qkv", "position_ids", "inv_freq", "pair_axis", "q_norm", "k_norm", "q", "k", "v"
        ),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("epsilon", c_float),
    )


class _AddRmsNormArgs(Structure):
    _fields_ = (*_tensors("x", "residual", "weight", "y", "sum"), ("epsilon", c_float))


class _AddLayerNormArgs(Structure):
    _fields_ = (*_tensors("x", "residual", "weight", "bias", "y", "sum"), ("epsilon", c_float))


class _SiluMulArgs(Structure):
    _fields_ = _tensors("gate_up", "out")


class _LinearArgs(Structure):
    _fields_ = (*_tensors("x", "weight", "y"), ("prefetch_safe", c_int32))


class _VisionAttentionArgs(Structure):
    _fields_ = (
        *_tensors("qkv", "rope_positions", "inv_freq", "pair_axis", "frame_starts", "out"),
        ("num_heads", c_int32),
        ("scale", c_float),
        ("path", c_int32),
    )


class _KVMoveArgs(Structure):
    _fields_ = (*_tensors("cache", "source", "destination", "page_table"), ("page_size", c_int32))


def library_path() -> Path | None:
    """The library named by TRT_EAGLE3_CAPI, else beside this package, else in plugins/build of a
    checkout.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        return Path(named)
    package = Path(__file__).resolve().parents[2]
    places = (package / _LIBRARY_NAME, package.parent / "plugins" / "build" / _LIBRARY_NAME)
    return next((place for place in places if place.exists()), None)


def available() -> bool:
    """Whether the library loads and torch sees a CUDA device."""
    import torch

    if library_path() is None or not torch.cuda.is_available():
        return False
    try:
        _library()
    except EnvironmentMissingError:
        return False
    return True


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    past_lengths: Tensor,
    query_lengths: Tensor,
    page_table: Tensor,
    tree_mask: Tensor | None,
    *,
    page_size: int,
    scale: float,
    tail: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: AttentionPath = AttentionPath.AUTO,
    num_splits: int = 0,
    prefetch_safe: bool = False,
) -> Tensor:
    """Write the new tokens into the cache, then attend from each over its past and the tail that
    the mask shows.

    Args:
        q, k, v: T [N, Hq * D], [N, Hkv * D], [N, Hkv * D].
        k_cache, v_cache: T [slots, Hkv, D], updated in place.
        past_lengths, query_lengths: int32 [B]; page_table: int32 [B, P].
        tree_mask: bool [B, S, M]; None is the causal mask: token i sees every slot up to its own.
        tail: M, for the causal mask alone; S when not given.
        workspace: uint8, for the splits; allocated when wanted and not given.
        prefetch_safe: caches, page table and lengths are older than any launch that may still run
            (see ``linear``).
    Returns:
        T [N, Hq * D]; rows of padding tokens (i >= query_lengths[b]) are 0 and write no cache.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: no kernel computes this on this device.
    """
    import torch

    out = torch.empty_like(q) if out is None else out
    args = _TreeAttentionArgs(
        page_size=page_size,
        scale=scale,
        path=path,
        num_splits=num_splits,
        prefetch_safe=prefetch_safe,
    )
    _fill(
        args, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, past_lengths=past_lengths,
        query_lengths=query_lengths, page_table=page_table, out=out,
    )  # fmt: skip
    if tree_mask is None:
        batch = past_lengths.shape[0]
        seq = q.shape[0] // max(batch, 1)
        args.mask = 1
        args.tree_mask = _Tensor(
            None, _DTYPES["torch.bool"], 3, (batch, seq, seq if tail is None else tail)
        )
    else:
        _fill(args, tree_mask=tree_mask)
    with torch.cuda.device(_device(q)):
        _run_with_workspace("tree_attention", args, workspace, q.device)
    return out


def vision_attention(
    qkv: Tensor,
    rope_positions: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    frame_starts: Tensor,
    *,
    num_heads: int,
    scale: float,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: AttentionPath = AttentionPath.AUTO,
) -> Tensor:
    """Rotate the heads of q and k by row and column, then attend from each patch over its own
    frame.

    Args:
        qkv: T [n, 3 * H * D], D a multiple of 4 and at most 128.
        rope_positions: int32 [2, n]; inv_freq: float32 [D / 2]; pair_axis: int32 [D / 2], 0 or 1.
        frame_starts: int32 [F + 1], ascending from 0 to n; frames may be empty.
        workspace: uint8, for the packed q, k and v; allocated when wanted and not given.
    Returns:
        T [n, H * D].
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: the wanted ``path`` does not exist for this head_dim, type or device.
    """
    import torch

    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3) if out is None else out
    args = _VisionAttentionArgs(num_heads=num_heads, scale=scale, path=path)
    _fill(
        args, qkv=qkv, rope_positions=rope_positions, inv_freq=inv_freq, pair_axis=pair_axis,
        frame_starts=frame_starts, out=out,
    )  # fmt: skip
    with torch.cuda.device(_device(qkv)):
        _run_with_workspace("vision_attention", args, workspace, qkv.device)
    return out


def qk_norm_mrope(
    qkv: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    pair_axis: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    epsilon: float = 0.0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the packed projection, normalise the heads of q and k, and turn them by their positions.

    Args:
        qkv: T [N, (Hq + 2 Hkv) * D]; position_ids: int32 [3, B, S].
        inv_freq: float32 [D / 2]; pair_axis: int32 [D / 2], each 0, 1 or 2.
        q_norm, k_norm: T [D], or neither.
    Returns:
        q T [N, Hq * D], k and v T [N, Hkv * D].
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    if out is None:
        q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        out = (
            qkv.new_empty(qkv.shape[0], q_width),
            qkv.new_empty(qkv.shape[0], kv_width),
            qkv.new_empty(qkv.shape[0], kv_width),
        )
    q, k, v = out
    args = _QKNormMRopeArgs(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, epsilon=epsilon
    )
    _fill(
        args, qkv=qkv, position_ids=position_ids, inv_freq=inv_freq, pair_axis=pair_axis,
        q_norm=q_norm, k_norm=k_norm, q=q, k=k, v=v,
    )  # fmt: skip
    with torch.cuda.device(_device(qkv)):
        _check(_library().te3_qk_norm_mrope(byref(args), _stream()))
    return out


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(RMSNorm(x + residual) * weight, x + residual)``; without a residual ``(RMSNorm(x) *
    weight, None)``.

    Args:
        x, residual: T [n, H], or float32 where the residual stream is; weight: T [H]. ``y`` has the
            weight's type, ``sum`` the residual's.
        out: tensors for the two results; ``sum`` may be ``residual`` itself and ``y`` may be ``x``.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    if out is None:
        total = None if residual is None else torch.empty_like(residual)
        out = (torch.empty_like(x, dtype=weight.dtype), total)
    args = _AddRmsNormArgs(epsilon=epsilon)
    _fill(args, x=x, residual=residual, weight=weight, y=out[0], sum=out[1])
    with torch.cuda.device(_device(x)):
        _check(_library().te3_add_rms_norm(byref(args), _stream()))
    return out


def add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    epsilon: float,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(LayerNorm(x + residual) * weight + bias, x + residual)``; without a residual
    ``(LayerNorm(x) ..., None)``.

    Args:
        x, residual: T [n, H]; weight, bias: T [H].
        out: tensors for the two results; ``sum`` may be ``residual`` itself and ``y`` may be ``x``.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    if out is None:
        out = (torch.empty_like(x), None if residual is None else torch.empty_like(x))
    args = _AddLayerNormArgs(epsilon=epsilon)
    _fill(args, x=x, residual=residual, weight=weight, bias=bias, y=out[0], sum=out[1])
    with torch.cuda.device(_device(x)):
        _check(_library().te3_add_layer_norm(byref(args), _stream()))
    return out


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of T [n, 2 * width], gate first -> T [n, width].

    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2) if out is None else out
    args = _SiluMulArgs()
    _fill(args, gate_up=gate_up, out=out)
    with torch.cuda.device(_device(gate_up)):
        _check(_library().te3_silu_mul(byref(args), _stream()))
    return out


def linear(
    x: Tensor, weight: Tensor, *, prefetch_safe: bool = False, out: Tensor | None = None
) -> Tensor:
    """``x @ weight.T`` for a few rows: what decoding multiplies.

    Args:
        x: T [M, K], M at most ``MAX_LINEAR_ROWS``; weight: T [N, K], K a multiple of 32.
        prefetch_safe: no launch that may still be running writes ``weight``, so it is read while
            the launch before drains. Our launches start before the one before them has ended; any
            other launch, copy or CUDA graph waits for all before it, and what was written before
            such a one is prefetch_safe.
    Raises:
        ValueError: a tensor does not fit; the message names it.
        NotImplementedError: float32, too many rows, another K, or what cuBLAS computes as fast
            (``trt_eagle3.h``).
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    args = _LinearArgs(prefetch_safe=prefetch_safe)
    _fill(args, x=x, weight=weight, y=out)
    import torch

    with torch.cuda.device(_device(x)):
        _check(_library().te3_linear(byref(args), _stream()))
    return out


def kv_move(
    cache: Tensor,
    source: Tensor,
    destination: Tensor,
    page_table: Tensor | None = None,
    *,
    page_size: int = 1,
) -> None:
    """Copy row ``source[b, i]`` of sequence b to row ``destination[b, i]`` in every plane, as if at
    once.

    All rows are read before any is written, so sources and destinations may overlap in any way;
    destinations must differ from each other. One launch moves at most ``MAX_KV_MOVES`` rows, those
    of all sequences together.

    Args:
        cache: T [..., slots, Hkv, D], contiguous, updated in place; what stands before the slots
            (keys and values, layers) are planes, and the same rows move in each.
        source, destination: int32 or int64 [B, K], or [K] for one sequence; on the CPU or the
            cache's device. A negative entry moves nothing.
        page_table: int32 [B, P]; without one, rows are slots.
    Raises:
        ValueError: a tensor does not fit; the message names it.
    """
    import torch

    args = _KVMoveArgs(page_size=page_size)
    slots = [_slots(rows, cache) for rows in (source, destination)]
    _fill(
        args,
        cache=cache.flatten(0, -4),
        source=slots[0],
        destination=slots[1],
        page_table=page_table,
    )
    with torch.cuda.device(_device(cache)):
        _check(_library().te3_kv_move(byref(args), _stream()))


def _slots(rows: Tensor, cache: Tensor) -> Tensor:
    """``rows`` as the kernel wants them: int32 [B, K], beside the cache."""
    import torch

    return rows.to(cache.device, torch.int32, non_blocking=True).view(-1, rows.shape[-1])


def _fill(args: Structure, **tensors: Tensor | None) -> None:
    """Describe each tensor in the field of its name; None stays null.

    Raises:
        ValueError: a tensor is not contiguous, has too many axes, or a dtype that no kernel takes.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise ValueError(f"{name}: expected one of {', '.join(_DTYPES)}, got {tensor.dtype}")
        if tensor.ndim > _MAX_RANK:
            raise ValueError(f"{name}: expected at most {_MAX_RANK} axes, got {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
        setattr(args, name, _Tensor(tensor.data_ptr(), dtype, tensor.ndim, tuple(tensor.shape)))


def _device(tensor: Tensor) -> Any:
    if tensor.device.type != "cuda":
        raise ValueError(f"expected tensors on a CUDA device, got one on {tensor.device}")
    return tensor.device


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _run_with_workspace(op: str, args: Structure, workspace: Tensor | None, device: Any) -> None:
    """Call ``te3_<op>`` with ``workspace``, or with one of the size that it asks for."""
    import torch

    library, wanted = _library(), c_size_t()
    _check(getattr(library, f"te3_{op}_workspace")(byref(args), byref(wanted)))
    if wanted.value and workspace is None:
        workspace = torch.empty(wanted.value, dtype=torch.uint8, device=device)
    pointer, size = (None, 0) if workspace is None else (workspace.data_ptr(), workspace.nbytes)
    _check(getattr(library, f"te3_{op}")(byref(args), pointer, size, _stream()))


def _check(status: int) -> None:
    if status == 0:
        return
    message = _library().te3_last_error().decode()
    kind: type[Exception] = {1: ValueError, 2: NotImplementedError, 3: ValueError}.get(
        status, RuntimeError
    )
    raise kind(message)


@cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise EnvironmentMissingError(
            f"{_LIBRARY_NAME}: not found beside the package or in plugins/build. Build it with "
            f"`make plugins` (needs nvcc and cmake), or set {LIBRARY_VARIABLE} to its path."
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EnvironmentMissingError(
            f"{path}: cannot be loaded: {error}. Rebuild it with `make plugins`."
        ) from error
    if (version := library.te3_abi_version()) != _ABI_VERSION:
        raise EnvironmentMissingError(
            f"{path}: speaks version {version} of the C interface, this package {_ABI_VERSION}. "
            "Run `make plugins`."
        )
    library.te3_last_error.restype = c_char_p
    with_workspace: dict[str, type[Structure]] = {
        "tree_attention": _TreeAttentionArgs,
        "vision_attention": _VisionAttentionArgs,
    }
    for name, args in with_workspace.items():
        getattr(library, f"te3_{name}_workspace").argtypes = [POINTER(args), POINTER(c_size_t)]
        getattr(library, f"te3_{name}").argtypes = [POINTER(args), c_void_p, c_size_t, c_void_p]
    for name, kind in (
        ("qk_norm_mrope", _QKNormMRopeArgs),
        ("add_rms_norm", _AddRmsNormArgs),
        ("add_layer_norm", _AddLayerNormArgs),
        ("silu_mul", _SiluMulArgs),
        ("linear", _LinearArgs),
        ("kv_move", _KVMoveArgs),
    ):
        getattr(library, f"te3_{name}").argtypes = [POINTER(kind), c_void_p]
    return library
