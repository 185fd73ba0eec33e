"""A profiler that nobody asks leaves no trace; an answer goes to whoever asked for it, or to nobody."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from octavo.engine.profiling import Profile, Profiled, Profiles, StepProfiler
from octavo.engine.wire import WireStats
from octavo.errors import BusyError, EngineDeadError


class Engine:
    """Marks the phases of a step, as engines do."""

    def __init__(self) -> None:
        self.mark: Callable[[str], None] | None = None

    def on_phase(self, mark: Callable[[str], None] | None) -> None:
        self.mark = mark

    def step(self) -> None:
        for phase in ("schedule", "program", "update"):
            if self.mark is not None:
                self.mark(phase)


def counts(num_steps: int) -> dict[str, int]:
    return {"num_steps": num_steps, "num_computed_tokens": 7 * num_steps, "num_generated_tokens": num_steps}


def run_step(profiler: StepProfiler, engine: Engine, number: int) -> None:
    profiler.begin_step(2)
    engine.step()
    profiler.mark("send")
    profiler.end_step(WireStats(num_running=2, counts=counts(number)))


def test_steps_are_noted_while_they_are_wanted() -> None:
    engine, sent = Engine(), []
    profiler = StepProfiler(engine, sent.append)
    run_step(profiler, engine, 1)
    profiler.obey(Profile(5, 2), counts(1))
    run_step(profiler, engine, 1)  # it computed nothing, only told of ends
    run_step(profiler, engine, 2)
    assert not sent
    run_step(profiler, engine, 3)
    [profiled] = sent
    assert (profiled.number, len(profiled.steps)) == (5, 2)
    for step in profiled.steps:
        assert [phase for phase, _ in step.marks] == ["schedule", "program", "update", "send"]
        assert sum(step.seconds.values()) == pytest.approx(step.end - step.begin)
        assert (step.num_tokens, step.num_generated, step.num_seqs, step.num_running) == (7, 1, 2, 2)
    assert engine.mark is None
    run_step(profiler, engine, 4)
    assert len(sent) == 1 and not profiler._steps and not profiler._marks


def test_who_asks_to_stop_gets_what_there_is() -> None:
    engine, sent = Engine(), []
    profiler = StepProfiler(engine, sent.append)
    profiler.obey(Profile(1, 100), counts(0))
    run_step(profiler, engine, 1)
    profiler.obey(Profile(1, 0), counts(1))
    profiler.obey(Profile(1, 0), counts(1))
    assert [len(profiled.steps) for profiled in sent] == [1, 0]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_an_answer_goes_to_who_asked() -> None:
    async def test() -> None:
        sent: list[Profile] = []
        profiles = Profiles(sent.append)
        first = asyncio.create_task(profiles.take(10, 60))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="another profile"):
            await profiles.take(10, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert sent == [Profile(1, 10), Profile(1, 0)]
        second = asyncio.create_task(profiles.take(3, 60))
        await asyncio.sleep(0)
        profiles.hear(Profiled(1, 0.0, []))  # of the first, too late
        await asyncio.sleep(0)
        assert not second.done()
        profiles.hear(Profiled(2, 5.0, []))
        assert (await second).began == 5.0
        profiles.hear(Profiled(2, 6.0, []))

    run(test())


def test_an_engine_that_goes_away_takes_its_profile_along() -> None:
    async def test() -> None:
        profiles = Profiles(lambda message: None)
        asking = asyncio.create_task(profiles.take(10, 60))
        await asyncio.sleep(0)
        profiles.fail("signal 9")
        with pytest.raises(EngineDeadError, match="while it was profiled: signal 9"):
            await asking

    run(test())
