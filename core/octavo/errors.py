"""Errors that reach a user. Each message says what was given, what is allowed and which setting changes it.

Everything a user can cause derives from `OctavoError`, so a command line prints it as one line and a server
answers with its message; anything else that escapes is a fault of the engine and keeps its traceback.
"""

__all__ = [
    "BusyError",
    "ConfigError",
    "DeadlineError",
    "EngineDeadError",
    "ModelError",
    "OctavoError",
    "PlatformError",
    "RequestError",
    "RequestFailedError",
    "UnsupportedError",
    "shown",
]


class OctavoError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(OctavoError):
    """A setting is unknown, out of range, or does not fit the model or the machine."""


class ModelError(OctavoError):
    """A model's files are missing, broken or contradict each other."""


class UnsupportedError(ModelError):
    """A model asks for something that no program here can run; the message names it."""


class PlatformError(OctavoError):
    """No platform can serve, a plugin is broken, or a platform refuses what is asked of it."""


class EngineDeadError(OctavoError):
    """The engine process is gone for good."""


class BusyError(OctavoError):
    """So much waits already that one more request is not taken; `retry_after` says in how many seconds to ask again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(OctavoError):
    """A request waited as long as it was allowed to, and nothing was computed for it."""


class RequestError(OctavoError):
    """One request is malformed or can never be served. Other requests are untouched.

    `param` names the field at fault, as the client spelt it, or is None where no single field is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestFailedError(OctavoError):
    """A request that was in order failed while it ran, alone; the message says how far that is known."""


def shown(value: object, length: int = 80) -> str:
    """A value as an error message shows it: cut to `length`, whatever a client sent."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits refuse to be written
        return f"a value of type {type(value).__name__} that cannot be written"
    return text if len(text) <= length else text[:length] + "..."
