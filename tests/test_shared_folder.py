"""What workers share is made once, also where the first who tried could not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_folder import made_once


def test_folder_is_made_by_the_first_and_read_by_the_others(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "text").write_text("what was made")

    name = tmp_path.name  # of this test alone
    found = [made_once(tmp_path_factory, name, make) for _ in range(2)]
    assert made == [found[0]]
    assert (found[1] / "text").read_text() == "what was made"


def test_folder_that_could_not_be_made_is_made_by_the_next(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space")

    name = tmp_path.name
    with pytest.raises(OSError, match="no space"):
        made_once(tmp_path_factory, name, fail)
    found = made_once(tmp_path_factory, name, lambda folder: (folder / "whole").touch())
    assert (found / "whole").exists()
