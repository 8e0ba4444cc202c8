"""The TensorRT session: runs an engine over torch CUDA tensors; caches are updated in place."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.session import Session, check_names
from trt_eagle3.engine.torch.capture.recorder import capturing
from trt_eagle3.engine.torch.capture.whole import Captured, CapturedGraphs, shapes_of
from trt_eagle3.engine.trt.dialects.dialect import Dialect
from trt_eagle3.engine.trt.dialects.registry import find_dialect
from trt_eagle3.engine.trt.folder import RUNTIME_CACHE_FILE, EngineFolder
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.ports import check_states, choose_profile, engine_ports
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

__all__ = ["TensorRTSession"]

_log = logging.getLogger("trt_eagle3")
_FIX = "Rebuild here: trt-eagle3 build --config <its config>"


class TensorRTSession(Session):
    """Runs one engine. Caches are updated in place, and must be bound.

    A run uses the first profile that fits all its shapes; decode profiles precede prompt profiles.
    Repeated shapes are captured in a CUDA graph with its own context. The outputs of such a run are
    static buffers, which the next run of the same shapes overwrites. If TensorRT reports that a
    context cannot be captured, every run is launched anew.
    All contexts share one piece of device memory, so the runs of a session are sequential.
    """

    def __init__(
        self,
        model: Path,
        weights_root: Path,
        intermediates: Sequence[str] = (),
        device: str = "cuda",
    ) -> None:
        del weights_root  # an engine holds its weights
        if device != "cuda":
            raise UserError(f"engine.device: TensorRT runs on cuda, got {device!r}")
        folder = EngineFolder(model.parent)
        for name in intermediates:
            if name not in folder.intermediates:
                raise UserError(
                    f"{name}: this TensorRT engine does not output it. Build with "
                    "engine.backend: torch."
                )
        folder.check()
        load_plugins(folder.config.tensorrt)
        self._file = folder.engine
        self._dialect = find_dialect(folder.config.tensorrt)
        self._engine = _open_engine(self._dialect, folder)
        self._inputs, self._outputs = engine_ports(self._dialect.trt, self._engine)
        self._states: tuple[StateSpec, ...] = folder.states
        self._bound: dict[str, Tensor] = {}
        self._captured = CapturedGraphs()
        self._captures = True
        self._options = self._dialect.runtime_options(
            self._engine, folder.path / RUNTIME_CACHE_FILE
        )
        self._contexts: dict[int, Any] = {}
        # given the default stream, TensorRT would wait for the device
        self._stream = torch.cuda.Stream()
        self._memory = _allocate(self._dialect.device_bytes(self._engine), self._file)
        unread = set(folder.intermediates) - set(intermediates)
        self._unread = {name: self._outputs.pop(name) for name in unread}
        # memory for unread outputs and empty tensors. All layers share it: a layer reads its router
        # logits before the next layer overwrites them
        self._scratch = torch.empty(self._scratch_bytes(), dtype=torch.uint8, device="cuda")

    def _scratch_bytes(self) -> int:
        """Bytes of the largest output in ``_unread``, for the most tokens of a run."""
        if not self._unread:
            return 256
        rows = max(math.prod(most[:2]) for _, most in self._inputs["inputs_embeds"].ranges)
        widths = (port.shape[-1] * port.dtype.itemsize for port in self._unread.values())
        return max(256, rows * max(widths))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Layer states that the graph keeps between runs, in the order of the layers."""
        return self._states

    def bind(self, name: str, tensor: Tensor) -> None:
        """Use ``tensor`` (contiguous, CUDA) as the static buffer of input or output ``name``."""
        port = self._inputs.get(name) or self._outputs.get(name)
        if port is None:
            raise UserError(f"{name}: the engine has no such input or output")
        port.check(tensor)
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise UserError(
                f"{name}: expected a contiguous tensor on cuda, got one on {tensor.device}"
            )
        self._bound[name] = tensor
        self._captured.clear()

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; return the outputs that have no static buffer, on the GPU."""
        shapes = shapes_of(inputs)
        captured = self._captured.get(shapes)
        if captured is not None:
            self._check_types(inputs)
            return captured.run(inputs)
        self._check(inputs)
        profile = self._profile(inputs)
        placed = {
            name: tensor.cuda(non_blocking=True).contiguous() for name, tensor in inputs.items()
        }
        if self._captures and self._captured.due(shapes):
            if captured := self._capture(profile, placed):
                return self._captured.add(shapes, captured).run(inputs)
            self._captures = False
            _log.warning("%s: cannot be captured in CUDA graphs, so steps take longer", self._file)
        return self._run_once(profile, placed)

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        check_names(inputs, self._inputs, self._bound)
        check_states(self.states, self._bound)
        for name, tensor in inputs.items():
            self._inputs[name].check(tensor)

    def _check_types(self, inputs: Mapping[str, Tensor]) -> None:
        """Check the types of inputs before a replay; their names and shapes are known."""
        for name, tensor in inputs.items():
            if tensor.dtype != self._inputs[name].dtype:
                self._inputs[name].check(tensor)

    def _profile(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the first profile that was built for these shapes."""
        shapes = {
            name: tuple(t.shape)
            for name, t in {**self._bound, **inputs}.items()
            if name in self._inputs
        }
        return choose_profile(self._inputs, shapes, self._file)

    def _run_once(self, profile: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run in the profile's own context, which the first run creates."""
        known = profile in self._contexts
        if not known:
            self._contexts[profile] = self._new_context(profile)
        outputs = self._enqueue(self._contexts[profile], inputs)
        if not known:
            self._dialect.keep_compiled(self._options)
        return outputs

    def _new_context(self, profile: int, *, captured: bool = False) -> Any:
        memory, stream = self._memory, self._stream.cuda_stream
        context = self._dialect.new_context(
            self._engine,
            memory.data_ptr(),
            memory.numel(),
            profile,
            stream,
            self._options,
            captured=captured,
        )
        if context is None:
            self._dialect.log.fail(
                f"{self._file}: cannot make an execution context for profile {profile}", _FIX
            )
        self._stream.synchronize()
        return context

    def _prepare(self, context: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set shapes and addresses in ``context``; return new outputs."""
        given = {**{n: t for n, t in self._bound.items() if n in self._inputs}, **inputs}
        for name, tensor in given.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                self._dialect.log.fail(f"{name}: {list(tensor.shape)}", _FIX)
        outputs = {}
        for name, port in self._outputs.items():
            if name not in self._bound:
                shape = tuple(context.get_tensor_shape(name))
                if any(size < 0 for size in shape):
                    self._dialect.log.fail(
                        f"{name}: its shape cannot be computed from the inputs", _FIX
                    )
                outputs[name] = torch.empty(shape, dtype=port.dtype, device="cuda")
        for name, tensor in {
            **given,
            **{n: t for n, t in self._bound.items() if n in self._outputs},
            **outputs,
        }.items():
            self._set_address(context, name, tensor)
        for name in self._unread:
            self._set_address(context, name, self._scratch)
        return outputs

    def _set_address(self, context: Any, name: str, tensor: Tensor) -> None:
        if not context.set_tensor_address(name, tensor.data_ptr() or self._scratch.data_ptr()):
            self._dialect.log.fail(f"{name}: its address", _FIX)

    def _enqueue(self, context: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = self._prepare(context, inputs)
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        self._execute(context, self._stream)
        # so that memory which the caller frees now is not overwritten before it has been read
        caller.wait_stream(self._stream)
        return outputs

    def _execute(self, context: Any, stream: torch.cuda.Stream) -> None:
        if not context.execute_async_v3(stream.cuda_stream):
            self._dialect.log.fail(
                f"{self._file}: a run failed", "Run trt-eagle3 doctor, or rebuild."
            )

    def _capture(self, profile: int, inputs: Mapping[str, Tensor]) -> Captured | None:
        """Capture a graph with its own context, because changing a context's shapes would spoil
        graphs captured from it. None if TensorRT reports that it cannot be captured.
        """
        context = self._new_context(profile, captured=True)
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        # run once, so that TensorRT's work for new shapes happens outside the capture
        outputs = self._enqueue(context, static)
        torch.cuda.synchronize()
        self._dialect.keep_compiled(self._options)
        if not self._dialect.is_capturable(context, self._stream.cuda_stream):
            return None
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            self._execute(context, torch.cuda.current_stream())
        return Captured(graph, static, outputs, keep=context)


def _open_engine(dialect: Dialect, folder: EngineFolder) -> Any:
    """Deserialise the engine from its memory-mapped file. A stripped engine gets its weights from
    the ONNX graph.
    """
    try:
        engine = dialect.load_engine(folder.engine)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.engine}: cannot read it: {error}. {_FIX}") from error
    if engine is None:
        dialect.log.fail(f"{folder.engine}: cannot load it", _FIX)
    stripped = folder.config.tensorrt.strip_weights
    if stripped and not dialect.read_weights(engine, str(folder.onnx)):
        dialect.log.fail(f"{folder.engine}: cannot load the weights of {folder.onnx}", _FIX)
    return engine


def _allocate(num_bytes: int, file: Path) -> Tensor:
    try:
        return torch.empty(max(num_bytes, 256), dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"{file}: its activations need {num_bytes / 1e9:.2f} GB of device memory, which is "
            "not free. Rebuild with a smaller limits.max_visual_tokens or engine.prefill_chunk."
        ) from error
