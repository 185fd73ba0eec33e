"""Thousands of requests leave nothing behind; queues under pressure lose and starve nobody."""

import gc
import random
import sys
from collections.abc import Iterator

import pytest
from doubles.fake_executor import FakeExecutor
from doubles.fake_program import fake_greedy

from octavo.config import EngineConfig
from octavo.engine.loop import EngineCore
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.request import Request

VOCAB = 61
BLOCK = 4


def instant(step: SchedulerOutput) -> ModelRunnerOutput:
    """A model of no thought, for what concerns the scheduler alone."""
    return ModelRunnerOutput({seq_id: [7] for scheduled in step.scheduled for seq_id in scheduled.sample_for})


class Engine:
    """The engine over the fake model, and what each request has gained."""

    def __init__(self, *, num_blocks: int, num_host_blocks: int = 0, thinks: bool = True, **settings: object) -> None:
        given = {
            "max_model_len": 64,
            "block_size": BLOCK,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 256,
            **settings,
        }
        self.executor = FakeExecutor(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=BLOCK,
            vocab_size=VOCAB,
            max_model_len=64,
            max_num_seqs=64,
            max_num_batched_tokens=256,
        )
        if not thinks:
            self.executor.execute_model = instant  # type: ignore[method-assign]
        self.core = EngineCore(EngineConfig.of(**given), self.executor)  # type: ignore[arg-type]
        self.tokens: dict[str, list[list[int]]] = {}
        self.ended: list[str] = []

    def add(self, name: str, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        self.tokens[name] = [[] for _ in range(params.n)]
        self.core.add_request(Request(name, prompt, params, priority=priority))

    def step(self) -> None:
        self.executor.program.step_tokens.clear()
        for update in self.core.step():
            assert update.error is None, update.error
            for sample in update.samples:
                self.tokens[update.request_id][sample.index].extend(sample.token_ids)
            if update.is_finished:
                self.ended.append(update.request_id)

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def check_empty(self) -> None:
        scheduler, manager, runner = self.core.scheduler, self.core.manager, self.executor.runner
        scheduler.check()
        assert not self.core.has_work
        for kept in (
            scheduler.requests,
            scheduler.running,
            scheduler.roster.sent,
            scheduler.roster.removed,
            scheduler.roster.suspects,
            scheduler.waiting._entries,
            scheduler._updates._updates,
            manager._tables,
            manager._host_to_free,
            runner._sequences,
            runner._store._rows,
        ):
            assert not kept
        assert len(scheduler.waiting._heap) <= 64
        assert manager.pool.num_used == manager.host_pool.num_used == 0
        if manager.prefix is not None:
            assert manager.pool.num_cached <= manager.pool.num_blocks


def num_objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def requests(num: int, n: int, seed: int) -> Iterator[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    for i in range(num):
        prompt = [1 + rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 12))]
        yield prompt, SamplingParams(n=n, seed=i, max_tokens=rng.randrange(1, 4))


@pytest.mark.parametrize(("num", "n"), [(5_000, 2), (20_000, 1)])
def test_thousands_of_requests_leave_nothing_behind(num: int, n: int) -> None:
    engine = Engine(num_blocks=200, thinks=n > 1)
    sizes = []
    for part in range(4):
        for i, (prompt, params) in enumerate(requests(num // 4, n, part)):
            engine.add(str(i), prompt, params)
        engine.run()
        assert len(engine.ended) == num // 4
        assert all(1 <= len(tokens) <= 3 for samples in engine.tokens.values() for tokens in samples)
        engine.tokens.clear()
        engine.ended.clear()
        engine.check_empty()
        sizes.append(num_objects())
    assert sizes[-1] - sizes[0] < 2_000, sizes  # objects, after 3/4 of all requests


def test_requests_that_queue_and_leave_leave_nothing_behind() -> None:
    engine = Engine(num_blocks=16, max_num_seqs=1)
    engine.add("head", [1, 2], SamplingParams(temperature=0, max_tokens=60))
    engine.step()
    before = num_objects()
    for i in range(5_000):
        engine.add(f"left {i}", [3] * 10, SamplingParams(temperature=0))
        engine.core.abort([f"left {i}"])
        if i % 100 == 0:
            engine.tokens.clear()
            engine.tokens["head"] = [[]]
            engine.core.scheduler.take_updates()
    engine.core.scheduler.take_updates()
    engine.tokens = {"head": [[]]}
    assert num_objects() - before < 5_000
    assert len(engine.core.scheduler.waiting._heap) < 200
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(2))
def test_random_priorities_on_a_tiny_pool_starve_nobody(mode: str, seed: int) -> None:
    engine = Engine(
        num_blocks=20,
        num_host_blocks=12 if mode == "swap" else 0,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        scheduling_policy="priority",
        preemption_mode=mode,
        swap_space=1.0 if mode == "swap" else 0.0,
    )
    rng = random.Random(seed)
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    step = 0
    while len(expected) < 120 or engine.core.has_work:
        if len(expected) < 120 and rng.random() < 0.5:
            name = str(len(expected))
            prompt = [1 + rng.randrange(3) for _ in range(rng.randrange(1, 30))]
            num = rng.randrange(1, 20)
            engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=num), rng.randrange(4))
            expected[name] = fake_greedy(prompt, num, VOCAB)
        if rng.random() < 0.02 and engine.core.scheduler.requests:
            name = rng.choice(list(engine.core.scheduler.requests))
            engine.core.abort([name])
            aborted.add(name)
        has_requests = bool(engine.core.scheduler.requests)
        engine.step()
        engine.core.scheduler.check()
        assert engine.executor.program.step_tokens or not has_requests, "requests are there and nothing is computed"
        step += 1
        assert step < 20_000
    for name, tokens in expected.items():
        found = engine.tokens[name][0]
        assert found == (tokens[: len(found)] if name in aborted else tokens)
    assert sorted(engine.ended, key=int) == sorted(expected, key=int)
    assert engine.core.stats.counts.num_preemptions > 10
    engine.check_empty()


def test_a_higher_priority_that_waits_preempts() -> None:
    engine = Engine(num_blocks=16, max_num_seqs=1, scheduling_policy="priority")
    engine.add("low", [1, 2, 3], SamplingParams(temperature=0, max_tokens=40), priority=5)
    for _ in range(5):
        engine.step()
    engine.add("high", [4, 5, 6], SamplingParams(temperature=0, max_tokens=5), priority=1)
    engine.run()
    assert engine.ended == ["high", "low"]
    assert engine.tokens["low"] == [fake_greedy([1, 2, 3], 40, VOCAB)]
    assert engine.core.stats.counts.num_preemptions == 1


def test_a_request_that_leaves_in_any_state_is_gone_within_two_steps() -> None:
    for mode in ("recompute", "swap"):
        for after in range(12):
            engine = Engine(
                num_blocks=12,
                num_host_blocks=12 if mode == "swap" else 0,
                max_num_batched_tokens=8,
                preemption_mode=mode,
                swap_space=1.0 if mode == "swap" else 0.0,
                enable_prefix_caching=False,
            )
            for i in range(3):  # waiting, in chunks, running, preempted, swapped
                engine.add(str(i), [1 + i] * 14, SamplingParams(seed=1, n=2, max_tokens=12))
            for _ in range(after):
                engine.step()
            engine.core.abort(["0", "1", "2"])
            engine.step()
            engine.step()
            assert (engine.core.stats.num_running, engine.core.stats.num_waiting) == (0, 0)
            engine.check_empty()
