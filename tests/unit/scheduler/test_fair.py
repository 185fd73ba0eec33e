"""Decision: tenants share by weight whatever they send, nobody starves, idleness saves nothing up."""

import random

import pytest
from doubles.scheduler_bench import Bench

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.scheduler.fair import MAX_IDLE, FairQueue, queue_of
from octavo.scheduler.request import Request


def request(name: str, tenant: str, user: str = "", num_prompt: int = 10) -> Request:
    return Request(name, list(range(num_prompt)), SamplingParams(seed=1), tenant=(tenant, user))


class Server:
    """Admits one request at a time and serves it whole."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.queue = FairQueue(weights or {})
        self.served: dict[tuple[str, str], int] = {}
        self.order: list[str] = []

    def serve(self, num_output: int = 10) -> Request | None:
        head = self.queue.peek()
        if head is not None:
            self.queue.admit(head)
            num_tokens = head.num_prompt_tokens + num_output
            self.queue.charge(head, num_tokens)
            self.served[head.tenant] = self.served.get(head.tenant, 0) + num_tokens
            self.order.append(head.request_id)
        return head

    def of(self, tenant: str) -> int:
        return sum(tokens for (name, _), tokens in self.served.items() if name == tenant)


@pytest.mark.parametrize("seed", range(5))
def test_shares_follow_weights_while_everybody_waits(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    server = Server(weights)
    for i in range(3000):
        name = "abc"[i % 3]
        server.queue.push(request(f"{name}{i}", name, num_prompt=rng.choice([1, 5, 50] if name == "a" else [20])))
    for _ in range(700):
        server.serve(rng.randint(1, 60))
    per_weight = [server.of(name) / weight for name, weight in weights.items()]
    assert max(per_weight) - min(per_weight) <= 2 * 110  # two requests of the greatest size


def test_users_share_inside_their_tenant_and_many_users_gain_it_nothing() -> None:
    server = Server()
    for i in range(400):
        server.queue.push(request(f"a{i}", "a", user=f"user{i}"))  # each request as somebody else
        server.queue.push(request(f"b{i}", "b", user="x" if i % 4 else "y"))
    for _ in range(200):
        server.serve()
    assert abs(server.of("a") - server.of("b")) <= 40
    assert abs(server.served["b", "x"] - server.served["b", "y"]) <= 40


def test_random_arrivals_starve_nobody() -> None:
    """A tenant that asks for little waits little, however much another has piled up."""
    rng = random.Random(3)
    server = Server({"small": 1.0, "big": 3.0})
    for i in range(2000):
        server.queue.push(request(f"big{i}", "big"))
    for i in range(60):
        server.queue.push(request(f"small{i}", "small"))
        began = len(server.order)
        while f"small{i}" not in server.order[began:]:
            server.serve(rng.randint(1, 20))
        assert len(server.order) - began <= 12


def test_idleness_saves_up_nothing() -> None:
    server = Server()
    for i in range(300):
        server.queue.push(request(f"a{i}", "a"))
    for _ in range(200):
        server.serve()
    for i in range(100):
        server.queue.push(request(f"late{i}", "late"))
    before = server.of("a")
    for _ in range(40):
        server.serve()
    assert abs((server.of("a") - before) - server.of("late")) <= 40


def test_requests_leave_from_anywhere_and_maps_end_empty() -> None:
    rng = random.Random(1)
    queue = FairQueue({})
    waiting: list[Request] = []
    for i in range(3 * MAX_IDLE):
        waiting.append(request(f"r{i}", rng.choice("ab"), user=str(i)))
        queue.push(waiting[-1])
        if rng.random() < 0.5:
            gone = waiting.pop(rng.randrange(len(waiting)))
            (queue.admit if rng.random() < 0.5 else queue.remove)(gone)
        assert len(queue) == len(waiting)
    assert {r.request_id for r in queue} == {r.request_id for r in waiting}
    for left in waiting:
        queue.remove(left)
    assert queue.peek() is None
    assert len(queue) == 0
    assert not queue._root.children
    assert all(len(tenant.idle) <= MAX_IDLE for tenant in queue._root.idle.values())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_scheduler_with_the_fair_policy_ends_every_request_with_its_own_tokens(mode: str) -> None:
    rng = random.Random(5)
    bench = Bench(num_blocks=14, num_host_blocks=20, scheduling_policy="fair", preemption_mode=mode)
    for i in range(40):
        stem = rng.randint(0, 3) * 100
        added = bench.add(f"r{i}", range(stem, stem + rng.randint(1, 20)), n=rng.choice([1, 1, 2]))
        assert added.tenant == ("", "")
        if rng.random() < 0.4:
            bench.step()
    bench.run()
    bench.check_all()


@pytest.mark.parametrize("text", ["a", "a=0", "a=-1", "a=x", "a=inf", "a=nan"])
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        queue_of(SchedulerConfig(scheduling_policy="fair", tenant_weights=text))
