"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011), over many rows at once.

A draw is a pure function of (seed, sample index, output position): no state to save, move or replay, so a
request that is preempted, resumed or batched otherwise goes on with the very numbers it would have had.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["philox4x32", "uniforms"]

UInt64 = npt.NDArray[np.uint64]

ROUNDS = np.arange(10, dtype=np.uint64)
MULTIPLIERS = np.array((0xD2511F53, 0xCD9E8D57), np.uint64)
WEYL = np.array((0x9E3779B9, 0xBB67AE85), np.uint64)  # added to the key after each round
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


def philox4x32(counter: UInt64, key: UInt64) -> UInt64:
    """The generator's block function. 32-bit words are held in uint64, where their products fit.

    Args:
        counter: [n, 4] uint64, each below 2^32.
        key: [n, 2] uint64, each below 2^32.

    Returns:
        [n, 4] uint64, each below 2^32.

    """
    # Words 0 and 2 are multiplied, words 1 and 3 only xored; of both products each round swaps the halves.
    even, odd = counter.T[::2], counter.T[1::2]
    keys = key.T + ROUNDS[:, None, None] * WEYL[:, None] & LOW  # [rounds, 2, n]
    for round_key in keys:
        product = MULTIPLIERS[:, None] * even
        even, odd = (product[::-1] >> WORD) ^ odd ^ round_key, product[::-1] & LOW
    return np.stack((even[0], odd[0], even[1], odd[1]), -1)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], sample_indices: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """[n] float64 in [0, 1), one for each (seed, output position, sample index).

    The key is the seed's low and high word, the counter (position low, position high, sample index, 0). A draw
    is the first 53 bits of the block's first two words over 2^53, every one an exact float64 below 1: with 24
    bits, tokens less likely than one in 16 million could not be drawn from a flat distribution in proportion.
    """
    zero = np.zeros_like(seeds)
    counter = np.stack((positions & LOW, positions >> WORD, sample_indices & LOW, zero), -1)
    key = np.stack((seeds & LOW, seeds >> WORD), -1)
    block = philox4x32(counter, key)
    bits = (block[:, 0] << np.uint64(21)) | (block[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
