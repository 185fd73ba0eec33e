"""Steps that take long, that never end, that kill: what the front makes of an engine process that goes wrong."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.cursed_child import CURSE_VARIABLE
from doubles.tiny_llm import greedy

from octavo import EngineConfig, RequestOutput
from octavo.engine import supervisor
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.keeper import CALM_SECONDS, Deaths
from octavo.engine.live import News
from octavo.errors import RequestFailedError

TESTS = Path(__file__).resolve().parent.parent
PROMPTS = [[4 + (7 * i + 3 * j) % 200 for j in range(12)] for i in range(5)]
FATAL = 400  # a token id that is in none of them

Curse = Callable[[str], None]


@pytest.fixture
def curse(monkeypatch: pytest.MonkeyPatch) -> Curse:
    """Make engine processes that are started from now on go wrong; see `doubles.cursed_child`."""
    paths = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(supervisor, "CHILD_MODULE", "doubles.cursed_child")
    return lambda curses: monkeypatch.setenv(CURSE_VARIABLE, curses)


async def start(folder: Path, stall_timeout: float = 60.0) -> AsyncEngine:
    settings = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_blocks_override": 128}
    return await AsyncEngine.start(EngineConfig.of(model=str(folder), **settings), stall_timeout=stall_timeout)


async def collect(engine: AsyncEngine, prompt: list[int], num_tokens: int) -> RequestOutput:
    last = None
    async for last in engine.generate({"prompt_token_ids": prompt}, greedy(num_tokens)):  # noqa: B007
        pass
    assert last is not None
    return last


@pytest.mark.parametrize("long", ["layers=6", "busy=6"])
def test_a_step_that_takes_long_is_no_stall(tiny_folder: Path, curse: Curse, long: str) -> None:
    """Three times the timeout: with a sign of life from each layer, or computing without one (one native call)."""

    async def test() -> None:
        engine = await start(tiny_folder, stall_timeout=2)
        output = await collect(engine, PROMPTS[0], 1)
        assert len(output.outputs[0].token_ids) == 1
        assert (engine.num_restarts, engine.state) == (0, "ready")
        await engine.stop()

    curse(long)
    asyncio.run(asyncio.wait_for(test(), 200))


def test_a_step_that_never_ends_fails_its_request(tiny_folder: Path, curse: Curse) -> None:
    async def test() -> None:
        engine = await start(tiny_folder, stall_timeout=1.5)
        with pytest.raises(RequestFailedError, match=r"died 2 times .* made no progress for \d+ s \(stall_timeout\)"):
            await collect(engine, PROMPTS[0], 4)
        # Nor does a step without it end: the request was not at fault.
        assert re.search(r"died 3 times and no request explains it; .*\(stall_timeout\)", await engine.wait_dead())
        assert (engine.num_restarts, engine.num_live) == (2, 0)
        await engine.stop()

    curse("slow=1000")
    asyncio.run(asyncio.wait_for(test(), 200))


def test_a_token_that_kills_fails_its_request_alone(tiny_folder: Path, curse: Curse) -> None:
    async def test(fatal: bool) -> list[list[int]]:
        engine = await start(tiny_folder)
        others = [asyncio.create_task(collect(engine, prompt, 60)) for prompt in PROMPTS]
        while engine.stats.counts.get("num_generated_tokens", 0) < 20:
            await asyncio.sleep(0.001)
        for _ in range(2 * fatal):  # the second kills an engine that has worked since
            with pytest.raises(RequestFailedError, match="the engine died 2 times while it ran this request"):
                await collect(engine, [*PROMPTS[0], FATAL], 5)
            await collect(engine, PROMPTS[0], 1)
        outputs = await asyncio.gather(*others)
        assert engine.num_restarts == 4 * fatal
        assert (engine.state, engine.num_live) == ("ready", 0)
        await engine.stop()
        return [list(output.outputs[0].token_ids) for output in outputs]

    curse(f"kill={FATAL} slow=0.02")
    expected = asyncio.run(asyncio.wait_for(test(False), 200))
    assert asyncio.run(asyncio.wait_for(test(True), 200)) == expected


def test_fatal_requests_in_a_row_fail_alone(tiny_folder: Path, curse: Curse) -> None:
    """Nothing else is served between them: the engine itself shows that it works without each."""

    async def test() -> None:
        engine = await start(tiny_folder)
        for _ in range(3):
            with pytest.raises(RequestFailedError, match="the engine died 2 times while it ran this request"):
                await collect(engine, [*PROMPTS[0], FATAL], 5)
        await engine.wait_ready()
        assert (engine.num_restarts, engine.num_live) == (6, 0)
        assert engine.history.totals.get("num_generated_tokens", 0) == 0  # what the engine shows is nobody's
        assert len((await collect(engine, PROMPTS[0], 3)).outputs[0].token_ids) == 3
        assert engine.history.totals["num_generated_tokens"] == 3
        await engine.stop()

    curse(f"kill={FATAL}")
    asyncio.run(asyncio.wait_for(test(), 200))


def test_an_engine_that_does_not_work_without_a_failed_request_ends(tiny_folder: Path, curse: Curse) -> None:
    async def test() -> None:
        engine = await start(tiny_folder)
        with pytest.raises(RequestFailedError, match="died 2 times"):
            await collect(engine, [*PROMPTS[0], 0], 5)
        assert "no request explains it" in await engine.wait_dead()
        await engine.stop()

    curse("kill=0")  # of which the proof is made too
    asyncio.run(asyncio.wait_for(test(), 200))


def test_the_next_process_has_the_first_one_s_weights() -> None:
    """The demo's are packed, as long as nobody names a dtype: not so once a process has settled on one."""

    async def test() -> None:
        settings = {"num_threads": 1, "max_model_len": 256, "num_blocks_override": 16}
        engine = await AsyncEngine.start(EngineConfig.of(model="demo", **settings))
        calm = await collect(engine, PROMPTS[0], 12)
        facts, process = engine.facts, engine._keeper.process
        assert process is not None
        under_way = asyncio.create_task(collect(engine, PROMPTS[0], 12))
        os.kill(process.pid, signal.SIGKILL)
        again = await under_way
        assert again.outputs[0].token_ids == calm.outputs[0].token_ids
        assert (await collect(engine, PROMPTS[0], 12)).outputs[0].token_ids == calm.outputs[0].token_ids
        assert (engine.num_restarts, engine.facts) == (1, facts)
        await engine.stop()

    asyncio.run(asyncio.wait_for(test(), 200))


def test_which_deaths_are_the_last() -> None:
    nobody: frozenset[int] = frozenset()
    for fatal, counts in (
        ([nobody, nobody, nobody], [None, None, 3]),
        ([{1, 2}, {3}, {1}], [None, None, 3]),
        ([{1, 2}, {2}, {2, 3}, {3}, {3}], [None, None, None, 4, None]),  # 2 explains three, then nobody does
        ([{1}, {1}, {1}, {1}], [None] * 4),
    ):
        deaths = Deaths()
        found = [deaths.add(frozenset(who), was_ready=True, now=float(i)) for i, who in enumerate(fatal)]
        assert found == counts
    deaths = Deaths()
    times = [0.0, 1.0, CALM_SECONDS + 0.5, CALM_SECONDS + 2.0, CALM_SECONDS + 3.0]
    assert [deaths.add(nobody, was_ready=True, now=now) for now in times] == [None, None, None, None, 3]


def test_deaths_that_a_failed_request_explains_count_no_more() -> None:
    deaths = Deaths()
    assert deaths.add(frozenset({1, 2}), was_ready=True, now=0.0) is None
    assert deaths.add(frozenset({1}), was_ready=True, now=1.0) is None
    deaths.forgive([1])
    assert deaths.add(frozenset({3}), was_ready=True, now=2.0) is None
    assert deaths.add(frozenset({4}), was_ready=True, now=3.0) is None
    assert deaths.add(frozenset({5}), was_ready=True, now=4.0) == 3


def test_a_process_that_dies_before_it_is_ready_is_tried_once_more() -> None:
    deaths = Deaths()
    assert deaths.add(frozenset(), was_ready=False, now=0.0) is None
    assert deaths.add(frozenset(), was_ready=False, now=1.0) == 2


def test_news_is_there_once_whoever_came_first() -> None:
    async def test() -> None:
        news = News()
        news.tell()
        news.tell()
        await news.wait()
        waiting = asyncio.create_task(news.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        news.tell()
        await waiting
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await news.wait()
        news.tell()
        await news.wait()

    asyncio.run(test())
