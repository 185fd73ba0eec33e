"""Names a plugin that hangs, since nothing else would: no error is raised, and no line is logged."""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["Watchdog"]

STDERR = 2  # the descriptor itself: sys.stderr may be a capture's, or None
GRACE_SECONDS = 0.5

T = TypeVar("T")


class Watchdog:
    """Watches calls into foreign code.

    By default a call that takes over `timeout` seconds is named on standard error with the stack of every
    thread, again and again, and may go on. That needs the interpreter lock, which a hang in native code may
    hold for ever; faulthandler's timer needs no lock, but a process has one such timer, and it may be somebody
    else's. So only with `exit_on_hang`, for a command that owns its process, the timer is the second line:
    the process is named, and ended with status 1.
    """

    def __init__(self, timeout: float = 10.0, exit_on_hang: bool = False) -> None:
        self.timeout = timeout
        self.exit_on_hang = exit_on_hang

    def call(self, title: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`fn(*args, **kwargs)`, watched. `title` says what is called, and stands in each stack as a frame."""
        with self._watched(title):
            return _titled(title, fn, *args, **kwargs)

    @contextlib.contextmanager
    def _watched(self, title: str) -> Iterator[None]:
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(title, done), name="octavo-watchdog", daemon=True)
        watcher.start()
        if self.exit_on_hang:
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, exit=True, file=STDERR)
        try:
            yield
        finally:
            if self.exit_on_hang:
                faulthandler.cancel_dump_traceback_later()
            done.set()
            watcher.join()

    def _watch(self, title: str, done: threading.Event) -> None:
        while not done.wait(self.timeout):
            os.write(STDERR, f"octavo: {title} hangs, it has not come back for {self.timeout:g} seconds\n".encode())
            faulthandler.dump_traceback(STDERR, all_threads=True)
            if self.exit_on_hang:
                os._exit(1)


def _titled(title: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn` in a frame whose name is `title`: the timer's dump shows frames and nothing else."""

    def call() -> T:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=title)
    return call()
