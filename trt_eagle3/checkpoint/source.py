"""Find a checkpoint by directory or Hugging Face Hub id."""

from __future__ import annotations

import re
from pathlib import Path

from trt_eagle3.errors import EnvironmentMissingError, UserError

__all__ = ["is_hub_id", "resolve_checkpoint"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "pytorch_model*.bin")


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form of a Hub id, ``owner/name``."""
    return _HUB_ID.fullmatch(name) is not None


def resolve_checkpoint(name: str, revision: str | None = None) -> Path:
    """Return the folder of checkpoint ``name``: itself, or the Hub's snapshot.

    A snapshot is downloaded if it is not cached.

    Raises:
        UserError: ``name`` is neither a folder nor a Hub id, a folder has a revision, or the Hub
            rejects the request.
        EnvironmentMissingError: the Hub cannot be reached and the cache lacks the snapshot.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        if revision is not None:
            raise UserError(
                f"{name}: a folder, which has no revision {revision}. Leave the revision out."
            )
        return path
    if path.is_file():
        raise UserError(f"{name}: a file, expected a folder. Name the one it is in: {path.parent}")
    if path.exists() or not is_hub_id(name):
        raise UserError(f"{name}: no such folder, and not a Hub id (owner/name). Check the path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    away = (
        f"{name}: no such folder here, not in the Hub's cache, and the Hub cannot be reached. "
        f"Check the path, or download it where there is a network: hf download {name}"
    )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except LocalEntryNotFoundError as error:
        # in some versions this is also an HTTP error, so it is caught first
        raise EnvironmentMissingError(away) from error
    except GatedRepoError as error:
        raise UserError(
            f"{name}: the Hub gates it, and you have no access. Request it there, then: hf auth "
            "login"
        ) from error
    except (RepositoryNotFoundError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: no such folder here, and the Hub rejects it: {reason}") from error
    except OSError as error:
        raise EnvironmentMissingError(away) from error
