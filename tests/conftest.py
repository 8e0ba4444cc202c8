"""What all tests share: each draws the same numbers on every machine and in any order, and torch
keeps to one core.
"""

from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "trt-eagle3", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("trt-eagle3")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """torch's own generator; a test that wants others makes one."""
    torch.manual_seed(crc32(request.node.nodeid.encode()))
