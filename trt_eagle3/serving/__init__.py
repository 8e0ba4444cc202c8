"""What every server needs, whatever its protocol: limits on requests, metrics, the
OpenAI-compatible front.
"""

from trt_eagle3.serving.config import ServingConfig

__all__ = ["ServingConfig"]
