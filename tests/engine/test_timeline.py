"""What happened to a request can be told afterwards, whatever became of its engine; counts obey their laws."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from doubles.tiny_llm import greedy

from octavo import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import History, Origin, RequestRecord
from octavo.engine.stages import stages_of
from octavo.engine.wire import WireStats
from octavo.errors import ConfigError, DeadlineError
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import Event, RequestUpdate, SampleUpdate

PROMPTS = [[4 + (7 * i + 3 * j) % 250 for j in range(20 + 11 * i)] for i in range(4)]


def settings(folder: Path, **more: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"num_blocks_override": 128, "block_size": 8}
    return EngineConfig.of(model=str(folder), dtype="float32", num_threads=1, **{**defaults, **more})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def consume(engine: AsyncEngine, name: str, prompt: list[int], params: SamplingParams, **origin: Any) -> int:
    """Stream one request to its end; how many outputs came."""
    num_outputs = 0
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id=name, origin=Origin(**origin)):
        num_outputs += 1
        assert output.finished or any(sample.token_ids for sample in output.outputs), "an output that says nothing"
    return num_outputs


def names(engine: AsyncEngine, name: str) -> list[str]:
    timeline = engine.timeline(name)
    assert timeline is not None
    seconds = [event["seconds"] for event in timeline["events"]]
    assert seconds == sorted(seconds)
    return [event["event"] for event in timeline["events"]]


class Counting:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.ends: dict[str, str | None] = {}
        self.num_tokens = 0

    def on_step(self, stats: WireStats, gained: Mapping[str, int]) -> None:
        assert all(count >= 0 for count in gained.values())

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float | None) -> None:
        self.num_tokens += num_tokens
        if seconds is None:
            self.first.append(record.request_id)

    def on_end(self, record: RequestRecord) -> None:
        assert record.request_id not in self.ends
        self.ends[record.request_id] = record.finish_reason
        raise RuntimeError("whoever counts along may fail")


def test_a_timeline_tells_a_request_from_its_arrival_to_its_end(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder, max_num_batched_tokens=16))
        observer = Counting()
        engine.observe(observer)
        await consume(engine, "one", PROMPTS[3], greedy(5))
        assert names(engine, "one")[:4] == ["received", "tokenised", "queued", "admitted"]
        assert names(engine, "one").count("chunk") == 4  # 53 tokens, 16 a step
        assert names(engine, "one")[-2:] == ["first token", "finished"]
        await consume(engine, "two", PROMPTS[3], greedy(5))
        timeline = engine.timeline("two")
        assert timeline is not None
        [admitted] = [event["detail"] for event in timeline["events"] if event["event"] == "admitted"]
        assert admitted == "prefix hit 48 tokens, then short at 48"
        assert timeline["num_cached_tokens"] == 48
        assert (timeline["num_prompt_tokens"], timeline["num_prompt_done"]) == (53, 53)
        assert (timeline["state"], timeline["finish_reason"]) == ("finished", "length")
        assert [request["id"] for request in engine.requests()] == ["two", "one"]
        assert engine.timeline("three") is None
        assert observer.first == ["one", "two"]
        assert observer.num_tokens == 10
        assert observer.ends == {"one": "length", "two": "length"}
        await engine.stop()

    run(test())


def test_who_leaves_has_aborted(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        stream = engine.generate({"prompt_token_ids": PROMPTS[0]}, greedy(200), request_id="left")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        timeline = engine.timeline("left")
        assert timeline is not None
        assert timeline["finish_reason"] == "abort"
        await engine.stop()

    run(test())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_in_are_tokens_computed_and_cached(tiny_folder: Path, mode: str) -> None:
    """On a pool so small that requests are preempted; what is computed again is neither a hit nor a prompt token."""

    async def test() -> None:
        config = settings(tiny_folder, num_blocks_override=24, preemption_mode=mode, swap_space=0.01)
        engine = await AsyncEngine.start(config)
        prompts = [*PROMPTS, *PROMPTS, *PROMPTS]
        await asyncio.gather(*(consume(engine, f"r{i}", p, greedy(40)) for i, p in enumerate(prompts)))
        totals = engine.history.totals
        num_in = sum(map(len, prompts))
        assert totals["num_prompt_tokens"] == num_in
        assert totals["num_computed_prompt_tokens"] + totals["num_cached_prompt_tokens"] == num_in
        assert totals["num_generated_tokens"] == 40 * len(prompts)
        assert totals["num_preemptions"] > 0
        records = engine.history.records()
        assert sum(record.num_preemptions for record in records) == totals["num_preemptions"]
        preempted = next(record for record in records if record.num_preemptions)
        expected = {"preempted", "resumed"} | ({"swapped"} if mode == "swap" else set())
        assert expected <= set(names(engine, preempted.request_id))
        assert (totals["num_swaps"] > 0) == (mode == "swap")
        history = engine.history
        assert history.num_received == history.num_finished == len(prompts)
        assert history.num_in == {"waiting": 0, "running": 0, "swapped": 0}
        assert history.num_unqueued == history.num_waiting == 0
        details = [event.detail for record in records for event in record.events if event.name == "preempted"]
        assert all("; to be computed again" in detail or "; swapped out" in detail for detail in details)
        waits = [event.detail for record in records for event in record.events if event.name == "waiting"]
        assert "free KV blocks" in waits
        await engine.stop()

    run(test())


def test_a_timeline_goes_on_after_the_engine_died(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder))
        task = asyncio.create_task(consume(engine, "one", PROMPTS[2], greedy(150)))
        while (record := engine.history.get("one")) is None or record.num_generated_tokens < 3:
            await asyncio.sleep(0.002)
        os.kill(engine.pid, signal.SIGKILL)
        await task
        found = names(engine, "one")
        assert found.count("first token") == 1
        died = found.index("engine died")
        assert found[died + 1] == "sent again"
        assert "admitted" in found[died + 2 :]
        totals = engine.history.totals
        assert totals["num_computed_prompt_tokens"] + totals["num_cached_prompt_tokens"] == len(PROMPTS[2])
        assert totals["num_generated_tokens"] >= 150
        await engine.stop()

    run(test())


def test_a_deadline_that_passes_in_the_queue_costs_nothing(tiny_folder: Path) -> None:
    async def test() -> None:
        engine = await AsyncEngine.start(settings(tiny_folder, max_num_seqs=1))
        first = asyncio.create_task(consume(engine, "first", PROMPTS[0], greedy(400)))
        while (record := engine.history.get("first")) is None or record.admitted is None:
            await asyncio.sleep(0.002)
        with pytest.raises(DeadlineError, match="was not admitted within the time"):
            await consume(engine, "late", PROMPTS[1], greedy(5), max_wait=0.02)
        assert await consume(engine, "patient", PROMPTS[1], greedy(5), max_wait=60) > 0
        await first
        late = engine.timeline("late")
        assert late is not None
        assert (late["num_prompt_done"], late["num_generated_tokens"], late["finish_reason"]) == (0, 0, "error")
        assert "admitted" not in names(engine, "late")
        await engine.stop()

    run(test())


def test_stages_follow_from_events_and_leave_no_gap() -> None:
    def stages(*events: str, finished: float | None = None, has_form: bool = False) -> list[tuple[str, float, float]]:
        record = RequestRecord("one", 0.0, finished=finished, has_form=has_form)
        for when, name in enumerate(("received", *events)):
            record.events.append(Event(float(when), name, f"why {name}"))
        found = stages_of(record)
        assert [stage.begin for stage in found[1:]] == [stage.end for stage in found[:-1]]
        return [(stage.name, stage.begin, stage.end) for stage in found]

    plain = "tokenised queued waiting admitted chunk chunk"
    assert stages(*plain.split(), "first token", "finished", finished=9.0) == [
        ("tokenise", 0.0, 1.0),
        ("queue", 1.0, 4.0),
        ("prefill", 4.0, 7.0),
        ("decode", 7.0, 8.0),
    ]
    swapped = ["first token", "preempted", "swapped", "waiting", "resumed", "preempted", "resumed"]
    assert [name for name, _, _ in stages("tokenised", "queued", "admitted", *swapped, finished=99.0)] == [
        *("tokenise", "queue", "prefill", "decode"),
        *("preempted", "decode", "preempted", "decode"),
    ]
    died = ["tokenised", "queued", "admitted", "engine died", "sent again", "queued", "admitted", "first token"]
    assert [name for name, _, _ in stages(*died, finished=99.0)] == [
        *("tokenise", "queue", "prefill", "restart", "prefill", "decode"),
    ]
    formed = stages("tokenised", "compiled", "queued", finished=9.0, has_form=True)
    assert formed == [("tokenise", 0.0, 1.0), ("compile", 1.0, 2.0), ("queue", 2.0, 9.0)]


def test_the_last_line_has_the_totals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = History()
    record = RequestRecord("one", time.time(), num_prompt_tokens=53)
    history.begin(record)
    events = (Event(record.received + 1, "queued"), Event(record.received + 2, "admitted"))
    samples = (SampleUpdate(0, (5, 6, 7)),)
    history.hear(RequestUpdate("one", samples, events=events, num_cached_tokens=48, num_prompt_done=53))
    history.end(record, "length")
    history.end(record, "abort")  # it ends once
    [line] = [message for message in caplog.messages if "ended" in message]
    assert line.startswith(
        "request one ended: length; 53 prompt tokens, 48 of them cached; 3 generated; preempted 0 times; queued 2.000 s"
    )
    assert "first token after 0." in line and line.endswith(" s in all")
    failed = RequestRecord("two", time.time())
    history.begin(failed)
    history.end(failed, "error", "out of luck")
    assert caplog.records[-1].levelno == logging.WARNING
    assert caplog.messages[-1].endswith("; out of luck")


def test_what_comes_after_the_end_changes_no_state() -> None:
    history = History()
    record = RequestRecord("one", 0.0)
    history.begin(record)
    history.end(record, "abort")
    history.hear(RequestUpdate("one", events=(Event(1.0, "queued"), Event(2.0, "admitted"))))
    assert record.state == "finished"
    assert (history.num_received, history.num_finished, history.num_unqueued) == (1, 1, 0)
    assert history.num_in == {"waiting": 0, "running": 0, "swapped": 0}


def test_history_is_bounded() -> None:
    history = History(max_records=3)
    for i in range(10):
        record = RequestRecord(f"r{i}", 0.0)
        history.begin(record)
        if i != 2:
            history.end(record, "stop")
    assert [record.request_id for record in history.records()] == ["r9", "r8", "r2"]


def test_settings_that_the_engine_refuses_end_its_start(tiny_folder: Path) -> None:
    """Its process is gone before it can be told to stop: nobody waits for it to listen."""

    async def test() -> None:
        with pytest.raises(ConfigError, match="swap_space is 0"):
            await AsyncEngine.start(settings(tiny_folder, preemption_mode="swap"))

    run(test())
