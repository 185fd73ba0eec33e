"""Whether somebody is watching."""

import sys

__all__ = ["progress_wanted"]


def progress_wanted() -> bool:
    """Progress bars are for terminals; logs and pipes stay clean."""
    return sys.stderr is not None and sys.stderr.isatty()
