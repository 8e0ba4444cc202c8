"""What all tests share: hypothesis draws the same examples on every machine, and torch keeps to one core."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("trt-eagle3", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("trt-eagle3")
torch.set_num_threads(1)
