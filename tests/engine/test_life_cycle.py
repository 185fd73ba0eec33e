"""Requests come, go, fail and are left, each without a trace in the others."""

import gc
import logging
import random
import signal
import sys
import threading

import pytest
from doubles.tiny_llm import Oracle, greedy

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.errors import RequestError

PROMPTS = ["The quick brown fox", "Numbers such as 3.14", "def add(first", "Stop at the end", "Grüße aus Köln"]


def check_idle(llm: LLM) -> None:
    """Nothing runs, waits or holds a block, and nobody remembers a request."""
    engine = llm._engine
    engine.step()
    assert not engine.has_work
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.num_used_blocks) == (0, 0, 0)
    engine.scheduler.check()
    roster = engine.scheduler.roster
    assert not roster.requests and not roster.sent and not roster.suspects and not roster.removed
    assert not roster.waiting._entries
    assert not len(llm._outputs) and not llm._news and not llm._abandoned
    runner = llm.executor._worker._runner
    assert runner is not None and runner.num_sequences == len(runner._store) == 0


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


# Second calls and several callers


def test_a_second_call_is_as_right_as_the_first(make_llm) -> None:
    llm = make_llm()
    first = tokens(llm.generate(PROMPTS, greedy(20)))
    check_idle(llm)
    assert tokens(llm.generate(PROMPTS[::-1], greedy(20))) == first[::-1]
    llm.generate("something else", SamplingParams(seed=1, max_tokens=5, n=3))
    assert tokens(llm.generate(PROMPTS, greedy(20))) == first
    check_idle(llm)


def test_interleaved_streams_and_calls_keep_their_own_results(tiny: LLM, oracle: Oracle) -> None:
    ids = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    streams = [tiny.stream({"prompt_token_ids": prompt}, greedy(6 + 3 * i)) for i, prompt in enumerate(ids)]
    joined, last = [""] * len(ids), [None] * len(ids)
    live = set(range(len(ids)))
    step = 0
    while live:
        for index in sorted(live):
            output = next(streams[index], None)
            if output is None:
                live.remove(index)
                continue
            joined[index] += output.outputs[0].delta
            last[index] = output
        if step == 3:  # a call in the middle runs all of them on
            (other,) = tiny.generate({"prompt_token_ids": ids[0]}, greedy(40))
            oracle.check_greedy(ids[0], other.outputs[0].token_ids)
        step += 1
    for index, output in enumerate(last):
        assert output is not None and output.finished
        assert output.prompt_token_ids == ids[index]
        assert joined[index] == output.outputs[0].text
        assert len(output.outputs[0].token_ids) == 6 + 3 * index
        oracle.check_greedy(ids[index], output.outputs[0].token_ids)
    check_idle(tiny)


def test_threads_that_share_a_model_get_their_own_results(tiny: LLM, oracle: Oracle) -> None:
    found: dict[int, list[RequestOutput]] = {}

    def call(number: int) -> None:
        found[number] = tiny.generate([PROMPTS[number % 5]] * 3, greedy(10 + number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(8):
        for output in found[number]:
            assert len(output.outputs[0].token_ids) == 10 + number
            oracle.check_greedy(tiny.tokenizer.encode(PROMPTS[number % 5]), output.outputs[0].token_ids)
    check_idle(tiny)


# Leaving


@pytest.mark.parametrize("num_seen", [1, 4])
def test_a_stream_that_is_left_frees_everything_at_once(tiny: LLM, num_seen: int) -> None:
    stream = tiny.stream("The quick brown fox", SamplingParams(seed=2, n=3, max_tokens=200, ignore_eos=True))
    for _ in range(num_seen):
        next(stream)
    assert tiny.stats.num_running == 1
    stream.close()
    assert (tiny.stats.num_running, tiny.stats.num_used_blocks) == (0, 0)
    check_idle(tiny)


def test_a_stream_left_while_its_prompt_is_in_chunks(make_llm, oracle: Oracle) -> None:
    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=4)
    long = {"prompt_token_ids": [7 + i % 300 for i in range(300)]}
    slow = llm.stream(long, greedy(5, prompt_logprobs=0))  # prompt log-probabilities show each chunk
    first = next(slow)
    assert not first.outputs[0].token_ids and len(first.prompt_logprobs or []) < 300
    quick = llm.stream("The quick", greedy(8))
    next(quick)
    slow.close()
    assert llm.stats.num_running == 1
    *_, last = quick
    oracle.check_greedy(llm.tokenizer.encode("The quick"), last.outputs[0].token_ids)
    check_idle(llm)


def test_one_of_several_that_share_a_prefix_is_left_midway(make_llm, oracle: Oracle) -> None:
    llm = make_llm()
    stem = [11 + i % 200 for i in range(45)]
    prompts = [[*stem, 20 + i] for i in range(4)]
    streams = [llm.stream({"prompt_token_ids": prompt}, greedy(30)) for prompt in prompts]
    for stream in streams:
        next(stream)
    for _ in range(5):
        next(streams[1])
    streams[1].close()
    for index in (0, 2, 3):
        *_, last = streams[index]
        assert len(last.outputs[0].token_ids) == 30
        oracle.check_greedy(prompts[index], last.outputs[0].token_ids)
    check_idle(llm)


def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    streams = [llm.stream("The quick brown fox", greedy(100))]
    next(streams[0])
    execute = llm.executor.execute_model

    def forget_and_execute(step):
        if streams:
            streams.clear()
            gc.collect()
        return execute(step)

    monkeypatch.setattr(llm.executor, "execute_model", forget_and_execute)
    (output,) = llm.generate("def add", greedy(10))
    assert len(output.outputs[0].token_ids) == 10
    check_idle(llm)


class Interrupt:
    """Ctrl-C in the middle of the nth step, before or after the work."""

    def __init__(self, llm: LLM, at: int, late: bool) -> None:
        self.left, self.late = at, late
        self.execute = llm.executor.execute_model

    def __call__(self, step):
        self.left -= 1
        if self.left == 0 and not self.late:
            raise KeyboardInterrupt
        result = self.execute(step)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_after_an_interrupt_everything_goes_on(
    make_llm, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, at: int, late: bool
) -> None:
    llm = make_llm(num_blocks_override=14, max_num_batched_tokens=16, max_num_seqs=8)
    bystander = llm.stream("Stop at the end", greedy(20))
    next(bystander)
    monkeypatch.setattr(llm.executor, "execute_model", Interrupt(llm, at, late))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(30))
    assert llm.stats.num_running + llm.stats.num_waiting == 1
    outputs = llm.generate(PROMPTS, greedy(12))
    *_, last = bystander
    assert len(last.outputs[0].token_ids) == 20
    oracle.check_greedy(last.prompt_token_ids, last.outputs[0].token_ids)
    for output in outputs:
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    check_idle(llm)


class InterruptAtLine:
    """Ctrl-C at the nth line of the scheduler's, the cache's or the outputs' own work."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if not any(part in path for part in ("/octavo/scheduler/", "/octavo/cache/", "/output_processor.py")):
            return None
        return self.on_line

    def on_line(self, frame, event, argument):
        self.left -= event == "line"
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.on_line


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_within_the_schedulers_work_ends_what_was_there_and_nothing_else(
    make_llm, oracle: Oracle, part: int
) -> None:
    """Whatever line it hits: bystanders go on rightly or end with an error, and later requests are served."""
    llm = make_llm(num_blocks_override=14, max_num_batched_tokens=16, max_num_seqs=8)
    rng = random.Random(part)
    num_ended = 0
    for _ in range(15):
        bystander = llm.stream("Stop at the end", greedy(16))
        next(bystander)
        trace = InterruptAtLine(rng.randrange(1, 4000))
        sys.settrace(trace)
        try:
            llm.generate(PROMPTS, greedy(6))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        *_, last = bystander
        if last.error is None:
            assert len(last.outputs[0].token_ids) == 16
            oracle.check_greedy(last.prompt_token_ids, last.outputs[0].token_ids)
        else:
            num_ended += 1
            assert "interrupted" in last.error and last.outputs[0].finish_reason == "error"
        for output in llm.generate(PROMPTS, greedy(6)):
            oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
        check_idle(llm)
    assert num_ended > 0


def test_what_an_interrupted_step_was_to_forget_is_forgotten_later(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    llm.generate(PROMPTS, greedy(1))  # the next step tells the executor that these have ended
    monkeypatch.setattr(llm.executor, "execute_model", Interrupt(llm, 1, late=False))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(1))
    check_idle(llm)


def test_an_interrupt_while_prompts_are_read_leaves_none_behind(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    tokenize = llm._inputs.tokenize

    def interrupted(prompt):
        if prompt == "def add(first":
            raise KeyboardInterrupt
        return tokenize(prompt)

    monkeypatch.setattr(llm._inputs, "tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(5))
    check_idle(llm)


# Failing


def test_a_failed_step_among_many_costs_nobody_else_anything(
    make_llm, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    execute, calls = llm.executor.execute_model, []

    def failing(step):
        calls.append(step)
        if len(calls) == 4:
            raise ValueError("out of luck")
        return execute(step)

    monkeypatch.setattr(llm.executor, "execute_model", failing)
    for output in llm.generate(PROMPTS, greedy(12)):
        assert output.error is None
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    check_idle(llm)


def test_a_request_whose_every_step_fails_ends_alone(make_llm, oracle: Oracle, monkeypatch, caplog) -> None:
    llm = make_llm()
    execute = llm.executor.execute_model
    bad = llm.tokenizer.encode("def add(first")
    held: set[int] = set()

    def failing(step):
        held.update(new.seq_id for new in step.new if new.token_ids[: len(bad)] == bad)
        if held & {scheduled.seq_id for scheduled in step.scheduled}:
            raise ValueError("out of luck")
        return execute(step)

    monkeypatch.setattr(llm.executor, "execute_model", failing)
    outputs = llm.generate(PROMPTS, greedy(12))
    for output in outputs:
        sample = output.outputs[0]
        if output.prompt == "def add(first":
            assert (output.error, sample.finish_reason) == ("the model failed: ValueError: out of luck", "error")
        else:
            assert (output.error, sample.finish_reason) == (None, "length")
            oracle.check_greedy(output.prompt_token_ids, sample.token_ids)
    check_idle(llm)


def test_an_output_that_cannot_be_written_ends_its_request_alone(tiny: LLM, monkeypatch, caplog) -> None:
    take = type(tiny._outputs).take
    bad = str(next(tiny._request_ids) + 2)

    def broken(self, update):
        if update.request_id == bad and update.samples and tiny._outputs._requests[bad].samples[0].output.token_ids:
            raise ValueError("no words")
        return take(self, update)

    monkeypatch.setattr(type(tiny._outputs), "take", broken)
    one, two, three = tiny.generate(PROMPTS[:3], greedy(6))
    assert (two.request_id, two.error, two.outputs[0].finish_reason) == (bad, "its output failed: no words", "error")
    assert [len(output.outputs[0].token_ids) for output in (one, three)] == [6, 6]
    check_idle(tiny)


def test_a_closed_model_says_so(make_llm) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


# What can never fit, and what barely does


def test_a_request_larger_than_all_blocks_is_refused_at_once_and_the_others_go_on(make_llm, oracle: Oracle) -> None:
    llm = make_llm(num_blocks_override=8)  # of 8 tokens: 64, and max_model_len is 512
    large = [5] * 60
    outputs = llm.generate([{"prompt_token_ids": large}, "The quick", {"prompt_token_ids": [6] * 70}], greedy(10))
    assert outputs[0].error is not None and outputs[2].error is not None
    assert "60 prompt tokens and 10 of output" in outputs[0].error and "at most 64 tokens" in outputs[0].error
    assert "max_tokens" in outputs[0].error and "num_blocks_override" in outputs[0].error
    assert outputs[0].outputs[0].finish_reason == "error"
    oracle.check_greedy(outputs[1].prompt_token_ids, outputs[1].outputs[0].token_ids)
    with pytest.raises(RequestError, match="at most 64 tokens"):
        next(llm.stream({"prompt_token_ids": large}, greedy(10)))
    (fits,) = llm.generate({"prompt_token_ids": large}, greedy(4))
    assert len(fits.outputs[0].token_ids) == 4
    open_params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (open_end,) = llm.generate({"prompt_token_ids": large}, open_params)
    assert (len(open_end.outputs[0].token_ids), open_end.outputs[0].finish_reason) == (4, "length")
    check_idle(llm)


@pytest.mark.parametrize(("mode", "policy"), [("recompute", "priority"), ("swap", "fcfs"), ("swap", "priority")])
def test_two_hundred_requests_on_a_tiny_pool_all_finish(make_llm, oracle: Oracle, mode: str, policy: str) -> None:
    swap = {"preemption_mode": "swap", "swap_space": 0.001} if mode == "swap" else {}
    llm = make_llm(num_blocks_override=12, max_num_seqs=16, max_num_batched_tokens=32, scheduling_policy=policy, **swap)
    rng = random.Random(1)
    stem = [rng.randrange(4, 400) for _ in range(24)]
    prompts = [[*stem[: rng.randrange(1, 24)], 4 + i] for i in range(200)]
    params = [greedy(rng.randrange(1, 24)) for _ in prompts]
    priorities = [rng.randrange(5) for _ in prompts]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, priority=priorities)
    for output, prompt, one in zip(outputs, prompts, params, strict=True):
        assert output.prompt_token_ids == prompt
        assert (output.error, output.outputs[0].finish_reason) == (None, "length")
        assert len(output.outputs[0].token_ids) == one.max_tokens
    for output in outputs[::10]:
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    assert llm.stats.counts.num_preemptions > 0
    check_idle(llm)


def test_priorities_decide_who_waits(make_llm) -> None:
    llm = make_llm(max_num_seqs=1, scheduling_policy="priority")
    done = []
    step = llm._step

    def watch() -> None:
        step()
        done.extend(i for i, news in llm._news.items() if news.finished and i not in done)

    llm._step = watch  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, greedy(3), priority=[3, 1, 2, 1, 0])
    order = [outputs[i].request_id for i in (4, 1, 3, 2, 0)]
    assert done == order


# The log, and the process


def test_each_request_ends_with_one_line_in_the_log(tiny: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    tiny.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(10, 50))}
    (first,) = tiny.generate(prompt, greedy(5))
    (second,) = tiny.generate(prompt, greedy(5, stop_token_ids=[first.outputs[0].token_ids[2]]))
    (refused,) = tiny.generate({"prompt_token_ids": [401]})
    stream = tiny.stream(prompt, greedy(50))
    next(stream)
    left = str(int(refused.request_id) + 1)
    stream.close()
    with pytest.raises(RequestError):
        next(tiny.stream(""))
    lines = {record.args[0]: record for record in caplog.records if "request" in record.message}
    assert len(lines) == 5
    messages = {key: record.message.partition("; preempted")[0] for key, record in lines.items()}
    assert messages[first.request_id] == (
        f"request {first.request_id} ended: length; 40 prompt tokens, 0 of them cached; 5 generated"
    )
    assert messages[second.request_id] == (
        f"request {second.request_id} ended: stop; 40 prompt tokens, 32 of them cached; 3 generated"
    )
    assert messages[left].startswith(f"request {left} ended: abort; 40 prompt tokens")
    assert messages[refused.request_id].startswith(f"request {refused.request_id} refused: prompt holds 401")
    assert all(
        len([record for record in caplog.records if record.args and record.args[0] == key]) == 1 for key in lines
    )


def test_no_signal_handler_is_installed_and_no_logging_is_set_up(make_llm) -> None:
    def handlers() -> dict[int, object]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    before, root = handlers(), (list(logging.root.handlers), logging.root.level)
    make_llm().generate("hello", greedy(2))
    assert handlers() == before
    assert (list(logging.root.handlers), logging.root.level) == root
    assert logging.getLogger("octavo").level == logging.NOTSET and not logging.getLogger("octavo").handlers
