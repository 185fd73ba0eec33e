"""Many callers over an engine process: the tokens are those of an offline run, whatever becomes of the process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from doubles.tiny_llm import greedy

from octavo import LLM, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ConfigError, EngineDeadError, RequestError, RequestFailedError

Prompt = list[int]
PROMPTS: list[Prompt] = [[4 + (7 * i + 3 * j) % 250 for j in range(5 + 11 * i)] for i in range(6)]


def settings(folder: Path, **more: Any) -> EngineConfig:
    return EngineConfig.of(
        model=str(folder), dtype="float32", num_threads=1, block_size=8, num_blocks_override=128, **more
    )


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def collect(engine: AsyncEngine, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """The last output, once the stream is seen to hold every piece of it exactly once."""
    pieces: dict[int, str] = {}
    last = None
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        for sample in output.outputs:
            pieces[sample.index] = pieces.get(sample.index, "") + sample.delta
        last = output
    assert last is not None
    assert last.finished
    assert all(pieces[sample.index] == sample.text for sample in last.outputs)
    return last


def tokens(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


WISHES = [
    *((prompt, greedy(60)) for prompt in PROMPTS[:3]),
    (PROMPTS[3], SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logprobs=2)),
    (PROMPTS[4], SamplingParams(temperature=1.0, seed=6, n=3, max_tokens=50, ignore_eos=True)),
    (PROMPTS[5], SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.3, max_tokens=60, ignore_eos=True)),
]


def offline(folder: Path) -> list[list[list[int]]]:
    with LLM(config=settings(folder)) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in WISHES]
        return [tokens(output) for output in llm.generate(prompts, [params for _, params in WISHES])]


async def when(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_callers_get_what_an_offline_run_gives(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        outputs = await asyncio.gather(*(collect(engine, prompt, params) for prompt, params in WISHES))
        assert [tokens(output) for output in outputs] == expected
        assert outputs[3].outputs[0].logprobs is not None
        assert len(outputs[3].outputs[0].logprobs) == 60
        assert engine.num_live == 0
        assert engine.stats.num_used_blocks == 0
        await engine.stop()
        assert engine.state == "stopped"

    expected = offline(tiny_folder)
    run(test())


async def killed(engine: AsyncEngine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


async def stalled(engine: AsyncEngine) -> None:
    os.kill(engine.pid, signal.SIGSTOP)


@pytest.mark.parametrize("fate", [killed, stalled])
@pytest.mark.parametrize("num_seen", [0, 1, 20])
def test_streams_go_on_after_the_process_died(
    tiny_folder: Path, fate: Callable[[AsyncEngine], Awaitable[None]], num_seen: int
) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder), stall_timeout=1.5)
        tasks = [asyncio.create_task(collect(engine, prompt, params)) for prompt, params in WISHES]
        await when(lambda: engine.num_live == len(WISHES))
        await when(lambda: engine.stats.counts.get("num_generated_tokens", 0) >= num_seen)
        await fate(engine)
        await when(lambda: engine.state == "restarting")
        outputs = await asyncio.gather(*tasks)
        assert [tokens(output) for output in outputs] == expected
        assert all(sample.finish_reason == "length" for output in outputs for sample in output.outputs)
        assert engine.num_restarts == 1
        assert engine.state == "ready"
        await engine.stop()

    expected = offline(tiny_folder)
    run(test())


def test_a_request_that_kills_twice_is_failed_and_the_others_go_on(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        tasks = [asyncio.create_task(collect(engine, prompt, params)) for prompt, params in WISHES]
        bad = asyncio.create_task(collect(engine, PROMPTS[1], greedy(200)))
        await when(lambda: engine.num_live == len(WISHES) + 1)
        number = next(live.number for live in engine._requests if live.message.params.max_tokens == 200)
        while not bad.done():
            process = engine._keeper.process
            if engine.state == "ready" and process is not None and number in process.in_step:
                os.kill(engine.pid, signal.SIGKILL)
                await when(lambda: engine.state == "restarting" or bad.done())
            await asyncio.sleep(0)
        with pytest.raises(RequestFailedError, match="died 2 times while it ran this request"):
            await bad
        outputs = await asyncio.gather(*tasks)
        assert [tokens(output) for output in outputs] == expected
        await engine.stop()

    expected = offline(tiny_folder)
    run(test())


def test_deaths_that_no_request_explains_end_the_engine(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        for _ in range(3):
            await engine.wait_ready()
            os.kill(engine.pid, signal.SIGKILL)
            await when(lambda: engine.state != "ready")
        assert "no request explains it" in await engine.wait_dead()
        with pytest.raises(EngineDeadError, match="no request explains it"):
            await collect(engine, PROMPTS[0], greedy(4))
        await engine.stop()

    run(test())


def test_a_stream_that_is_left_ends_its_request(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        stream = engine.generate({"prompt_token_ids": PROMPTS[0]}, greedy(400))
        async for output in stream:
            if output.num_generated_tokens > 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await collect(engine, PROMPTS[1], greedy(3))
        assert engine.num_live == 0
        assert engine.stats.num_running == 0
        assert engine.stats.num_used_blocks == 0
        assert engine.stats.counts["num_generated_tokens"] < 200
        await engine.stop()

    run(test())


def test_what_cannot_be_served_is_refused_alone(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        with pytest.raises(RequestError, match="max_model_len"):
            await collect(engine, [5] * 600, greedy(4))
        with pytest.raises(RequestError, match="token ids are integers"):
            await collect(engine, [5, -1], greedy(4))
        output = await collect(engine, PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, stop=["e", "t", "a"]))
        assert output.outputs[0].finish_reason in ("stop", "length")
        await engine.stop()

    run(test())


def test_an_engine_that_cannot_start_says_why(tiny_folder: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="swap_space"):
            await AsyncEngine.start(settings(tiny_folder, preemption_mode="swap"))

    run(test())


def test_the_process_dies_with_its_parent(tiny_folder: Path) -> None:
    program = f"""
import asyncio
from octavo import EngineConfig
from octavo.engine.async_engine import AsyncEngine

async def main():
    engine = await AsyncEngine.start(EngineConfig.of(model={str(tiny_folder)!r}, num_threads=1, num_blocks_override=64))
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the engine process outlived its parent")


def test_what_no_message_can_hold_is_refused_and_leaves_nothing(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        for wish, priority, param in (
            (greedy(2), 2**63, "priority"),
            (SamplingParams(stop="\ud800"), 0, None),  # half a character, which is no UTF-8
        ):
            with pytest.raises(RequestError) as error:
                async for _ in engine.generate({"prompt_token_ids": PROMPTS[0]}, wish, priority=priority):
                    pass
            assert error.value.param == param
        assert (engine.num_live, engine.history.num_waiting) == (0, 0)
        assert len((await collect(engine, PROMPTS[0], greedy(2))).outputs[0].token_ids) == 2
        await engine.stop()

    run(test())
