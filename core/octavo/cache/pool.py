"""Physical KV blocks: ids, reference counts, and who gets reused first."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block ids in O(1) and takes them back.

    A free block that still holds published contents is kept apart: it can be revived by a prefix hit, and is
    evicted, least recently freed first, only when no plain free block is left. A block that is the source of a
    copy in the step being scheduled is not handed out again before `end_step`, whoever lets go of it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._published: set[int] = set()
        self.num_shared = 0  # blocks that more than one table holds
        self._copy_sources: set[int] = set()
        self._on_evict: Callable[[int], None] = lambda block: None

    def when_evicted(self, callback: Callable[[int], None]) -> None:
        """Call `callback(block)` when a published block loses its contents."""
        self._on_evict = callback

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold published contents."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds, or that a copy of this step still reads."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many block tables hold it."""
        return self._ref_counts[block]

    def is_published(self, block: int) -> bool:
        """Whether its contents can be found by the prefix cache, and so must never be written again."""
        return block in self._published

    def is_private(self, block: int) -> bool:
        """Whether a held block may be written: one table holds it, and nobody else can find it."""
        return self._ref_counts[block] == 1 and block not in self._published

    def allocate(self) -> int:
        """A block with one reference and arbitrary contents.

        Raises:
            IndexError: no block is free; ask `num_free` first.

        """
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._published.discard(block)
            self._on_evict(block)
        else:
            raise IndexError("no free block")
        self._ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that is held or evictable."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1
        self.num_shared += self._ref_counts[block] == 2

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. What is released first is evicted first: pass a table from its tail."""
        for block in blocks:
            count = self._ref_counts[block]
            if count <= 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._ref_counts[block] = count - 1
            self.num_shared -= count == 2
            if count == 1 and block not in self._copy_sources:
                self._put_back(block)

    def publish(self, block: int) -> None:
        """Mark a held block as findable: from now on it is read-only."""
        self._published.add(block)

    def unpublish(self, block: int) -> None:
        """A held block cannot be found any more."""
        self._published.discard(block)

    def unpublish_all(self) -> None:
        """Forget all published contents; free blocks become plain ones."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._published.clear()

    def hold_for_copy(self, block: int) -> None:
        """Keep the contents of a block until `end_step`, even if its last reference goes."""
        self._copy_sources.add(block)

    def end_step(self) -> None:
        """The step's copies are done: their sources may be reused."""
        for block in self._copy_sources:
            if self._ref_counts[block] == 0:
                self._put_back(block)
        self._copy_sources.clear()

    def check(self) -> None:
        """Assert that every block is in exactly one state (for tests)."""
        free, evictable = set(self._free), set(self._evictable)
        held = {block for block, count in enumerate(self._ref_counts) if count}
        waiting = {block for block in self._copy_sources if not self._ref_counts[block]}
        assert len(free) == len(self._free), "a block is twice in the free list"
        states = (free, evictable, held, waiting)
        assert sum(map(len, states)) == self.num_blocks == len(set().union(*states)), "a block leaked"
        assert evictable <= self._published, "an evictable block without contents"
        assert not free & self._published, "a published block in the plain free list"
        assert self.num_shared == sum(count > 1 for count in self._ref_counts), "shared blocks are miscounted"

    def _put_back(self, block: int) -> None:
        if block in self._published:
            self._evictable[block] = None
        else:
            self._free.append(block)
