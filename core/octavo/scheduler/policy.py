"""Who goes first. A policy is a sort key: the least key runs first and is preempted last."""

from collections.abc import Callable

from octavo.scheduler.request import Request

__all__ = ["POLICIES", "Key", "Policy", "fair"]

Key = tuple[int, ...]
Policy = Callable[[Request], Key]


def fcfs(request: Request) -> Key:
    """First come, first served."""
    return (request.arrival,)


def priority(request: Request) -> Key:
    """The lower number first, then by arrival. A request that waits preempts running ones of a higher number."""
    return (request.priority, request.arrival)


def fair(request: Request) -> Key:
    """By turns, which are given at admission to whoever was served least (`FairQueue`); until then by arrival."""
    return (0, request.turn) if request.turn >= 0 else (1, request.arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": fair}
