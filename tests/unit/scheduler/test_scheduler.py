"""Scheduling, one behaviour a test; what random schedules find stands in test_random_schedules.py."""

import itertools
from typing import Any

import pytest
from doubles.scheduler_bench import Bench

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, SequenceFailure
from octavo.scheduler.request import Request, RequestState

SIZE = 4


def test_one_request_runs_to_its_length() -> None:
    bench = Bench()
    bench.add("a", range(10), max_tokens=7)
    bench.run()
    bench.check_all()
    assert bench.reasons == {"a": {0: "length"}}
    assert bench.executor.num_steps == 8, "7 tokens in 7 steps, and one to forget the sequence"


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 16, 17, 64])
def test_chunks_of_any_size_agree(budget: int) -> None:
    bench = Bench(max_num_batched_tokens=budget)
    for i in range(4):
        bench.add(str(i), range(i, i + 20 + 7 * i), max_tokens=6)
    bench.run()
    bench.check_all()


def test_a_chunk_yields_nothing_before_the_prompt_is_through() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", range(20))
    bench.step()
    bench.step()
    assert bench.tokens == {}
    bench.step()
    assert len(bench.tokens["a"][0]) == 1


def test_decodes_come_before_a_long_prompt() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add("decode", range(3), max_tokens=30)
    bench.step()
    bench.add("long", range(100, 200))
    for i in range(5):
        assert "decode" in bench.step()
        assert len(bench.tokens["decode"][0]) == i + 2
    bench.run()
    bench.check_all()


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    bench = Bench(max_num_batched_tokens=32)
    bench.add("long", range(200))
    bench.add("short", range(300, 306))
    bench.step()
    assert set(bench.tokens) == {"short"}
    bench.run()
    bench.check_all()


def test_a_prefix_is_shared_after_the_step_that_computed_it() -> None:
    bench = Bench()
    bench.add("a", range(18))
    bench.step()
    b = bench.add("b", range(18))
    bench.run()
    bench.check_all()
    assert b.num_cached_tokens == 16
    assert any("prefix hit 16 tokens, then short at 16" in event.detail for event in b.events)


def test_samples_share_the_prompt_and_copy_before_they_write() -> None:
    bench = Bench(caching=False)
    bench.add("a", range(10), n=4, max_tokens=9)
    bench.step()
    assert bench.manager.pool.num_used == 3
    bench.run()
    bench.check_all()
    assert set(bench.reasons["a"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_tiny_pool_preempts_and_loses_nothing(mode: str, caching: bool, n: int) -> None:
    bench = Bench(14 if n > 1 else 7, num_host_blocks=14, caching=caching, preemption_mode=mode)
    for i in range(5):
        bench.add(str(i), range(20 * i, 20 * i + 9), n=n, max_tokens=7)
    bench.run()
    bench.check_all()
    assert sum(r.num_preemptions for r in bench.requests.values()) > 0
    assert bench.manager.pool.num_used == 0


def test_swap_without_host_blocks_recomputes() -> None:
    bench = Bench(8, num_host_blocks=1, preemption_mode="swap", caching=False)
    for i in range(3):
        bench.add(str(i), range(i, i + 9), max_tokens=12)
    bench.run()
    bench.check_all()
    assert any("computed again" in e.detail for r in bench.requests.values() for e in r.events)


def test_a_preempted_request_keeps_its_turn() -> None:
    bench = Bench(8, caching=False)
    first, second = bench.add("0", range(8), max_tokens=20), bench.add("1", range(20, 28), max_tokens=20)
    while not second.num_preemptions:
        bench.step()
    assert first.num_preemptions == 0
    bench.add("late", range(40, 44), max_tokens=2)
    while second.state is not RequestState.RUNNING:
        names = bench.step()
        assert "late" not in names or "1" in names
    bench.run()
    bench.check_all()


def test_priority_goes_first_and_preempts() -> None:
    bench = Bench(8, scheduling_policy="priority", caching=False)
    low = bench.add("low", range(16), priority=5, max_tokens=10)
    bench.step()
    bench.add("high", range(20, 38), priority=-1, max_tokens=10)
    assert bench.step() == ["high"]
    assert low.num_preemptions == 1
    bench.run()
    bench.check_all()


def test_priority_takes_a_seat() -> None:
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    bench.add("low", range(4), priority=1)
    bench.step()
    bench.add("high", range(9, 13), priority=0)
    assert bench.step() == ["high"]
    bench.run()
    bench.check_all()


def test_no_more_sequences_than_allowed_run_at_once() -> None:
    bench = Bench(max_num_seqs=3)
    for i in range(8):
        bench.add(str(i), range(i, i + 5), n=1 + i % 3)
    bench.run()
    bench.check_all()
    assert bench.executor.max_rows <= 3


def test_end_of_sequence_and_stop_ids() -> None:
    probe = Bench()
    probe.add("p", range(8), max_tokens=12)
    probe.run()
    tokens = probe.tokens["p"][0]
    bench = Bench()
    bench.add("eos", range(8), eos=[tokens[4]], max_tokens=12)
    bench.add("ignored", range(8), eos=[tokens[4]], ignore_eos=True, max_tokens=12)
    stop = bench.add("stop", range(8), stop_token_ids=[tokens[4]], max_tokens=12)
    bench.run()
    bench.check_all()
    assert bench.reasons == {"eos": {0: "stop"}, "ignored": {0: "length"}, "stop": {0: "stop"}}
    assert stop.sequences[0].stop_reason == tokens[4]


def test_abort_frees_everything_at_once_wherever_the_request_stands() -> None:
    bench = Bench(8, num_host_blocks=8, preemption_mode="swap", caching=False)
    for i in range(4):
        bench.add(str(i), range(i, i + 11), max_tokens=16, n=1)
    while not any(r.state is RequestState.SWAPPED for r in bench.requests.values()):
        bench.step()
    bench.scheduler.abort([*bench.requests, "unknown"])
    bench.scheduler.check()
    bench.run()
    assert {reason[0] for reason in bench.reasons.values()} == {"abort"}
    assert bench.manager.pool.num_used == bench.manager.host_pool.num_used == 0


def test_the_leader_may_end_while_its_samples_are_preempted() -> None:
    probe = Bench()
    probe.add("p", range(9), n=3, max_tokens=14)
    probe.run()
    num_preemptions = 0
    for num_blocks, stop in itertools.product(range(9, 13), probe.tokens["p"][0][:6]):
        bench = Bench(num_blocks, caching=False)
        bench.add("old", range(30, 38), max_tokens=26)
        bench.add("p", range(9), n=3, max_tokens=6, stop_token_ids=[stop])
        bench.run()
        bench.check_all()
        num_preemptions += bench.requests["p"].num_preemptions
    assert num_preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (0, {}, "no tokens"),
        (257, {"max_tokens": 0}, "max_model_len is 256"),
        (256, {"max_tokens": 1}, "max_model_len is 256"),
        (30, {"max_tokens": 20}, "at most 32 tokens"),
        (20, {"n": 5, "temperature": 1.0, "max_tokens": 8}, "at most 20 tokens"),
        (4, {"n": 65}, "max_num_seqs"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_limits(prompt: int, params: dict[str, Any], message: str) -> None:
    bench = Bench(8)
    bench.add("small", range(20), max_tokens=3)
    with pytest.raises(RequestError, match=message):
        bench.add("big", range(prompt), **params)
    bench.run()
    bench.check_all()


def test_a_prompt_that_fills_the_pool_to_the_last_slot_runs() -> None:
    for n in (1, 3):
        bench = Bench(9, caching=True)
        longest = 36 if n == 1 else 16
        bench.add("a", range(9), n=n, max_tokens=longest - 9)
        bench.run()
        bench.check_all()


def test_without_max_tokens_the_output_goes_to_the_end_of_the_pool() -> None:
    bench = Bench(4)
    bench.add("a", range(5), max_tokens=None)
    bench.run()
    assert len(bench.tokens["a"][0]) == 11
    bench.check_all()


def test_no_output_wanted() -> None:
    bench = Bench()
    bench.add("a", range(9), max_tokens=0)
    bench.run()
    assert bench.reasons == {"a": {0: "length"}}
    assert bench.tokens["a"][0] == []


def test_a_failed_step_ends_only_the_request_at_fault() -> None:
    bench = Bench()
    for i in range(4):
        bench.add(str(i), range(i * 20, i * 20 + 9), max_tokens=8)
    bench.step()
    bench.executor.fail_on = 40
    bench.run()
    assert bench.reasons["2"] == {0: "error"}
    assert "asked to fail" in (bench.requests["2"].error or "")
    for name in "013":
        bench.check_tokens(name)
        assert bench.reasons[name] == {0: "length"}


def test_a_failure_within_the_step_ends_one_request_and_publishes_nothing_of_it() -> None:
    bench = Bench()
    bad, good = bench.add("bad", range(9)), bench.add("good", range(20, 29))
    output = bench.scheduler.schedule()
    assert output is not None
    result = bench.executor.execute_model(output)
    seq_id = bad.sequences[0].seq_id
    bench.take(
        bench.scheduler.update(
            ModelRunnerOutput(
                {k: v for k, v in result.token_ids.items() if k != seq_id}, failures=(SequenceFailure(seq_id, "NaN"),)
            )
        )
    )
    assert bad.error == "NaN"
    again = bench.add("again", range(9))
    bench.run()
    assert again.num_cached_tokens == 0
    assert good.error is None
    bench.check_tokens("good")


def step_that_fails(bench: Bench, *names: str) -> None:
    """A step in which requests gave logits that are no numbers."""
    output = bench.scheduler.schedule()
    assert output is not None
    result = bench.executor.execute_model(output)
    ids = [bench.requests[name].sequences[0].seq_id for name in names]
    tokens = {seq_id: ids_ for seq_id, ids_ in result.token_ids.items() if seq_id not in ids}
    failures = tuple(SequenceFailure(seq_id, "NaN") for seq_id in ids)
    bench.take(bench.scheduler.update(ModelRunnerOutput(tokens, failures=failures)))
    bench.scheduler.check()


def test_what_a_failed_request_published_before_is_not_found_again() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bad = bench.add("bad", range(12))
    bench.step()
    assert bench.manager.prefix is not None and len(bench.manager.prefix) == 2
    step_that_fails(bench, "bad")
    assert bad.error == "NaN"
    assert len(bench.manager.prefix) == 0
    again = bench.add("again", range(12))
    bench.run()
    assert again.num_cached_tokens == 0
    bench.check_tokens("again")


@pytest.mark.parametrize("n", [1, 3])
def test_who_went_on_from_blocks_that_cannot_be_trusted_is_computed_again_without_them(n: int) -> None:
    bench = Bench()
    bench.add("first", range(12))
    bench.run()
    innocent = bench.add("innocent", [*range(8), 50, 51], n=n)
    step_that_fails(bench, "innocent")
    assert innocent.error is None
    assert (innocent.num_preemptions, innocent.num_cached_tokens) == (1, 8)
    bench.run()
    assert not innocent.from_cache
    bench.check_all()
    assert set(bench.reasons["innocent"].values()) == {"length"}


def test_who_fails_again_and_again_ends() -> None:
    bench = Bench()
    bench.add("first", range(12))
    bench.run()
    bad = bench.add("bad", range(13))
    step_that_fails(bench, "bad")
    assert bad.error is None, "the blocks may have been at fault"
    step_that_fails(bench, "bad")
    assert bad.error == "NaN"


def test_two_requests_of_one_name_are_refused() -> None:
    bench = Bench()
    bench.add("a", range(4))
    with pytest.raises(RequestError, match="under way"):
        bench.add("a", range(4))
    bench.run()


def test_whole_prompts_only_where_chunks_are_off() -> None:
    bench = Bench(max_num_batched_tokens=24, enable_chunked_prefill=False)
    for i in range(4):
        bench.add(str(i), range(i, i + 20), max_tokens=4)
    bench.run()
    bench.check_all()
    for request in bench.requests.values():
        assert request.num_preemptions == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_known", [0, 1, 5])
def test_a_request_goes_on_from_tokens_that_another_engine_generated(n: int, num_known: int) -> None:
    before = Bench()
    before.add("a", range(9), n=n, max_tokens=8)
    before.run()
    known = {index: tokens[:num_known] for index, tokens in before.tokens["a"].items()}
    bench = Bench()
    request = Request("a", list(range(9)), SamplingParams(seed=1, n=n, max_tokens=8), known_outputs=known)
    bench.scheduler.add(request)
    bench.requests["a"] = request
    bench.run()
    for index in range(n):
        assert known[index] + bench.tokens["a"][index] == before.tokens["a"][index]


def test_samples_that_ended_before_stay_ended_and_late_ones_catch_up() -> None:
    before = Bench()
    before.add("a", range(9), n=3, max_tokens=8)
    before.run()
    tokens = before.tokens["a"]
    known = {0: tokens[0][:4], 1: tokens[1][:2]}  # the third had nothing yet
    bench = Bench()
    request = Request(
        "a", list(range(9)), SamplingParams(seed=1, n=3, max_tokens=8), known_outputs=known, known_finished={1}
    )
    bench.scheduler.add(request)
    bench.requests["a"] = request
    bench.run()
    assert bench.tokens["a"] == {0: tokens[0][4:], 2: tokens[2]}


def test_a_suspect_runs_alone_and_after_those_before_it() -> None:
    bench = Bench()
    bench.add("first", range(5), max_tokens=3)
    suspect = Request("suspect", list(range(20, 29)), SamplingParams(seed=1, max_tokens=4), runs_alone=True)
    bench.scheduler.add(suspect)
    bench.requests["suspect"] = suspect
    bench.add("later", range(40, 45), max_tokens=4)
    order = []
    while bench.scheduler.requests:
        order.append(bench.step())
    assert order.index(["suspect"]) == 3
    assert all(step == ["suspect"] or "suspect" not in step for step in order[:4])
    bench.check_all()


@pytest.mark.parametrize("budget", [16, 64, 500])
def test_a_prefix_that_is_being_computed_is_not_computed_beside_it(budget: int) -> None:
    bench = Bench(max_num_batched_tokens=budget)
    for i in range(8):
        bench.add(str(i), [*range(42), 100 + i], max_tokens=3)
    bench.run()
    bench.check_all()
    own = [43 - 40] * 7  # what lies past the last full block of the shared prefix
    assert bench.scheduler.stats.num_computed_tokens == 43 + sum(own) + 8 * 2
