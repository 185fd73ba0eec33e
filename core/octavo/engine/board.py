"""What the engine process shows of itself while it works: readable by the front whatever becomes of the process."""

import mmap
import os
import struct
import tempfile
from collections.abc import Collection
from pathlib import Path

__all__ = ["Board"]

HEADER = struct.Struct("<QI")  # beats, number of requests in the step under way
ENTRY = struct.Struct("<Q")


class Board:
    """A few shared bytes: a counter that moves while the engine does, and the requests of the step under way.

    The engine writes before each step and clears after it, so that after a kill the front knows who was in it.
    Requests are numbered by the front. One writer, one reader that looks only when the writer stands still.
    """

    def __init__(self, path: Path, max_requests: int) -> None:
        self.path = path
        self._max_requests = max_requests
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), HEADER.size + ENTRY.size * max_requests)

    @classmethod
    def create(cls, max_requests: int) -> "Board":
        """A board of its own file; `remove` it in the end."""
        handle, name = tempfile.mkstemp(prefix="octavo-board-")
        os.ftruncate(handle, HEADER.size + ENTRY.size * max_requests)
        os.close(handle)
        return cls(Path(name), max_requests)

    def remove(self) -> None:
        """Close it and delete the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close it; the file stays for the other side."""
        self._memory.close()

    # The engine's side

    def beat(self) -> None:
        """A sign of life."""
        beats, num_requests = HEADER.unpack_from(self._memory)
        HEADER.pack_into(self._memory, 0, beats + 1, num_requests)

    def begin_step(self, numbers: Collection[int]) -> None:
        """Say who is in the step that begins."""
        shown = list(numbers)[: self._max_requests]
        for place, number in enumerate(shown):
            ENTRY.pack_into(self._memory, HEADER.size + place * ENTRY.size, number)
        beats, _ = HEADER.unpack_from(self._memory)
        HEADER.pack_into(self._memory, 0, beats + 1, len(shown))

    def end_step(self) -> None:
        """The step is over."""
        beats, _ = HEADER.unpack_from(self._memory)
        HEADER.pack_into(self._memory, 0, beats + 1, 0)

    # The front's side

    @property
    def num_beats(self) -> int:
        """Signs of life so far."""
        return int(HEADER.unpack_from(self._memory)[0])

    @property
    def in_step(self) -> frozenset[int]:
        """Numbers of the requests in the step under way; empty between steps."""
        _, num_requests = HEADER.unpack_from(self._memory)
        places = range(HEADER.size, HEADER.size + num_requests * ENTRY.size, ENTRY.size)
        return frozenset(ENTRY.unpack_from(self._memory, place)[0] for place in places)
