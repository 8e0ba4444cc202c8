"""The torch session: interprets a graph node by node, on the CPU or on CUDA.

On CUDA our ops use our kernels (``engine/capi``), or stock operations if the library is missing.
For debugging a session can return any tensor of the graph by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import torch
from torch import Tensor

from trt_eagle3.dtype import dtype_of_onnx
from trt_eagle3.engine import capi
from trt_eagle3.engine.runtime.buckets import MAX_WHOLE_WIDTH
from trt_eagle3.engine.runtime.collectives import Collectives
from trt_eagle3.engine.runtime.session import (
    Capabilities,
    Continuation,
    Reduction,
    Session,
    check_names,
    with_picked_rows,
)
from trt_eagle3.engine.torch.capture.draft_pieces import DRAFT_ROW_INPUTS, DraftPieces, split_draft
from trt_eagle3.engine.torch.capture.pieces import RowFormat, split_at_attention
from trt_eagle3.engine.torch.capture.recorder import PieceRecorder, Recorder, capturing
from trt_eagle3.engine.torch.capture.target_pieces import TargetPieces
from trt_eagle3.engine.torch.capture.whole import Captured, CapturedGraphs, shapes_of
from trt_eagle3.engine.torch.mixed import (
    AUX,
    LOGITS,
    ROW_INPUTS,
    joined,
    mixable,
    mixed_steps,
    reduction_of,
    split_rows,
)
from trt_eagle3.engine.torch.ops import STANDARD_OPS
from trt_eagle3.engine.torch.program import ReadWeight, Step, compute, load_program
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = ["TorchSession"]

_MIN_UNREAD_ROWS = {"cpu": 32, "cuda": 512}
"""From this number of unread rows on, a prompt's last layer skips them. On a GPU fewer rows cost no
time, because reading the weights takes longer.
"""


@dataclass(frozen=True)
class _Input:
    """Required type and shape of an input; a dimension without a name is an exact size."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, tensor: onnx.TypeProto.Tensor) -> _Input:
        shape = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
        return cls(dtype_of_onnx(tensor.elem_type).torch, tuple(shape))

    def check(self, name: str, tensor: Tensor) -> None:
        same = len(self.shape) == tensor.ndim and all(
            isinstance(e, str) or e == a for e, a in zip(self.shape, tensor.shape, strict=True)
        )
        if not same or self.dtype != tensor.dtype:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise UserError(f"{name}: expected {self.dtype} {list(self.shape)}, got {got}")

    @property
    def row(self) -> RowFormat:
        """The same type and shape, for captured pieces."""
        return RowFormat(self.dtype, tuple(0 if isinstance(e, str) else e for e in self.shape))


class TorchSession(Session):
    """Runs one graph. Bound caches are updated in place.

    On CUDA, repeated shapes are captured in a CUDA graph. The outputs of such a run are static
    buffers, which the next run of the same shapes overwrites.
    """

    def __init__(
        self,
        model: Path,
        weights_root: Path,
        intermediates: Sequence[str] = (),
        device: str = "cpu",
        read_weight: ReadWeight | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """Load a graph; see ``load_program``."""
        if device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentMissingError(
                "engine.device: cuda: torch sees no CUDA device. Set engine.device: cpu"
            )
        self.device = torch.device(device)
        program = load_program(
            model, weights_root, intermediates, self.device, read_weight, collectives
        )
        self._inputs = {name: _Input.of(tensor) for name, tensor in program.inputs.items()}
        self._outputs = program.outputs
        self._constants = program.constants
        self._steps = program.steps
        self._prompt_steps = program.prompt_steps
        self._states: tuple[StateSpec, ...] = program.states
        mixes = mixable(program.inputs, program.outputs, program.states, program.steps)
        self._capabilities = Capabilities(reduces=True, mixes=mixes)
        self._mixed_steps = mixed_steps(program.steps)
        self._mixed_prompt_steps = mixed_steps(program.prompt_steps or ())
        self._bound: dict[str, Tensor] = {}
        self._captured = CapturedGraphs()
        self._captures = device == "cuda" and capi.available()
        self._target_pieces: TargetPieces | None = None
        self._draft_pieces: DraftPieces | None = None
        if mixes and self._captures:
            self._target_pieces = self._new_target_pieces(PieceRecorder())

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Layer states that the graph keeps between runs, in the order of the layers."""
        return self._states

    @property
    def capabilities(self) -> Capabilities:
        """Outputs are always reduced within the graph; only some graphs mix."""
        return self._capabilities

    def bind(self, name: str, tensor: Tensor) -> None:
        """Use ``tensor`` as the static buffer of input or output ``name``."""
        if name not in self._inputs and name not in self._outputs:
            raise UserError(f"{name}: the graph has no such input or output")
        self._bound[name] = tensor
        self._captured.clear()
        self._draft_pieces = None

    @property
    def _states_are_bound(self) -> bool:
        return all(state.name in self._bound for state in self.states)

    def _new_target_pieces(self, recorder: Recorder) -> TargetPieces:
        split = split_at_attention(self._mixed_steps, self._mixed_prompt_steps)
        rows = self._rows(ROW_INPUTS)
        return TargetPieces(split, self._constants, rows, recorder, self.device)

    def _new_draft_pieces(self, recorder: Recorder, table_len: int) -> DraftPieces | None:
        """Return None if the graph is not a draft that can be captured in pieces."""
        split = split_draft(self._prompt_steps or (), self._inputs, self.states)
        if split is None:
            return None
        constants = {**self._constants, **self._bound}
        rows = self._rows(DRAFT_ROW_INPUTS)
        return DraftPieces(split, constants, rows, recorder, self.device, table_len=table_len)

    def _rows(self, names: Sequence[str]) -> dict[str, RowFormat]:
        return {name: i.row for name, i in self._inputs.items() if name in names}

    @torch.inference_mode()
    def capture_rows(self, most: int, table_len: int, has_room: Callable[[], bool]) -> int:
        """Capture the pieces of a target, or of a draft whose states are bound."""
        if self._target_pieces is not None:
            return self._target_pieces.capture(most, has_room)
        if not self._captures or not self._states_are_bound:
            return 0
        self._draft_pieces = self._new_draft_pieces(PieceRecorder(), table_len)
        return self._draft_pieces.capture(most, has_room) if self._draft_pieces else 0

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once; return the outputs without a static buffer, on this session's device."""
        return self._run(inputs, {})

    @torch.inference_mode()
    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Run once, but reduce the outputs named in ``reduced`` as parts of the graph.

        A function takes the output before it is widened to float32, if the graph widens it.
        """
        return self._run(inputs, reduced)

    @torch.inference_mode()
    def run_then(
        self, inputs: Mapping[str, Tensor], then: Continuation, further: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run once; ``then`` is a part of the captured graph."""
        return self._run(inputs, {}, then, further)

    @torch.inference_mode()
    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run over prompts. If many rows are unread, the last layer computes only read ones."""
        batch, width, _ = inputs["tree_mask"].shape
        in_one_graph = batch == 1 and width <= MAX_WHOLE_WIDTH  # such a shape is captured whole
        if self._target_pieces is not None and self._states_are_bound and not in_one_graph:
            return self.run_mixed([inputs], [None])[0]
        pieces = None if in_one_graph else self._draft_pieces
        if pieces is not None and pieces.fit(inputs):
            self.check(inputs)
            return pieces.run(inputs)
        num_unread = batch * (width - inputs["logit_rows"].shape[1])
        if self._prompt_steps is None or num_unread < _MIN_UNREAD_ROWS[self.device.type]:
            return with_picked_rows(self._run(inputs, {}), inputs["logit_rows"])
        self.check(inputs)
        return self._interpret(self._placed(inputs), {}, self._prompt_steps)

    @torch.inference_mode()
    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run ``parts`` as one forward (``mixed``)."""
        for part in parts:
            self.check(part)
        widths = [(part["tree_mask"].shape[0], part["tree_mask"].shape[1]) for part in parts]
        wanted = [(part["logit_rows"].shape[0], part["logit_rows"].shape[1]) for part in parts]
        num_unread = sum(a * b for a, b in widths) - sum(a * b for a, b in wanted)
        skips = num_unread >= _MIN_UNREAD_ROWS[self.device.type]
        of_prompts = bool(self._mixed_prompt_steps) and skips
        reduce = {LOGITS: reduction_of(wanted, reduced)}
        placed = [self._placed(part) for part in parts]
        outputs: dict[str, Any] = self._run_joined(placed, reduce, of_prompts)
        split = [{LOGITS: logits} for logits in outputs[LOGITS]]
        if AUX in outputs:
            for part, aux in zip(split, split_rows(outputs[AUX], widths), strict=True):
                part[AUX] = aux
        return split

    def _run_joined(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        reduced: Mapping[str, Callable[[Tensor], Any]],
        of_prompts: bool,
    ) -> dict[str, Tensor]:
        """Run one forward over all rows of ``parts``.

        ``of_prompts``: the last layer computes only the rows that are read.
        """
        pieces = self._target_pieces
        rest = pieces.run(parts, self._bound, picked=of_prompts) if pieces is not None else None
        if rest is None:
            rest = joined(parts), self._mixed_prompt_steps if of_prompts else self._mixed_steps
        values, steps = rest
        return self._interpret(values, reduced, steps)

    def _run(
        self,
        inputs: Mapping[str, Tensor],
        reduced: Mapping[str, Reduction],
        then: Continuation | None = None,
        further: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        self.check(inputs)
        names = tuple(further)

        def compute(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            own = {name: tensor for name, tensor in given.items() if name not in names}
            outputs = self._interpret(own, reduced, self._steps)
            if then is None:
                return outputs
            return then.function(outputs, {name: given[name] for name in names})

        given = {**inputs, **further}
        if self.device.type != "cuda":
            return compute(self._placed(given))
        shapes = shapes_of(given)
        shapes += tuple((f"{name} by {f.name}", ()) for name, f in reduced.items())
        shapes += ((f"then {then.name}", ()),) if then else ()
        captured = self._captured.get(shapes)
        if captured is None:
            if not self._captured.due(shapes):
                return compute(self._placed(given))
            captured = self._captured.add(shapes, self._capture(self._placed(given), compute))
        return captured.run(given)

    def _capture(
        self,
        inputs: Mapping[str, Tensor],
        compute: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    ) -> Captured:
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        # the first use in each thread creates a handle, which is forbidden while capturing
        torch.cuda.current_blas_handle()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # one graph runs at a time, so all graphs share the memory of their intermediates
        with capturing(graph, self._captured.pool):
            outputs = compute(static)
        return Captured(graph, static, outputs)

    def _interpret(
        self,
        inputs: Mapping[str, Tensor],
        reduced: Mapping[str, Callable[[Tensor], Any]],
        steps: Sequence[Step],
    ) -> dict[str, Tensor]:
        """Run ``steps`` one after the other."""
        values: dict[str, Any] = {**self._constants, **self._bound, **inputs}
        for step in steps:
            if step.outputs[0] in reduced and step.function is STANDARD_OPS["Cast"]:
                values[step.outputs[0]] = values[step.inputs[0]]
                continue
            compute(step, values)
        values.update({name: function(values[name]) for name, function in reduced.items()})
        return self._results(values)

    def _results(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return free outputs; copy bound ones to their buffers if not computed in place."""
        free = {}
        for name in self._outputs:
            buffer = self._bound.get(name)
            if buffer is None:
                free[name] = values[name]
            elif buffer.data_ptr() != values[name].data_ptr():
                buffer.copy_(values[name])
        return free

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Check the names, types and shapes of the inputs of a run."""
        check_names(inputs, self._inputs, self._bound)
        for name, tensor in inputs.items():
            self._inputs[name].check(name, tensor)

    def _placed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous inputs on this device.

        Unbound states are copied, because the ops would write into the caller's tensors.
        """
        placed = {name: to_device(t, self.device).contiguous() for name, t in inputs.items()}
        states = {state.name for state in self.states}
        return {n: t.clone() if n in states and t is inputs[n] else t for n, t in placed.items()}
