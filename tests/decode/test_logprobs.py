"""Log-probabilities of emitted tokens: the target's, with trees as without."""

from __future__ import annotations

import pytest
import torch

from tests.decode.structured import TREES, StubAnswer, generate, logits_after
from trt_eagle3.decode.sampling import logprobs
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(logprobs=3, max_tokens=24),
    "sampled": SamplingParams(logprobs=3, max_tokens=24, temperature=0.9, top_k=20, seed=4),
    "penalised": SamplingParams(
        logprobs=3, max_tokens=24, frequency_penalty=1.5, logit_bias={4: 4.0}
    ),
    "grammar": SamplingParams(
        logprobs=3, max_tokens=24, grammar=Grammar.json_schema({"type": "array"})
    ),
}


def worst(stub: StubAnswer) -> float:
    """The largest error against ``log_softmax`` of the raw logits; the first token has no
    log-probability here.
    """
    errors = []
    for i, (token, found) in enumerate(zip(stub.tokens[1:], stub.logprobs, strict=True), start=1):
        raw = logits_after(stub.tokens[:i]).double().log_softmax(0)
        assert found.token_id == token
        best = raw.topk(3)
        errors.append(abs(found.logprob - float(raw[token])))
        ours = torch.tensor([value for _, value in found.top])
        errors.append(float((ours - best.values).abs().max()))
        assert [t for t, _ in found.top] == best.indices.tolist()
    assert errors
    return max(errors)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_logprobs_are_of_the_raw_distribution_at_every_token(
    name: str, tree: str, ragged: bool
) -> None:
    few = SamplingParams(max_tokens=24)
    stub, other = generate([SAMPLINGS[name], few], TREES[tree], ragged=ragged)
    assert worst(stub) < 1e-6
    assert not other.logprobs


def test_logprobs_of_the_node_above_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true = logprobs.packed_logprobs
    monkeypatch.setattr(
        logprobs, "packed_logprobs", lambda logits, *more: true(logits.roll(1, dims=0), *more)
    )
    (stub,) = generate([SAMPLINGS["greedy"]], TREES["chain"])
    with pytest.raises(AssertionError):
        assert worst(stub) < 1e-6
