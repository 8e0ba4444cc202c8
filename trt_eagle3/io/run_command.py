"""Run a click command as a program."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from trt_eagle3.errors import TrtEagle3Error
from trt_eagle3.io.vllm_names import called_here

__all__ = ["run_command"]


def run_command(command: click.Command) -> NoReturn:
    """Run ``command`` and exit.

    Errors of ``errors.py``, and a lack of memory, print one line and set the exit code.
    """
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except TrtEagle3Error as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.NoSuchOption as error:
        ours = called_here(error.option_name)
        _print_error(
            f"{error.option_name}: vLLM's name; {ours}" if ours else error.format_message()
        )
        sys.exit(2)
    except click.ClickException as error:
        _print_error(error.format_message())
        sys.exit(2)
    except OSError as error:  # a path that is invalid or may not be accessed
        if error.filename is None:
            raise
        _print_error(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    except MemoryError:
        _print_error("out of memory. Free some, or request less.")
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


def _print_error(message: str) -> None:
    """Print one line, even if a file name has line breaks."""
    line = r"\n".join(message.splitlines())
    click.echo(f"error: {line}", err=True)
