"""Prefix hits, and why there was no longer one."""

import pytest

from octavo.cache.manager import BlockChain, BlockManager
from octavo.cache.prefix import PrefixMatch, chain_hash, root_hash

SIZE = 4
PROMPT = list(range(100, 114))  # three blocks of 4 and two tokens


def run(manager: BlockManager, seq_id: int, tokens: list[int], salt: bytes = b"") -> PrefixMatch:
    """Start, compute and publish a sequence; its table stays open."""
    chain = BlockChain(root_hash(salt), SIZE)
    match = manager.match(tokens, chain)
    manager.start(seq_id, match)
    left = len(tokens) - match.num_tokens
    manager.allocate(seq_id, match.num_tokens, left)
    manager.publish(seq_id, tokens, chain, match.num_tokens, len(tokens))
    return match


def find(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> PrefixMatch:
    return manager.match(tokens, BlockChain(root_hash(salt), SIZE))


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, SIZE)


def test_a_hit_shares_the_blocks_of_the_first(manager: BlockManager) -> None:
    assert run(manager, 0, PROMPT).num_tokens == 0
    match = run(manager, 1, PROMPT)
    assert match.blocks == tuple(manager.table(0)[:3])
    assert (match.num_tokens, match.reason) == (12, "short")
    assert manager.table(1)[3] != manager.table(0)[3]
    manager.check()


@pytest.mark.parametrize(
    ("length", "hit", "reason"),
    [
        (3, 0, "short"),
        (4, 0, "short"),
        (5, 4, "none"),
        (8, 4, "short"),
        (9, 8, "none"),
        (12, 8, "short"),
        (13, 12, "none"),
    ],
)
def test_the_last_token_is_always_computed(manager: BlockManager, length: int, hit: int, reason: str) -> None:
    run(manager, 0, PROMPT)
    match = find(manager, PROMPT[:length])
    assert (match.num_tokens, match.reason) == (hit, reason)


def test_the_first_differing_position_is_named(manager: BlockManager) -> None:
    run(manager, 0, PROMPT)
    other = [*PROMPT[:6], 7, *PROMPT[7:]]
    assert find(manager, other) == PrefixMatch((manager.table(0)[0],), 4, "differs", 6)
    assert find(manager, [1, 2, 3, 4, 5]).position == 0


def test_an_evicted_block_is_told_from_one_that_never_was(manager: BlockManager) -> None:
    run(manager, 0, PROMPT)
    manager.free(0)
    run(manager, 1, list(range(7 * SIZE)))  # takes 7 of 8 blocks: the tail of the first chain goes first
    match = find(manager, PROMPT)
    assert (match.num_tokens, match.reason, match.position) == (4, "evicted", 4)
    manager.check()


def test_salts_keep_apart_and_are_named(manager: BlockManager) -> None:
    run(manager, 0, PROMPT)
    match = find(manager, PROMPT, salt=b"tenant")
    assert (match.num_tokens, match.reason) == (0, "salted")
    assert find(manager, [9] * 6, salt=b"tenant").reason == "differs"


def test_clearing_forgets_but_leaves_running_sequences_alone(manager: BlockManager) -> None:
    run(manager, 0, PROMPT)
    assert manager.prefix is not None
    manager.prefix.clear()
    assert find(manager, PROMPT).num_tokens == 0
    manager.check()
    manager.free(0)
    manager.check()
    assert manager.num_free == 8


def test_two_that_compute_the_same_at_once_publish_one(manager: BlockManager) -> None:
    chains = [BlockChain(root_hash(), SIZE) for _ in range(2)]
    for seq_id, chain in enumerate(chains):
        manager.start(seq_id, manager.match(PROMPT[:8], chain))
        manager.allocate(seq_id, 0, 8)
    for seq_id, chain in enumerate(chains):
        manager.publish(seq_id, PROMPT[:8], chain, 0, 8)
    assert find(manager, PROMPT).blocks == tuple(manager.table(0))
    manager.free(0)
    manager.free(1)
    manager.check()
    assert manager.num_free == 8


def test_a_chain_names_every_token_before_it() -> None:
    first = chain_hash(root_hash(), [1, 2])
    assert chain_hash(first, [3, 4]) != chain_hash(chain_hash(root_hash(), [2, 1]), [3, 4])
    assert chain_hash(root_hash(), [1, 2]) != chain_hash(root_hash(b"salt"), [1, 2])
