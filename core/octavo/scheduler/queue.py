"""Requests that wait, in the order of the policy."""

import heapq
from collections.abc import Iterator

from octavo.scheduler.policy import Key, Policy
from octavo.scheduler.request import Request

__all__ = ["WaitingQueue"]

MAX_STALE = 64  # entries of requests that left, beside as many as there are of those that wait


class WaitingQueue:
    """A priority queue with removal: O(log N) to push and pop, O(1) on average to remove."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, int, Request]] = []
        self._entries: dict[str, int] = {}  # request id -> number of its valid heap entry
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return (request for _, entry, request in self._heap if self._entries.get(request.request_id) == entry)

    def push(self, request: Request) -> None:
        """Add a request."""
        self._num_pushed += 1
        self._entries[request.request_id] = self._num_pushed
        heapq.heappush(self._heap, (self._policy(request), self._num_pushed, request))

    def peek(self) -> Request | None:
        """The first request, left in place; None if nobody waits."""
        while self._heap:
            _, entry, request = self._heap[0]
            if self._entries.get(request.request_id) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def admit(self, request: Request) -> None:
        """Take out a request that is admitted."""
        self.remove(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """A request was served so many tokens; nothing here depends on it."""

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; nothing happens if it does not wait."""
        self._entries.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:  # the head may stand for long
            self._heap = [item for item in self._heap if self._entries.get(item[2].request_id) == item[1]]
            heapq.heapify(self._heap)
