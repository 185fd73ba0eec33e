"""Each line of a timeline says why: what a request waits for, why it was preempted, why no more was cached."""

import logging

import pytest
from doubles.scheduler_bench import SIZE, Bench

from octavo.scheduler import updates
from octavo.scheduler.request import Request


def lines(request: Request, name: str) -> list[str]:
    return [event.detail for event in request.events if event.name == name]


def names(request: Request) -> list[str]:
    return [event.name for event in request.events]


def test_a_request_from_its_queue_to_its_end() -> None:
    bench = Bench(max_num_batched_tokens=8)
    one = bench.add("one", range(20), max_tokens=3)
    bench.run()
    assert names(one) == ["queued", "admitted", "chunk", "chunk", "chunk", "first token", "finished"]
    assert lines(one, "queued") == ["0 run and 0 wait before it"]
    assert lines(one, "chunk")[0] == "8 tokens, 8 of 20 computed"
    assert lines(one, "finished") == ["length"]


def test_what_a_request_waits_for() -> None:
    bench = Bench(max_num_batched_tokens=16)
    requests = [bench.add(str(i), range(20 * i, 20 * i + 16), max_tokens=4) for i in range(6)]
    assert lines(requests[3], "queued") == ["0 run and 3 wait before it"]
    bench.run()
    assert "a share of max_num_batched_tokens = 16" in {line for r in requests for line in lines(r, "waiting")}
    seats = Bench(max_num_seqs=1)
    seats.add("first", range(8), max_tokens=8)
    seated = seats.add("seated", range(60, 68), max_tokens=4)
    seats.run()
    assert lines(seated, "waiting") == ["one of max_num_seqs = 1 places"]
    tiny = Bench(num_blocks=6)
    tiny.add("first", range(16), max_tokens=8)
    poor = tiny.add("poor", range(30, 46), max_tokens=4)
    tiny.run()
    assert lines(poor, "waiting") == ["free KV blocks"]


def test_a_request_waits_for_a_prefix_that_is_being_computed() -> None:
    bench = Bench()
    bench.add("first", range(40), max_tokens=2)
    second = bench.add("second", [*range(40), 99], max_tokens=2)
    bench.run()
    assert lines(second, "waiting") == ["its prefix, which this step computes"]
    assert lines(second, "admitted") == ["prefix hit 40 tokens, then none at 40"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_why_a_request_was_preempted_and_how_it_came_back(mode: str) -> None:
    bench = Bench(num_blocks=12, num_host_blocks=24, preemption_mode=mode, caching=False)
    requests = [bench.add(str(i), range(50 * i, 50 * i + 12), max_tokens=24) for i in range(3)]
    bench.run()
    preempted = [request for request in requests if request.num_preemptions]
    assert preempted
    for request in preempted:
        found = names(request)
        for index, name in enumerate(found):
            if name == "preempted" and mode == "swap":
                assert found[index + 1] == "swapped"
            assert name != "swapped" or mode == "swap"
        assert found.count("preempted") == found.count("resumed") == request.num_preemptions
        how = "swapped out" if mode == "swap" else "to be computed again"
        assert set(lines(request, "preempted")) == {f"no KV block is free; {how}"}
        back = {"swapped in"} if mode == "swap" else {"prefix hit 0 tokens, then disabled at 0"}
        assert set(lines(request, "resumed")) == back
        for line in lines(request, "swapped"):
            assert line.endswith(" blocks to the host") and int(line.split()[0]) > 0


def test_a_host_without_room_is_the_reason_to_compute_again() -> None:
    bench = Bench(num_blocks=12, num_host_blocks=1, preemption_mode="swap")
    requests = [bench.add(str(i), range(50 * i, 50 * i + 12), max_tokens=24) for i in range(3)]
    bench.run()
    found = {line for request in requests for line in lines(request, "preempted")}
    assert found == {"no KV block is free; to be computed again, for the host has no room for its blocks"}


def test_who_goes_first_is_the_reason_to_leave() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    later = bench.add("later", range(8), priority=5, max_tokens=9)
    bench.step()
    bench.add("urgent", range(20, 28), priority=0, max_tokens=2)
    bench.run()
    assert lines(later, "preempted") == ["urgent goes first and needs its place; to be computed again"]


def test_why_the_prefix_cache_had_no_more() -> None:
    def admitted(bench: Bench, name: str, prompt: range | list[int], **params: int) -> str:
        request = bench.add(name, prompt, max_tokens=1, **params)
        bench.run()
        [line] = lines(request, "admitted")
        return line

    bench = Bench(num_blocks=8)
    assert admitted(bench, "cold", range(18)) == "prefix hit 0 tokens, then differs at 0"
    assert admitted(bench, "short", range(18)) == "prefix hit 16 tokens, then short at 16"
    assert admitted(bench, "whole", range(17)) == "prefix hit 16 tokens, then none at 16"
    assert admitted(bench, "differs", [*range(10), 99, *range(11, 20)]) == "prefix hit 8 tokens, then differs at 10"
    assert admitted(bench, "scored", range(18), prompt_logprobs=0) == (
        "prefix hit 0 tokens: every row of its prompt is wanted"
    )
    admitted(bench, "large", range(100, 100 + 7 * SIZE))
    assert "then evicted at" in admitted(bench, "evicted", range(18))
    assert admitted(Bench(caching=False), "off", range(18)) == "prefix hit 0 tokens, then disabled at 0"


def test_the_log_says_that_requests_wait_as_long_as_they_do_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_with(seconds: float) -> list[str]:
        monkeypatch.setattr(updates, "WAIT_LOG_SECONDS", seconds)
        bench = Bench(num_blocks=6)
        bench.add("first", range(16), max_tokens=8)
        bench.add("poor", range(30, 46), max_tokens=4)
        caplog.clear()
        bench.run()
        return [message for message in caplog.messages if "requests wait" in message]

    caplog.set_level(logging.INFO)
    often, once = run_with(-1.0), run_with(3600.0)
    assert len(often) > 3 and len(once) == 1
    assert once == ["1 requests wait, the first of them, poor, for free KV blocks"]
