"""Block tables: which physical blocks hold a sequence's keys and values, on the device or swapped to the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.cache.pool import BlockPool
from octavo.cache.prefix import PrefixCache, PrefixMatch, chain_hash

__all__ = ["BlockChain", "BlockManager", "StepBlocks", "SwappedTable"]


class BlockChain:
    """The hashes of a sequence's full blocks, extended as its tokens grow; each token is hashed once."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.hashes: list[bytes] = []
        self._block_size = block_size

    def extend(self, token_ids: Sequence[int]) -> None:
        """Cover every full block of `token_ids`, which only ever grows."""
        size = self._block_size
        for start in range(len(self.hashes) * size, len(token_ids) - size + 1, size):
            self.hashes.append(chain_hash(self.parent(len(self.hashes)), token_ids[start : start + size]))

    def share(self, other: "BlockChain", num_tokens: int) -> None:
        """Take over the hashes of the first `num_tokens` tokens of another sequence, which both begin with."""
        num_blocks = num_tokens // self._block_size
        if len(self.hashes) < num_blocks:
            self.hashes = other.hashes[:num_blocks]

    def parent(self, index: int) -> bytes:
        """What block `index` is chained to."""
        return self.hashes[index - 1] if index else self.root


@dataclass
class StepBlocks:
    """Block moves of the step being scheduled; the executor applies them in this order, before it computes."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target), both on the device


@dataclass(frozen=True)
class SwappedTable:
    """A block table that left the device: for each block its chain hash and its host block, where it has them."""

    entries: tuple[tuple[bytes | None, int | None], ...]
    num_computed: int


class BlockManager:
    """Block tables of all sequences over one pool of device blocks and one of host blocks.

    Blocks are counted for all layers at once: block 7 of a table is block 7 of each layer's cache.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, prefix_caching: bool = True):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.prefix = PrefixCache(self.pool, block_size) if prefix_caching else None
        self.step = StepBlocks()
        self._tables: dict[int, list[int]] = {}
        self._host_to_free: list[int] = []

    @property
    def num_free(self) -> int:
        """Device blocks that can be handed out now."""
        return self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def table(self, seq_id: int) -> list[int]:
        """The block table of a sequence, in the order of its tokens."""
        return self._tables[seq_id]

    def has_table(self, seq_id: int) -> bool:
        """Whether the sequence is on the device."""
        return seq_id in self._tables

    # Prefix hits

    def match(self, token_ids: Sequence[int], chain: BlockChain) -> PrefixMatch:
        """The longest cached prefix of a sequence that is about to start."""
        if self.prefix is None:
            return PrefixMatch((), 0, "disabled", 0)
        chain.extend(token_ids)
        return self.prefix.match(token_ids, chain.hashes, chain.root)

    def num_needed_to_start(self, num_tokens: int, match: PrefixMatch) -> int:
        """Free blocks that a sequence of so many tokens takes, the hits it would revive included."""
        revived = sum(1 for block in match.blocks if self.pool.ref_count(block) == 0)
        return self.num_blocks_for(num_tokens) - len(match.blocks) + revived

    def start(self, seq_id: int, match: PrefixMatch) -> None:
        """Open a block table on the blocks of a prefix hit."""
        for block in match.blocks:
            self.pool.retain(block)
        self._tables[seq_id] = list(match.blocks)

    # Growth

    def is_writable(self, seq_id: int, num_computed: int, num_tokens: int) -> bool:
        """Whether the slots of those tokens can be written as they are, so that nothing needs to be allocated."""
        table, size = self._tables[seq_id], self.block_size
        return num_computed + num_tokens <= len(table) * size and self.pool.is_private(table[num_computed // size])

    def num_needed(self, seq_id: int, num_computed: int, num_tokens: int) -> int:
        """Free blocks that computing tokens num_computed to num_computed + num_tokens - 1 takes."""
        grown = self.num_blocks_for(num_computed + num_tokens) - len(self._tables[seq_id])
        return max(grown, 0) + (self._shared_tail(seq_id, num_computed) is not None)

    def allocate(
        self, seq_id: int, num_computed: int, num_tokens: int
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Make those tokens' slots writable: (blocks appended to the table, (index, block) replaced in it).

        A tail block that another table holds, or that is published, is copied first. Ask `num_needed`.
        """
        table = self._tables[seq_id]
        replaced: tuple[tuple[int, int], ...] = ()
        index = self._shared_tail(seq_id, num_computed)
        if index is not None:
            source, target = table[index], self.pool.allocate()
            self.pool.hold_for_copy(source)
            self.pool.release([source])
            self.step.copies.append((source, target))
            table[index] = target
            replaced = ((index, target),)
        num_new = self.num_blocks_for(num_computed + num_tokens) - len(table)
        new = tuple(self.pool.allocate() for _ in range(num_new))
        table.extend(new)
        return new, replaced

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Give a sample the blocks of the first `num_tokens` tokens of another; both write copies later."""
        table = self._tables[parent_id][: self.num_blocks_for(num_tokens)]
        for block in table:
            self.pool.retain(block)
        self._tables[child_id] = table

    def completed_by(
        self, token_ids: Sequence[int], chain: BlockChain, num_computed: int, num_tokens: int
    ) -> list[bytes]:
        """Hashes of the blocks that become full, and will be published, when those tokens are computed."""
        first, last = num_computed // self.block_size, (num_computed + num_tokens) // self.block_size
        if self.prefix is None or first == last:
            return []
        chain.extend(token_ids[: last * self.block_size])
        return chain.hashes[first:last]

    def publish(self, seq_id: int, token_ids: Sequence[int], chain: BlockChain, start: int, end: int) -> None:
        """Make the full blocks among computed tokens start to end - 1 findable. Only after the step succeeded."""
        if self.prefix is None or start // self.block_size == end // self.block_size:
            return
        chain.extend(token_ids[: end - end % self.block_size])
        table = self._tables[seq_id]
        for index in range(start // self.block_size, end // self.block_size):
            first = index * self.block_size
            tokens = token_ids[first : first + self.block_size]
            self.prefix.publish(table[index], chain.hashes[index], chain.parent(index), tokens, first=not index)

    def forget(self, seq_id: int) -> None:
        """No request is to find the blocks of a sequence any more: what they hold cannot be trusted."""
        if self.prefix is not None:
            for block in self._tables.get(seq_id, ()):
                self.prefix.forget(block)

    def free(self, seq_id: int) -> None:
        """Close a block table; published blocks stay findable, the head of the chain longest."""
        self.pool.release(reversed(self._tables.pop(seq_id, [])))

    # Swap

    def swap_out(self, sequences: Iterable[tuple[int, BlockChain, int]]) -> dict[int, SwappedTable] | None:
        """Move the tables of one request, (seq_id, chain, num_computed) each, to host blocks.

        Blocks that another request holds are let go of, since the prefix cache finds them again; every other
        block is copied, once however many samples share it. None if host blocks do not suffice: nothing is
        changed then.
        """
        sequences = list(sequences)
        own: dict[int, int] = {}
        for seq_id, _, num_computed in sequences:
            for block in self._tables[seq_id][: self.num_blocks_for(num_computed)]:
                own[block] = own.get(block, 0) + 1
        leaving = [b for b, count in own.items() if self.pool.ref_count(b) == count or not self.pool.is_published(b)]
        if len(leaving) > self.host_pool.num_free:
            return None
        host = {block: self.host_pool.allocate() for block in leaving}
        self.step.swap_out.extend(host.items())
        holders = dict.fromkeys(host.values(), 0)
        swapped = {}
        for seq_id, chain, num_computed in sequences:
            table = self._tables[seq_id][: self.num_blocks_for(num_computed)]
            # A tail that is not computed to its end comes back as itself only: a full twin could not be written.
            known = chain.hashes[: num_computed // self.block_size]
            hashes = [*known, *[None] * (len(table) - len(known))]
            entries = tuple((hash_, host.get(block)) for hash_, block in zip(hashes, table, strict=True))
            for block in table:
                if block in host:
                    holders[host[block]] += 1
            swapped[seq_id] = SwappedTable(entries, num_computed)
        for host_block, count in holders.items():
            for _ in range(count - 1):
                self.host_pool.retain(host_block)
        for seq_id, _, _ in sequences:
            self.free(seq_id)
        return swapped

    def num_needed_to_swap_in(self, tables: Iterable[SwappedTable]) -> int:
        """Free device blocks that bringing these tables of one request back takes, at most."""
        needed: set[object] = set()
        for table in tables:
            for index, (hash_, host_block) in enumerate(table.entries):
                hit = self._hit(hash_)
                if hit is not None and self.pool.ref_count(hit):
                    continue
                needed.add(host_block if host_block is not None else (id(table), index))
        return len(needed)

    def swap_in(self, tables: dict[int, SwappedTable]) -> dict[int, int]:
        """Bring tables of one request back: device hits first, then host blocks, up to the first gap.

        Returns seq_id to the number of tokens that are in the cache again; what lies past a gap is computed.
        """
        arrived: dict[int, int] = {}  # host block -> device block
        num_computed = {}
        for seq_id, swapped in tables.items():
            table: list[int] = []
            for hash_, host_block in swapped.entries:
                block = self._hit(hash_) if host_block not in arrived else arrived[host_block]
                if block is not None:
                    self.pool.retain(block)
                elif host_block is not None:
                    block = self.pool.allocate()
                    self.step.swap_in.append((host_block, block))
                else:
                    break
                if host_block is not None:
                    arrived[host_block] = block  # samples go on sharing what they shared
                table.append(block)
            self._tables[seq_id] = table
            num_computed[seq_id] = min(swapped.num_computed, len(table) * self.block_size)
        for swapped in tables.values():
            self._host_to_free.extend(block for _, block in swapped.entries if block is not None)
        return num_computed

    def drop_swapped(self, table: SwappedTable) -> None:
        """Give up a table on the host: its request ended, or its copy cannot be trusted."""
        self._host_to_free.extend(block for _, block in table.entries if block is not None)

    # Steps

    def take_step(self) -> StepBlocks:
        """The moves scheduled since the last call, for the executor."""
        step, self.step = self.step, StepBlocks()
        return step

    def end_step(self) -> None:
        """The executor is done with the step: what its moves read may be reused."""
        self.pool.end_step()
        self.host_pool.release(self._host_to_free)
        self._host_to_free.clear()

    def check(self) -> None:
        """Assert that reference counts equal the tables (for tests)."""
        self.pool.check()
        self.host_pool.check()
        counts: dict[int, int] = {}
        for table in self._tables.values():
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            held = self.pool.ref_count(block)
            assert held == counts.get(block, 0), f"block {block}: {held} references, {counts.get(block, 0)} tables"

    def _shared_tail(self, seq_id: int, num_computed: int) -> int | None:
        """Index of the block that the next token goes to, if it exists and must not be written in place."""
        index = num_computed // self.block_size
        table = self._tables[seq_id]
        if index >= len(table):
            return None
        block = table[index]
        return None if self.pool.is_private(block) else index

    def _hit(self, hash_: bytes | None) -> int | None:
        return None if hash_ is None or self.prefix is None else self.prefix.find(hash_)
