"""Commands end with one line, whatever ends them."""

from __future__ import annotations

import click
import pytest

from trt_eagle3.errors import EngineFailedError, UserError
from trt_eagle3.io.run_command import run_command


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("f: expected a"), 2, "error: f: expected a\n"),
        (EngineFailedError("engine: it ended"), 1, "error: engine: it ended\n"),
        (MemoryError(), 1, "error: out of memory. Free some, or request less.\n"),
        (FileNotFoundError(2, "none", "a\nb"), 2, "error: a\\nb: none\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_run_command_error_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["fail"])
    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == status
    assert capsys.readouterr().err.lstrip("\n") == said
