"""Block ids, references, and the order of reuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert sorted(blocks) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(IndexError):
        pool.allocate()
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check()


def test_a_block_with_two_references_stays_until_both_are_gone() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.retain(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])


def test_published_blocks_are_evicted_last_and_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.when_evicted(evicted.append)
    a, b, c, plain = (pool.allocate() for _ in range(4))
    for block in (a, b, c):
        pool.publish(block)
    pool.release([b, a, plain])
    assert pool.num_cached == 2
    assert pool.allocate() == plain
    assert evicted == []
    assert pool.allocate() == b
    assert evicted == [b]
    assert not pool.is_published(b)
    pool.retain(a)  # a prefix hit revives it
    assert pool.num_free == 0
    assert pool.is_published(a)
    pool.check()


def test_the_source_of_a_copy_is_not_reused_within_its_step() -> None:
    pool = BlockPool(2)
    source, target = pool.allocate(), pool.allocate()
    pool.hold_for_copy(source)
    pool.release([source])
    assert pool.num_free == 0
    pool.check()
    pool.end_step()
    assert pool.allocate() == source
    pool.release([source, target])
    pool.check()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_sequence_of_calls_loses_a_block(data: st.DataObject) -> None:
    pool = BlockPool(6)
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["allocate", "retain", "release", "publish", "copy", "end"]))
        if action == "allocate" and pool.num_free:
            held.append(pool.allocate())
        elif action == "end":
            pool.end_step()
        elif held:
            block = data.draw(st.sampled_from(held))
            if action == "retain":
                pool.retain(block)
                held.append(block)
            elif action == "release":
                held.remove(block)
                pool.release([block])
            elif action == "publish":
                pool.publish(block)
            elif action == "copy":
                pool.hold_for_copy(block)
        pool.check()
    pool.release(held)
    pool.end_step()
    assert pool.num_free == 6
