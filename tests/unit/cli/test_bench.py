"""The parts of octavo bench: workloads, limits counted by hand, block tables played back."""

from typing import Any

import numpy as np
import pytest
import torch

from octavo.cli.bench.measure import block_use, percentiles, touched_blocks
from octavo.cli.bench.recorder import Step
from octavo.cli.bench.roofline import LayerCosts, ModelCosts, Work, limit_of, work_of
from octavo.cli.bench.workload import Length, Shape, make_requests
from octavo.cli.main import main
from octavo.contract import Attention, Probe, ProgramCosts
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import NewSequence, ScheduledSequence, SchedulerOutput


@pytest.mark.parametrize(
    ("text", "length"),
    [("128", Length(128, 128)), ("32:512", Length(32, 512)), ("16:1024:log", Length(16, 1024, log=True))],
)
def test_lengths(text: str, length: Length) -> None:
    assert Length.parse(text) == length
    drawn = length.draw(np.random.default_rng(0), 2000)
    assert min(drawn) >= length.low
    assert max(drawn) <= length.high
    if length.log:
        assert np.median(drawn) < 2 * (length.low * length.high) ** 0.5


@pytest.mark.parametrize("text", ["", "0", "-3", "9:3", "1:2:3", "1:2:lin", "x", "1:"])
def test_what_is_no_length(text: str) -> None:
    if text == "1:":
        assert Length.parse(text) == Length(1, 1)
        return
    with pytest.raises(ConfigError, match="a range"):
        Length.parse(text)


def test_requests_follow_from_the_seed() -> None:
    shape = Shape(5, Length(4, 40), Length(2, 9), prefix_len=7, seed=3)
    first = make_requests(shape, 0, 100, avoid=[0, 17])
    assert first == make_requests(shape, 0, 100, avoid=[0, 17])
    again = make_requests(shape, 1, 100, avoid=[0, 17])
    prefixes = {tuple(request.token_ids[:7]) for request in first + again}
    assert len(prefixes) == 1, "the prefix stays over the repeats"
    assert [len(r.token_ids) for r in first] == [len(r.token_ids) for r in again]
    assert [r.num_output_tokens for r in first] == [r.num_output_tokens for r in again]
    assert first[0].token_ids[7:] != again[0].token_ids[7:]
    assert all(id_ not in (0, 17) and 0 <= id_ < 100 for r in first for id_ in r.token_ids)


def test_a_new_prefix_for_each_repeat() -> None:
    shape = Shape(2, Length(4, 4), Length(2, 2), prefix_len=7, new_prefix=True)
    one, other = (make_requests(shape, repeat, 100) for repeat in (0, 1))
    assert one[0].token_ids[:7] == one[1].token_ids[:7] != other[0].token_ids[:7]


def step(*scheduled: ScheduledSequence, new: tuple[NewSequence, ...] = (), removed: tuple[int, ...] = ()) -> Step:
    return Step(SchedulerOutput(0, scheduled, new, removed), 0.0, 1.0, {})


def new(seq_id: int, block_ids: list[int]) -> NewSequence:
    return NewSequence(seq_id, 0, [], 0, SamplingParams(), frozenset(), block_ids)


def test_blocks_are_counted_after_each_step() -> None:
    steps = [
        # 10 tokens in blocks of 4, and one block too many
        step(ScheduledSequence(1, 0, 10, sample_for=(1,)), new=(new(1, [5, 6, 7, 8]),)),
        # its eleventh; and another sequence that shares the first block
        step(ScheduledSequence(1, 10, 1), ScheduledSequence(2, 4, 1), new=(new(2, [5, 9]),)),
        step(ScheduledSequence(2, 5, 1, new_block_ids=(3,), replaced_blocks=((1, 2),)), removed=(1,)),
    ]
    use = block_use(steps, 4)
    # after the steps: 4 blocks held, 1 empty, 6 places empty; 5, 1, 5 + 3; then 5, 2, 3: one empty, 2 + 4 places
    assert (use.num_used, use.num_empty, use.num_empty_slots) == (4 + 5 + 3, 1 + 1 + 1, 6 + 8 + 6)
    assert use.num_slots == 12 * 4
    assert use.empty_share == pytest.approx(3 / 9)
    assert use.empty_slot_share == pytest.approx(20 / 48)
    assert touched_blocks(steps) == {2, 3, 5, 6, 7, 8, 9}


def costs(window: int | None = None) -> ModelCosts:
    attention = Attention(num_heads=4, num_kv_heads=2, head_size=8, scale=1.0, window=window)
    layer = LayerCosts(attention, parameters=1000, kv_bytes=64.0)
    program = ProgramCosts(6000, 500, torch.bfloat16, torch.int8, torch.bfloat16)
    return ModelCosts(((layer, 3),), 250, program, "the spec")


def test_work_is_what_the_formulas_ask() -> None:
    # one row reads 5 tokens after 10, another one token after 20, which alone draws
    given = step(ScheduledSequence(1, 10, 5), ScheduledSequence(2, 20, 1, sample_for=(2,)))
    pairs = (11 + 12 + 13 + 14 + 15) + 21
    assert work_of(given, costs()) == Work(
        num_bytes=6000 + 500 + 3 * 64 * (15 + 5 + 21 + 1),
        layer_ops=2 * 3000 * 6,
        head_ops=2 * 250,
        attention_ops=3 * 2 * (4 * 8 * 2) * pairs,
    )
    assert work_of(step(ScheduledSequence(1, 10, 5)), costs()).head_ops == 0


def test_guessed_tokens_are_work_too() -> None:
    guessing = work_of(step(ScheduledSequence(1, 10, 1, sample_for=(1,), draft_token_ids=(7, 8))), costs())
    plain = work_of(step(ScheduledSequence(1, 10, 3, sample_for=(1,))), costs())
    assert guessing.layer_ops == plain.layer_ops
    assert guessing.attention_ops == plain.attention_ops
    assert guessing.head_ops == 3 * plain.head_ops


def test_a_window_bounds_what_is_read() -> None:
    work = work_of(step(ScheduledSequence(1, 10, 5, sample_for=(1,))), costs(window=4))
    assert work.attention_ops == 3 * 2 * (4 * 8 * 2) * 5 * 4
    assert work.num_bytes == 6000 + 500 + 3 * 64 * (4 + 5 - 1 + 5)


def test_experts_are_read_as_tokens_choose_them() -> None:
    layer = LayerCosts(None, 100, 0.0, expert_parameters=100, num_experts=9, num_active_experts=2)
    program = ProgramCosts(1000, 0, torch.float32, torch.float32, torch.float32)
    model = ModelCosts(((layer, 1),), 0, program, "the spec")
    for num_tokens, num_bytes in ((1, 300), (2, 500), (50, 1000)):
        work = work_of(step(ScheduledSequence(1, 0, num_tokens)), model)
        assert work == Work(num_bytes, layer_ops=2 * 300 * num_tokens)


def test_each_step_is_limited_by_its_slower_side() -> None:
    probe = Probe(1000.0, {torch.bfloat16: 100.0, torch.int8: 200.0})
    works = [Work(num_bytes=5000, layer_ops=100), Work(num_bytes=1000, layer_ops=200, head_ops=200)]
    limit = limit_of(works, costs(), probe)
    assert (limit.seconds, limit.byte_seconds, limit.op_seconds) == (5.0 + 3.0, 6.0, 4.0)
    assert limit.without_peak is None
    assert limit_of(works, costs(), Probe(1000.0, {torch.bfloat16: 100.0})).without_peak is torch.int8


def test_percentiles() -> None:
    assert percentiles([1.0, 2.0, 3.0]) == {"p50": 2.0, "p90": pytest.approx(2.8), "p99": pytest.approx(2.98)}
    assert percentiles([]) == {}


def exit_code(*argv: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(argv)
    return end.value.code


def test_the_group_tells_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "--help") == 0
    assert "octavo bench latency demo" in capsys.readouterr().out
    assert exit_code("bench") == 2
    assert exit_code("bench", "speed") == 2
    assert "'latency', 'throughput'" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["latency", "throughput"])
def test_help_teaches(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", benchmark, "--help") == 0
    text = capsys.readouterr().out
    for said in ("--input-len", "--prefix-len", "--compare", "--json", "--max-num-seqs", "what is shown", "examples:"):
        assert said in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--repeats", "0"], "at least 1"),
        (["--warmup", "x"], "at least 0"),
        (["--input-len", "9:3"], "a length is a number of tokens"),
    ],
)
def test_a_bad_flag_is_told_what_is_right(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "latency", "demo", *flags) == 2
    assert said in capsys.readouterr().err
