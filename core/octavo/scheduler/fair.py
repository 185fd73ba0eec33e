"""Shares between tenants: whoever has been served least, by weight, is admitted next.

Each tenant, and each user inside a tenant, has a level: tokens served over its weight. The waiting tenant of the
lowest level goes next, with its user of the lowest level, whose requests go in the order of arrival. Whoever begins
to wait starts no lower than the level at which others were last chosen, so that idleness saves up nothing; what
somebody owes from before is kept. (Virtual token counters, Sheng et al., "Fairness in Serving Large Language
Models", 2024, in two storeys.)

At its first admission a request gets a turn, which it keeps: among running and preempted requests the earlier turn
goes first.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.scheduler.policy import POLICIES, fair
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.request import Request

__all__ = ["FairQueue", "parse_weights", "queue_of"]

MAX_STALE = 64  # entries of children that left, beside as many as there are of those that wait
MAX_IDLE = 1000  # children without waiting requests whose debt is remembered


def parse_weights(text: str | None) -> dict[str, float]:
    """Weights of tenants, written "name=3,other=0.5".

    Raises:
        ValueError: it is no such list, or a weight is not over 0.

    """
    weights = {}
    for part in (text or "").split(","):
        if part.strip():
            name, sign, weight = part.partition("=")
            weights[name.strip()] = float(weight)
            if not sign or not 0 < weights[name.strip()] < float("inf"):
                raise ValueError(f"{part.strip()!r} is not NAME=WEIGHT with a weight over 0")
    return weights


def queue_of(config: SchedulerConfig) -> WaitingQueue:
    """The queue of a policy.

    Raises:
        ConfigError: the weights of tenants are not NAME=WEIGHT.

    """
    if config.scheduling_policy != "fair":
        return WaitingQueue(POLICIES[config.scheduling_policy])
    try:
        return FairQueue(parse_weights(config.tenant_weights))
    except ValueError as error:
        raise ConfigError(f"tenant_weights is {config.tenant_weights!r}: {error}") from None


class _Party:
    """Somebody who is served: a tenant, with its users as children, or a user, with requests."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.level = 0.0
        self.base = 0.0  # the level at which one of its children was last chosen
        self.children: dict[str, _Party] = {}
        self.idle: OrderedDict[str, _Party] = OrderedDict()
        self.requests: dict[str, Request] = {}
        self._heap: list[tuple[float, str]] = []  # of waiting children; a level may have risen since

    @property
    def waits(self) -> bool:
        """Whether it has requests that wait."""
        return bool(self.requests or self.children)

    def child(self, name: str, weight: float = 1.0) -> "_Party":
        """A child that is about to wait."""
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = self.idle.pop(name) if name in self.idle else _Party(weight)
            found.level = max(found.level, self.base)
            heapq.heappush(self._heap, (found.level, name))
            if len(self._heap) > 2 * len(self.children) + MAX_STALE:
                self._heap = [(child.level, name) for name, child in self.children.items()]
                heapq.heapify(self._heap)
        return found

    def known(self, name: str) -> "_Party | None":
        """A child, if it waits or is remembered."""
        return self.children.get(name) or self.idle.get(name)

    def settle(self, name: str) -> None:
        """A child may have nothing left that waits."""
        child = self.children.get(name)
        if child is not None and not child.waits:
            self.idle[name] = self.children.pop(name)
            if len(self.idle) > MAX_IDLE:
                self.idle.popitem(last=False)

    def lowest(self) -> "_Party":
        """The waiting child of the lowest level; there is one."""
        while True:
            level, name = self._heap[0]
            child = self.children.get(name)
            if child is None:
                heapq.heappop(self._heap)
            elif child.level > level:
                heapq.heapreplace(self._heap, (child.level, name))
            else:
                return child


class FairQueue(WaitingQueue):
    """Requests that wait, under the fair policy. Those that were admitted before go first, by their turns."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__(fair)
        self._weights = weights
        self._root = _Party()
        self._num_new = 0
        self._num_turns = 0

    def __len__(self) -> int:
        return super().__len__() + self._num_new

    def __iter__(self) -> Iterator[Request]:
        yield from super().__iter__()
        for tenant in self._root.children.values():
            for user in tenant.children.values():
                yield from user.requests.values()

    def push(self, request: Request) -> None:
        """Add a request."""
        if request.turn >= 0:
            super().push(request)
            return
        tenant, user = request.tenant
        self._root.child(tenant, self._weights.get(tenant, 1.0)).child(user).requests[request.request_id] = request
        self._num_new += 1

    def peek(self) -> Request | None:
        """The request that goes next, left in place; None if nobody waits."""
        again = super().peek()
        if again is not None or not self._num_new:
            return again
        return next(iter(self._root.lowest().lowest().requests.values()))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands; nothing happens if it does not wait."""
        super().remove(request)
        name, user_name = request.tenant
        tenant = self._root.children.get(name)
        user = tenant.children.get(user_name) if tenant else None
        if tenant is not None and user is not None and user.requests.pop(request.request_id, None) is not None:
            self._num_new -= 1
            tenant.settle(user_name)
            self._root.settle(name)

    def admit(self, request: Request) -> None:
        """Take out a request that is admitted, and give it its turn if it has none."""
        self.remove(request)
        if request.turn < 0:
            request.turn, self._num_turns = self._num_turns, self._num_turns + 1
            tenant = self._root.known(request.tenant[0])
            if tenant is not None:
                self._root.base = max(self._root.base, tenant.level)
                user = tenant.known(request.tenant[1])
                tenant.base = max(tenant.base, user.level if user is not None else 0.0)

    def charge(self, request: Request, num_tokens: int) -> None:
        """A request was served so many tokens."""
        tenant = self._root.known(request.tenant[0])
        if tenant is not None:
            tenant.level += num_tokens / tenant.weight
            user = tenant.known(request.tenant[1])
            if user is not None:
                user.level += num_tokens
