"""The memory plan: it adds up, keeps to its rules, and says what to change when nothing fits."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.executor.memory import MemoryRequest, plan_memory

MIB = 1 << 20
BASE = MemoryRequest(
    total=1000 * MIB,
    free=900 * MIB,
    weights=200 * MIB,
    workspace=50 * MIB,
    block_bytes=MIB,
    block_size=16,
    unified=False,
    max_num_seqs=4,
    max_model_len=160,
    memory_utilization=0.8,
)


def test_a_device_of_its_own_gives_its_share() -> None:
    plan = plan_memory(BASE)
    assert plan.num_blocks == 800 - 250
    assert plan.max_tokens == 550 * 16
    assert plan.reserved == 800 * MIB and plan.left == 100 * MIB
    assert plan_memory(replace(BASE, free=500 * MIB)).num_blocks == 250


def test_shared_memory_is_taken_as_needed_and_by_half_at_most() -> None:
    shared = replace(BASE, unified=True)
    assert plan_memory(shared).num_blocks == 4 * 10
    assert plan_memory(replace(shared, max_num_seqs=1000)).num_blocks == (900 - 250) // 2
    # One sequence may go beyond the half, up to memory_utilization.
    assert plan_memory(replace(shared, max_model_len=400 * 16)).num_blocks == 400
    with pytest.raises(ConfigError):
        plan_memory(replace(shared, max_model_len=551 * 16))


def test_the_override_wins() -> None:
    for unified in (False, True):
        plan = plan_memory(replace(BASE, unified=unified, num_blocks_override=3))
        assert plan.num_blocks == 3  # less than one sequence of max_model_len: the longer ones are refused one by one
    assert plan_memory(replace(BASE, num_blocks_override=5000)).left < 0


def test_host_blocks_follow_swap_space() -> None:
    assert plan_memory(replace(BASE, swap_space=0.5)).num_host_blocks == 512
    assert plan_memory(BASE).num_host_blocks == 0
    assert plan_memory(replace(BASE, swap_space=0.5)).host_bytes == 512 * MIB


def test_too_long_says_the_largest_that_fits_and_both_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(replace(BASE, max_model_len=550 * 16 + 1))
    message = str(caught.value)
    assert "max_model_len 8801" in message and "the largest that fits is 8800" in message
    assert "lower max_model_len" in message and "raise memory_utilization" in message
    assert "\n" not in message
    assert plan_memory(replace(BASE, max_model_len=8800)).num_blocks == 550


def test_no_block_at_all() -> None:
    with pytest.raises(ConfigError, match="not one block fits: raise memory_utilization"):
        plan_memory(replace(BASE, weights=900 * MIB))


@given(
    st.builds(
        MemoryRequest,
        total=st.integers(1 << 20, 1 << 40),
        free=st.integers(0, 1 << 40),
        weights=st.integers(0, 1 << 39),
        workspace=st.integers(0, 1 << 35),
        block_bytes=st.integers(1, 1 << 24),
        block_size=st.sampled_from([1, 8, 16, 128]),
        unified=st.booleans(),
        max_num_seqs=st.integers(1, 1000),
        max_model_len=st.integers(1, 1 << 20),
        memory_utilization=st.floats(0.01, 1),
        swap_space=st.floats(0, 100),
    )
)
def test_what_is_planned_fits_and_adds_up(request: MemoryRequest) -> None:
    assume(request.free <= request.total)
    try:
        plan = plan_memory(request)
    except ConfigError:
        assert min(request.free, request.total * request.memory_utilization) - request.weights - request.workspace < (
            -(-request.max_model_len // request.block_size) * request.block_bytes
        )
        return
    assert plan.max_tokens >= request.max_model_len
    assert 0 <= plan.left == plan.free - plan.weights - plan.workspace - plan.kv_bytes
    assert plan.reserved <= request.total * request.memory_utilization
    if request.unified:
        one = -(-request.max_model_len // request.block_size)
        assert plan.num_blocks <= one * request.max_num_seqs
        assert plan.num_blocks == one or 2 * plan.kv_bytes <= request.free


def test_it_prints() -> None:
    lines = str(plan_memory(replace(BASE, swap_space=1))).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "memory",
        "in use before",
        "weights",
        "workspace",
        "KV cache",
        "reserved",
        "available",
        "host swap space",
    ]
    assert "550 blocks of 16 tokens, 1024 KiB each, 8800 tokens in all" in lines[4]
