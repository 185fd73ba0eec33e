"""Block tables: growth, copy-on-write, and the way to the host and back."""

import pytest

from octavo.cache.manager import BlockChain, BlockManager
from octavo.cache.prefix import PrefixMatch, root_hash

SIZE = 4
NO_HIT = PrefixMatch((), 0, "disabled", 0)


def chain() -> BlockChain:
    return BlockChain(root_hash(), SIZE)


def two_that_share() -> tuple[BlockManager, list[BlockChain]]:
    """Sequences 0 and 1 of the same nine tokens: two shared blocks, and a tail for each."""
    manager = BlockManager(6, SIZE, num_host_blocks=6)
    tokens = list(range(9))
    chains = [chain(), chain()]
    for seq_id in range(2):
        match = manager.match(tokens, chains[seq_id])
        manager.start(seq_id, match)
        manager.allocate(seq_id, match.num_tokens, 9 - match.num_tokens)
        manager.publish(seq_id, tokens, chains[seq_id], match.num_tokens, 9)
    return manager, chains


def test_a_table_grows_by_whole_blocks_and_only_when_needed() -> None:
    manager = BlockManager(4, SIZE)
    manager.start(0, NO_HIT)
    assert manager.num_needed(0, 0, 5) == 2
    appended, replaced = manager.allocate(0, 0, 5)
    assert (len(appended), replaced) == (2, ())
    assert manager.num_needed(0, 5, 3) == 0
    assert manager.allocate(0, 5, 3) == ((), ())
    assert manager.num_needed(0, 8, 1) == 1


def test_a_fork_shares_and_the_first_to_write_copies() -> None:
    manager = BlockManager(6, SIZE, prefix_caching=False)
    manager.start(0, NO_HIT)
    manager.allocate(0, 0, 6)
    manager.fork(0, 1, 6)
    full, tail = manager.table(0)
    assert manager.table(1) == [full, tail]
    assert manager.num_needed(1, 6, 1) == 1
    appended, replaced = manager.allocate(1, 6, 1)
    assert appended == ()
    ((index, target),) = replaced
    assert index == 1
    assert manager.step.copies == [(tail, target)]
    assert manager.num_needed(0, 6, 1) == 0, "the last holder writes in place"
    manager.end_step()
    manager.check()


def test_what_a_copy_reads_is_not_handed_out_in_the_same_step() -> None:
    manager = BlockManager(4, SIZE)
    manager.start(0, NO_HIT)
    manager.allocate(0, 0, 2)
    manager.fork(0, 1, 2)
    manager.allocate(1, 2, 1)
    ((source, target),) = manager.step.copies
    manager.free(0)  # the source's last holder goes before the executor has copied
    manager.start(2, NO_HIT)
    new, _ = manager.allocate(2, 0, 8)
    assert source not in new and target not in new
    assert manager.num_free == 0
    manager.check()
    manager.end_step()
    assert manager.num_free == 1
    assert manager.pool.allocate() == source


def test_a_published_tail_is_copied_even_by_its_only_holder() -> None:
    manager = BlockManager(6, SIZE)
    first = chain()
    tokens = list(range(8))
    manager.start(0, NO_HIT)
    manager.allocate(0, 0, 8)
    manager.publish(0, tokens, first, 0, 8)
    manager.fork(0, 1, 6)  # the prompt had 6 tokens; the block holds two of the first sample's output
    manager.free(0)
    assert manager.num_needed(1, 6, 1) == 1
    _, replaced = manager.allocate(1, 6, 1)
    assert replaced
    assert manager.match([*tokens, 8], chain()).num_tokens == 8, "the cached block keeps its contents"


def test_swap_out_and_in_keeps_sharing() -> None:
    manager = BlockManager(6, SIZE, num_host_blocks=4, prefix_caching=False)
    manager.start(0, NO_HIT)
    manager.allocate(0, 0, 6)
    manager.fork(0, 1, 6)
    manager.allocate(1, 6, 1)
    manager.take_step()
    manager.end_step()
    swapped = manager.swap_out([(0, chain(), 6), (1, chain(), 7)])
    assert swapped is not None
    step = manager.take_step()
    assert len(step.swap_out) == 3, "a block that both samples hold is copied once"
    assert manager.num_free == 6
    manager.end_step()
    assert manager.num_needed_to_swap_in(swapped.values()) == 3
    assert manager.swap_in(swapped) == {0: 6, 1: 7}
    assert len(manager.take_step().swap_in) == 3
    assert manager.table(0)[0] == manager.table(1)[0]
    assert manager.table(0)[1] != manager.table(1)[1]
    assert manager.host_pool.num_free == 1, "host blocks are read in this step"
    manager.end_step()
    assert manager.host_pool.num_free == 4
    manager.check()


def test_swap_leaves_what_another_request_holds_on_the_device() -> None:
    manager, chains = two_that_share()
    swapped = manager.swap_out([(1, chains[1], 9)])
    assert swapped is not None
    assert len(manager.take_step().swap_out) == 1, "the tail alone is private"
    manager.end_step()
    assert manager.swap_in(swapped) == {1: 9}
    assert manager.table(1)[:2] == manager.table(0)[:2]
    manager.end_step()
    manager.check()


def test_swap_in_stops_at_a_gap() -> None:
    manager, chains = two_that_share()
    swapped = manager.swap_out([(1, chains[1], 9)])
    manager.free(0)
    manager.start(2, NO_HIT)
    manager.allocate(2, 0, 5 * SIZE)  # evicts the second block of the shared prefix
    manager.free(2)
    manager.end_step()
    assert swapped is not None
    assert manager.swap_in(swapped) == {1: 4}
    manager.end_step()
    manager.check()
    assert manager.host_pool.num_free == 6


def test_swap_out_without_room_changes_nothing() -> None:
    manager = BlockManager(4, SIZE, num_host_blocks=1)
    manager.start(0, NO_HIT)
    manager.allocate(0, 0, 8)
    assert manager.swap_out([(0, chain(), 8)]) is None
    assert len(manager.table(0)) == 2
    assert manager.host_pool.num_free == 1
    manager.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_hashes_cover_full_blocks_once(length: int) -> None:
    whole, grown = chain(), chain()
    tokens = list(range(length))
    whole.extend(tokens)
    for end in range(length + 1):
        grown.extend(tokens[:end])
    assert grown.hashes == whole.hashes
    assert len(whole.hashes) == length // SIZE
