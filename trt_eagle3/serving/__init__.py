"""Share what every server needs: request limits, metrics, the OpenAI-compatible front end."""

from trt_eagle3.serving.config import ServingConfig

__all__ = ["ServingConfig"]
