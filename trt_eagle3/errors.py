"""The ways a run can end badly, each with its exit code."""

__all__ = [
    "EngineFailedError",
    "EnvironmentMissingError",
    "GateFailedError",
    "OverloadedError",
    "TrtEagle3Error",
    "UserError",
]


class TrtEagle3Error(Exception):
    """Base of every error that the command line prints as one line, without a traceback."""

    exit_code = 1


class GateFailedError(TrtEagle3Error):
    """A check that the user asked for did not hold."""

    exit_code = 1


class UserError(TrtEagle3Error, ValueError):
    """The user's input is wrong: names the thing, what was expected, what was got, and the fix."""

    exit_code = 2


class EngineFailedError(TrtEagle3Error):
    """An engine computed what cannot be right."""

    exit_code = 1


class OverloadedError(TrtEagle3Error):
    """More is asked of an engine than it may queue; the same request may be welcome a little later."""

    exit_code = 1


class EnvironmentMissingError(TrtEagle3Error):
    """This machine lacks something that the command needs; the message says how to get it."""

    exit_code = 3
