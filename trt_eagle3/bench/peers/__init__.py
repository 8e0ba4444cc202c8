"""Other engines, asked the same prompts on the same machine.

Each runs in a process of its own, and maybe in a Python environment of its own, so nothing that the
child imports from here needs more than the standard library.
"""

__all__ = ["PEERS", "PEER_NAMES", "START_S"]

PEERS = {
    "transformers": "trt_eagle3.bench.peers.transformers_peer",
    "vllm": "trt_eagle3.bench.peers.vllm_peer",
}
"""Name -> the module whose ``start`` opens it."""
PEER_NAMES = tuple(sorted(PEERS))
START_S = 900.0
"""Within which a peer must be ready: vLLM compiles and captures when it starts."""
