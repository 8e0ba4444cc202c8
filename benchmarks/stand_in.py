"""A device that computes nothing and takes a set time, to measure the host on any machine.

Sessions return at once, with tensors of the right shapes and random tokens. The results count as
ready when the device has finished its queued work. A reader sleeps until then, without the
interpreter lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.policy.protocol import Policy
from trt_eagle3.decode.speculation.verify import LogitsForm
from trt_eagle3.engine.runtime.session import Capabilities, Reduction, Session, with_picked_rows
from trt_eagle3.host_copy import Readback
from trt_eagle3.spec import StateSpec

__all__ = ["StandInForward", "StandIn", "StandInSession"]


@dataclass(frozen=True)
class StandInForward:
    """A run of ``graph`` over ``batch`` rows of ``width`` tokens.

    Attributes:
        is_prompt: over prompts, or over rows that the draft backfills.
        beside: number of decoding sequences with one row each in the same run.
    """

    graph: str
    batch: int
    width: int
    is_prompt: bool
    beside: int = 0


class StandIn:
    """The device: runs queued work in order.

    Attributes:
        idle_seconds: time between two pieces of work.
    """

    def __init__(
        self,
        seconds_of: Callable[[StandInForward], float],
        on_step: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Create the device.

        Args:
            seconds_of: duration of a forward.
            on_step: called with the batch rows of each target forward that decodes.
        """
        self._seconds_of = seconds_of
        self._on_step = on_step
        self._idle_at = 0.0
        self.idle_seconds = 0.0

    def launch(self, forward: StandInForward) -> None:
        """Queue a forward."""
        now = time.perf_counter()
        if self._idle_at:
            self.idle_seconds += max(now - self._idle_at, 0.0)
        self._idle_at = max(now, self._idle_at) + self._seconds_of(forward)
        num_decoding = forward.beside if forward.is_prompt else forward.batch
        if forward.graph == "target" and num_decoding:
            self._on_step(num_decoding)

    def bundle(
        self, path: Path, policy: Policy | None, num_sequences: int, seq_len: int
    ) -> LoadedBundle:
        """Open the bundle at ``path`` on this device, with shapes as on a GPU.

        Call it inside ``attached``.

        Args:
            policy: in place of the bundle's.
            num_sequences, seq_len: the caches hold so many sequences of so many tokens.
        """
        found = LoadedBundle.open(path, policy=policy, sessions=self.open)
        limits = found.limits.model_copy(
            update={
                "max_batch_size": num_sequences,
                "max_seq_len": seq_len,
                "max_kv_tokens": (num_sequences + 1) * seq_len,
                "max_waiting": max(num_sequences, found.limits.max_waiting),
            }
        )
        return replace(found, limits=limits, fixed_shapes=True)

    def open(self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str] = ()) -> Session:
        """Open a session (a ``SessionFactory``); the vision tower is a real one."""
        real = open_graph_of(bundle, graph, intermediates)
        return real if graph == "vision" else StandInSession(self, bundle, graph, real)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Make every ``Readback`` wait for the work that was queued before it."""
        begin, wait = Readback.__init__, Readback.wait
        ready: dict[int, float] = {}

        def begin_here(readback: Readback, tensor: Tensor) -> None:
            begin(readback, tensor)
            ready[id(readback)] = self._idle_at

        def wait_here(readback: Readback) -> list[Any]:
            left = ready.pop(id(readback)) - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return wait(readback)

        with (
            patch.object(Readback, "__init__", begin_here),
            patch.object(Readback, "wait", wait_here),
        ):
            yield


class StandInSession(Session):
    """A graph on a ``StandIn``; ``real`` supplies its states."""

    def __init__(self, device: StandIn, bundle: LoadedBundle, graph: str, real: Session) -> None:
        self._device, self._graph = device, graph
        self._states = real.states
        self._dtype = bundle.dtype
        self._vocab_size = bundle.spec.vocab_size
        manifest = bundle.manifest
        self._draft_vocab_size = manifest.draft_vocab_size if manifest else 0
        self._hidden_size = manifest.hidden_size if manifest else 0
        self._aux_size = manifest.target_hidden_size * len(manifest.aux_names) if manifest else 0
        self._draw = torch.Generator().manual_seed(0)
        special = bundle.processor.tokenizer.get_added_tokens_decoder()
        self._ids = torch.tensor([i for i in range(self._vocab_size) if i not in special])

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The graph's states."""
        return self._states

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities; a target mixes if all of its states are paged."""
        paged = all(state.kind == "paged" for state in self._states)
        return Capabilities(reduces=True, mixes=self._graph == "target" and paged)

    def bind(self, name: str, tensor: Tensor) -> None:
        """Do nothing: no state is read or written."""

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs of the right shapes."""
        return self._run(inputs, {}, is_prompt=False)

    def run_prompt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs of the right shapes, with features of the picked rows only."""
        return with_picked_rows(self._run(inputs, {}, is_prompt=True), inputs["logit_rows"])

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        """Return outputs of the right shapes; tokens in place of logits if they are reduced."""
        return self._run(inputs, reduced, is_prompt=False)

    def run_mixed(
        self, parts: Sequence[Mapping[str, Tensor]], reduced: Sequence[Reduction | None]
    ) -> list[dict[str, Tensor]]:
        """Run rows of prompts and rows of a step."""
        prompts, steps = (part["inputs_embeds"] for part in parts)
        size, width = prompts.shape[:2]
        self._device.launch(
            StandInForward(self._graph, size, width, is_prompt=True, beside=len(steps))
        )
        return [
            self._outputs(part, {"logits": function} if function else {})
            for part, function in zip(parts, reduced, strict=True)
        ]

    def _run(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction], *, is_prompt: bool
    ) -> dict[str, Tensor]:
        if self._graph != "fuse":
            size, width = inputs["inputs_embeds"].shape[:2]
            self._device.launch(StandInForward(self._graph, size, width, is_prompt))
        return self._outputs(inputs, reduced)

    def _outputs(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        if self._graph == "fuse":
            count = len(inputs["aux_hidden_states"])
            return {"features": torch.zeros(count, self._hidden_size, dtype=self._dtype)}
        size, width = inputs["inputs_embeds"].shape[:2]
        num_rows = inputs["logit_rows"].shape[1]
        if self._graph == "draft":
            return {
                "logits": torch.zeros(size, num_rows, self._draft_vocab_size),
                "features_out": torch.zeros(size, width, self._hidden_size, dtype=self._dtype),
            }
        drawn = torch.randint(len(self._ids), (size, num_rows), generator=self._draw)
        tokens = self._ids[drawn]
        outputs = {"logits": tokens}
        if reduced.get("logits") != LogitsForm.TOKENS.reduction:
            zeros = torch.zeros(size, num_rows, self._vocab_size)
            outputs["logits"] = zeros.scatter_(2, tokens[..., None], 1.0)
        if self._aux_size:
            aux = torch.zeros(size, width, self._aux_size, dtype=self._dtype)
            outputs["aux_hidden_states"] = aux
        return outputs
