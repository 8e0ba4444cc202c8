"""GPU tests need a CUDA device and the library; without either they are skipped, and say which
is missing.
"""

from __future__ import annotations

import pytest
import torch

from trt_eagle3.engine.torch import capi


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not capi.available():
        pytest.skip("the kernel library is not built: make plugins")
    return torch.device("cuda")
