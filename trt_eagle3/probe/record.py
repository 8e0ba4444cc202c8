"""Recording: the target answers every prompt once, with the inputs of every interpretation.

Shapes: P prompt tokens, A answer tokens, n = P + A, H target hidden, N visual tokens, Vd draft
vocab, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.request.request import Request
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.errors import UserError
from trt_eagle3.probe.interpretation import takes_norm
from trt_eagle3.prompts.prompt_file import Question
from trt_eagle3.spec import StateSpec

__all__ = ["MIN_TOKENS", "NORM", "ProbeRecording", "record", "intermediate"]

NORM = "norm"
"""The name of the target's last norm in its graph."""
# answer tokens without the first of each answer: signed ranks of fewer never reach 4 sigma
MIN_TOKENS = 24


@dataclass(frozen=True)
class ProbeRecording:
    """A prompt and the target's greedy answer.

    Attributes:
        prompt: the prompt's P rows.
        token_ids: int64 [n], the answer (end token included) after the prompt.
        states: float32 [n - 1, H] by name (``intermediate``): layer outputs of every row; the last
            token has no row.
        target_probs: float32 [A - 1, Vd]: the target's probabilities of answer tokens 1 on, over
            the draft's vocabulary alone, normalised to one.
    """

    prompt: Prompt
    token_ids: Tensor
    states: Mapping[str, Tensor]
    target_probs: Tensor

    @property
    def num_rows(self) -> int:
        """n - 1: rows of the sequence."""
        return len(self.token_ids) - 1

    def aux(self, manifest: DraftManifest, num_visual_levels: int) -> Tensor:
        """float32 [n - 1, k * H]: the aux hidden states that ``manifest`` selects."""
        names = [
            intermediate(k, manifest.aux_pre_deepstack, num_visual_levels)
            for k in manifest.aux_layers
        ]
        names = [NORM] if manifest.takes_normed else names
        return torch.cat([self.states[name] for name in names], dim=-1)


def intermediate(layer: int, pre_deepstack: bool, num_visual_levels: int) -> str:
    """Return the name of out(layer) in the target graph."""
    return f"layers.{layer}.output" + (
        "_pre_deepstack" if pre_deepstack and layer < num_visual_levels else ""
    )


def record(
    bundle: LoadedBundle,
    questions: Sequence[Question],
    layers: Sequence[int],
    draft_ids: Tensor,
    *,
    max_tokens: int,
    progress: Callable[[], object] = lambda: None,
) -> list[ProbeRecording]:
    """Answer ``questions`` without speculation, and record out(k) of ``layers``.

    Args:
        draft_ids: int64 [Vd], the target ids of the draft's vocabulary.
        progress: called after each prompt.
    Raises:
        UserError: the bundle rejects a prompt, or the answers have too few tokens.
    """
    count = bundle.spec.num_visual_levels
    names = {intermediate(k, pre, count) for k in layers for pre in (True, False)}
    if bundle.manifest is not None and takes_norm(bundle.manifest, bundle.spec):
        names.add(NORM)
    session = _IntermediateSession(bundle, sorted(names))
    decoder, pool = bundle.decoder_over(session), bundle.page_pool()
    preprocessor, encoder = bundle.preprocessor(), bundle.vision_encoder()
    recordings: list[ProbeRecording] = []
    for question in questions:
        request = Request(question.prompt, question.images, question.videos)
        prompt = preprocessor.prompt(preprocessor.model_inputs(request))
        prompt = prompt.with_vision(encoder.encode(prompt))
        session.runs.clear()
        steps = decoder.run(SequenceState(prompt, pool, bundle.spec.vocab_size))
        answer = _answer(steps, frozenset(bundle.processor.end_token_ids), max_tokens)
        if len(answer) > 1:
            recordings.append(_recording(prompt, answer, session.runs, draft_ids))
        progress()
    num_tokens = sum(
        int(torch.isin(r.token_ids[-len(r.target_probs) :], draft_ids).sum()) for r in recordings
    )
    if num_tokens < MIN_TOKENS:
        raise UserError(
            f"prompts: the draft's vocabulary has {num_tokens} of the answers' tokens (without the "
            f"first of each), expected at least {MIN_TOKENS}. Give more prompts, or prompts "
            "with longer answers, or raise --max-tokens."
        )
    return recordings


class _IntermediateSession(Session):
    """The target's session; records its intermediates and logits."""

    def __init__(self, bundle: LoadedBundle, intermediates: Sequence[str]) -> None:
        self._session = bundle.open_graph("target", intermediates)
        self._intermediates = intermediates
        self.runs: list[dict[str, Tensor]] = []

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self._session.states

    def bind(self, name: str, tensor: Tensor) -> None:
        self._session.bind(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = self._session.run(inputs)
        self.runs.append(
            {name: outputs[name].float().cpu() for name in (*self._intermediates, "logits")}
        )
        return outputs


def _answer(steps: Iterable[tuple[int, ...]], ends: frozenset[int], max_tokens: int) -> list[int]:
    answer: list[int] = []
    for tokens in steps:
        answer += tokens
        if tokens[-1] in ends or len(answer) == max_tokens:
            break
    return answer


def _recording(
    prompt: Prompt, answer: list[int], runs: list[dict[str, Tensor]], draft_ids: Tensor
) -> ProbeRecording:
    decoded = runs[len(runs) - len(answer) + 1 :]  # one row each, after the prefill's chunks
    logits = torch.cat([run["logits"][0] for run in decoded])
    states = {name: torch.cat([run[name] for run in runs]) for name in runs[0] if name != "logits"}
    token_ids = torch.cat([prompt.token_ids, torch.tensor(answer)])
    return ProbeRecording(prompt, token_ids, states, logits[:, draft_ids].softmax(dim=-1))
