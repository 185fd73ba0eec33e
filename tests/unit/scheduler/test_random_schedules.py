"""Decision: a request's tokens depend on the request alone. Random schedules give what each request has alone.

Arrivals, lengths, shared prefixes, samples, priorities, cancellations, failing steps, tiny pools, both kinds of
preemption, guessed tokens; after each step every block is accounted for, and while requests are left a step can be
formed.
"""

from doubles.scheduler_bench import SIZE, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

STEMS = [list(range(stem * 100, stem * 100 + 40)) for stem in range(3)]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    stem = draw(st.sampled_from(STEMS))
    shared = draw(st.integers(0, 24))
    own = draw(st.lists(st.integers(500, 503), min_size=0 if shared else 1, max_size=8))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return {
        "prompt": stem[:shared] + own,
        "n": n,
        "max_tokens": draw(st.integers(0 if n == 1 else 1, 14)),
        "priority": draw(st.integers(0, 2)),
        "eos": draw(st.sets(st.integers(0, 49), max_size=3)),
    }


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), requests()), min_size=1, max_size=10),
    num_spare_blocks=st.integers(0, 12),
    num_host_blocks=st.sampled_from([0, 3, 40]),
    budget=st.sampled_from([1, 2, 5, 16, 17, 64]),
    num_seats=st.integers(3, 8),
    mode=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    caching=st.booleans(),
    aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=3),
    stops=st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=2),
    failures=st.sets(st.integers(1, 30), max_size=2),
    guesses=st.sampled_from([None, None, (1, 1, 1), (3, 1, 2), (7, 2, 4)]),
)
def test_each_request_gets_what_it_has_alone(
    arrivals: list[tuple[int, dict[str, object]]],
    num_spare_blocks: int,
    num_host_blocks: int,
    budget: int,
    num_seats: int,
    mode: str,
    policy: str,
    caching: bool,
    aborts: dict[int, int],
    stops: dict[int, int],
    failures: set[int],
    guesses: tuple[int, int, int] | None,
) -> None:
    biggest = max(_most_blocks(request) for _, request in arrivals)
    bench = Bench(
        biggest + num_spare_blocks,
        num_host_blocks=num_host_blocks,
        caching=caching,
        max_num_batched_tokens=max(budget, 3),
        max_num_seqs=num_seats,
        preemption_mode=mode,
        scheduling_policy=policy,
        memory=1 if guesses else 0,
        **speculation(guesses),
    )
    pending = list(enumerate(arrivals))
    cut: set[str] = set()
    for step in range(5000):
        while pending and pending[0][1][0] <= 0:
            index, (_, request) = pending.pop(0)
            bench.add(str(index), **request)  # type: ignore[arg-type]
        if pending:
            index, (wait, request) = pending[0]
            pending[0] = (index, (wait - 1, request))
        if (name := str(aborts.get(step))) in bench.scheduler.requests:
            bench.scheduler.abort([name])
            cut.add(name)
        if (name := str(stops.get(step))) in bench.scheduler.requests:
            bench.scheduler.finish_sample(name, 0)
            cut.add(name)
        bench.executor.fail_next = step in failures
        if not bench.scheduler.has_work and not pending:
            break
        bench.step()
    assert not bench.scheduler.requests
    assert bench.manager.pool.num_used == bench.manager.host_pool.num_used == 0
    if not failures and not cut:
        bench.check_counts()
    for name, request in bench.requests.items():
        if request.error is not None:
            assert "asked to fail" in request.error
        elif name in cut:
            bench.check_tokens_so_far(name)
        else:
            bench.check_tokens(name)
            assert len(bench.reasons[name]) == request.params.n


def speculation(guesses: tuple[int, int, int] | None) -> dict[str, object]:
    """Settings from (tokens guessed, shortest run, longest run)."""
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    return {"speculative_method": "ngram", **dict(zip(names, guesses, strict=True))} if guesses else {}


def _most_blocks(request: dict[str, object]) -> int:
    prompt, n, most = len(request["prompt"]), request["n"], request["max_tokens"]  # type: ignore[arg-type]
    assert isinstance(n, int)
    assert isinstance(most, int)
    shared = prompt // SIZE
    total = -(-(prompt + most) // SIZE)
    return total if n == 1 else shared + n * (total - shared) + 1
