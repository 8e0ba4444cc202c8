"""A click command as a program."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from trt_eagle3.errors import TrtEagle3Error

__all__ = ["run_command"]


def run_command(command: click.Command) -> NoReturn:
    """Run ``command`` and exit: errors of ``errors.py``, and want of memory, print one line and set
    the exit code.
    """
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except TrtEagle3Error as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _print_error(error.format_message())
        sys.exit(2)
    except OSError as error:  # of a path that may not be looked at, or is none
        if error.filename is None:
            raise
        _print_error(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    except MemoryError:
        _print_error("no memory is left. Free some, or ask for less.")
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


def _print_error(message: str) -> None:
    """One line, whatever file names it holds."""
    line = r"\n".join(message.splitlines())
    click.echo(f"error: {line}", err=True)
