"""How a check ends that does not simply return."""

__all__ = ["CheckError", "NotOfferedError", "require"]


class CheckError(AssertionError):
    """The platform does not do what it must, or what it says."""


class NotOfferedError(Exception):
    """There is nothing to check: the platform does not offer this, and need not."""


def require(condition: bool, said: str) -> None:
    """Fail the check with a text. An `assert` would be gone under -O.

    Raises:
        CheckError: the condition does not hold.

    """
    if not condition:
        raise CheckError(said)
