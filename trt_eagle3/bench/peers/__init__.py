"""Peers: other engines that answer the same prompts on the same machine.

Each runs in its own process, possibly in its own Python environment. So the modules that the child
imports from here need only the standard library.
"""

__all__ = ["PEERS", "PEER_NAMES", "START_S"]

PEERS = {
    "transformers": "trt_eagle3.bench.peers.transformers_peer",
    "vllm": "trt_eagle3.bench.peers.vllm_peer",
}
"""Name -> the module whose ``start`` opens the peer."""
PEER_NAMES = tuple(sorted(PEERS))
START_S = 900.0
"""Seconds within which a peer must be ready: vLLM compiles and captures when it starts."""
