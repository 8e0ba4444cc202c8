"""A checkpoint is a folder or a Hub id; anything else is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.errors import EnvironmentMissingError, TrtEagle3Error, UserError


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder, which has no revision main"):
        resolve_checkpoint(str(tmp_path), "main")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name", "main") == tmp_path
    assert calls[0][:2] == ("owner/name", "main")
    assert "*.safetensors" in calls[0][2]
    assert not any(pattern.endswith(".py") for pattern in calls[0][2])


def _hub_error(kind: type[Exception], message: str) -> Exception:
    """Without the HTTP response, whose library differs between versions of the Hub's client."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            _hub_error(RepositoryNotFoundError, "no such\nrepository"),
            UserError,
            "the Hub rejects it",
        ),
        (_hub_error(GatedRepoError, "gated\nask"), UserError, "hf auth login"),
        (LocalEntryNotFoundError("offline"), EnvironmentMissingError, "hf download owner/name"),
        (ConnectionError("no route"), EnvironmentMissingError, "cannot be reached"),
    ],
)
def test_what_the_hub_says_is_one_line(
    error: Exception, kind: type[TrtEagle3Error], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=message) as caught:
        resolve_checkpoint("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder", "", "/nowhere", "a b/c", "config.json"])
def test_neither_folder_nor_id_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not a Hub id"):
        resolve_checkpoint(name)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UserError, match="a file, expected a folder"):
        resolve_checkpoint(str(file))
