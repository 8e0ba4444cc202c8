"""Time to the first token: what cannot be measured is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.qwen3 import build_qwen3
from tests.tiny import build_tiny
from trt_eagle3.bench.first_token import first_token
from trt_eagle3.bench.peers.job import PeerOptions
from trt_eagle3.errors import EnvironmentMissingError, UserError


def test_first_token_without_torchvision_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    # read by every Python that starts, so by the peer's
    (blocked / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n == 'torchvision' else find(n, p)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    with pytest.raises(EnvironmentMissingError, match="pip install torchvision"):
        first_token(build_tiny(tmp_path), peer=PeerOptions("transformers"))


def test_first_token_of_a_text_only_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reads text only"):
        first_token(build_qwen3(tmp_path))
