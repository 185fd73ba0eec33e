"""The prefix cache: from a chain of token blocks to the physical block that holds their keys and values."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from octavo.cache.pool import BlockPool

__all__ = ["MissReason", "PrefixCache", "PrefixMatch", "chain_hash", "root_hash"]

MAX_SIBLINGS = 64  # newest blocks compared to explain a miss: an explanation must not cost more than the lookup

MissReason = Literal["none", "short", "differs", "evicted", "salted", "disabled"]


def root_hash(salt: bytes = b"") -> bytes:
    """The parent of a first block. Requests with different salts (adapters, tenants) never share blocks."""
    return hashlib.blake2b(salt, digest_size=16, person=b"octavo-root").digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: a function of every token up to its end."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class PrefixMatch:
    """What a lookup found, and why not more.

    Attributes:
        blocks: the physical blocks of the longest cached prefix, in order.
        num_tokens: how many tokens they hold.
        reason: why the match ended. "none": nothing more to look up; "short": less than a block remains (the
            last token is always computed); "differs": a cached block follows here, but with other tokens;
            "evicted": it was cached once; "salted": it is cached under another salt; "disabled".
        position: for "differs" the first differing token's position; else where the match ended.

    """

    blocks: tuple[int, ...]
    num_tokens: int
    reason: MissReason
    position: int


class PrefixCache:
    """Published blocks by the hash of their chain.

    It never holds references: a published block whose last table lets go stays findable until the pool
    needs it (least recently freed first).
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, tuple[bytes, bytes]] = {}  # block -> (hash, parent)
        self._children: dict[bytes, dict[bytes, tuple[int, ...]]] = {}  # parent -> hash -> token ids
        self._roots: dict[bytes, int] = {}  # parents of first blocks, with their number of children
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._max_evicted = 4 * pool.num_blocks
        pool.when_evicted(self._evict)

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, hash_: bytes) -> int | None:
        """The block of a chain hash, if it is still there."""
        return self._blocks.get(hash_)

    def match(self, token_ids: Sequence[int], hashes: Sequence[bytes], root: bytes) -> PrefixMatch:
        """The longest cached prefix of a sequence, short of its last token.

        `hashes` names the sequence's full blocks; at most (len - 1) // block_size of them are looked at, so
        that a shared block is never written and one row is left to compute.
        """
        usable = (len(token_ids) - 1) // self._block_size
        blocks: list[int] = []
        for hash_ in hashes[:usable]:
            block = self._blocks.get(hash_)
            if block is None:
                break
            blocks.append(block)
        end = len(blocks) * self._block_size
        if len(blocks) == usable:
            reason: MissReason = "none" if end == len(token_ids) - 1 else "short"
            return PrefixMatch(tuple(blocks), end, reason, end)
        parent = hashes[len(blocks) - 1] if blocks else root
        reason, position = self._why(token_ids, end, parent, hashes[len(blocks)], first=not blocks)
        return PrefixMatch(tuple(blocks), end, reason, position)

    def publish(self, block: int, hash_: bytes, parent: bytes, token_ids: Sequence[int], first: bool) -> None:
        """Make a full, computed block findable. A chain that is already published keeps its first block."""
        if hash_ in self._blocks or block in self._keys:
            return
        self._blocks[hash_] = block
        self._keys[block] = (hash_, parent)
        self._children.setdefault(parent, {})[hash_] = tuple(token_ids)
        if first:
            self._roots[parent] = self._roots.get(parent, 0) + 1
        self._evicted.pop(hash_, None)
        self._pool.publish(block)

    def forget(self, block: int) -> None:
        """Make a held block unfindable; whoever holds it keeps it. Does nothing where it was never published."""
        if block in self._keys:
            self._pool.unpublish(block)
            self._evict(block)

    def clear(self) -> None:
        """Forget everything; blocks in use stay with their sequences."""
        self._pool.unpublish_all()
        for table in (self._blocks, self._keys, self._children, self._roots, self._evicted):
            table.clear()

    def _why(
        self, token_ids: Sequence[int], end: int, parent: bytes, wanted: bytes, first: bool
    ) -> tuple[MissReason, int]:
        if wanted in self._evicted:
            return "evicted", end
        tokens = token_ids[end : end + self._block_size]
        if first and any(chain_hash(root, tokens) in self._blocks for root in self._roots if root != parent):
            return "salted", end
        siblings = islice(reversed(self._children.get(parent, {}).values()), MAX_SIBLINGS)
        common = max((_num_common(tokens, other) for other in siblings), default=0)
        return "differs", end + common

    def _evict(self, block: int) -> None:
        hash_, parent = self._keys.pop(block)
        del self._blocks[hash_]
        siblings = self._children[parent]
        del siblings[hash_]
        if not siblings:
            del self._children[parent]
        if parent in self._roots:
            self._roots[parent] -= 1
            if not self._roots[parent]:
                del self._roots[parent]
        self._evicted[hash_] = None
        if len(self._evicted) > self._max_evicted:
            self._evicted.popitem(last=False)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
