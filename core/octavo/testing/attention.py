"""An attention backend held against dense attention, and against what it says of itself.

Every check raises CheckError with what is wrong.
"""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.contract import AttentionBackend, AttentionSpec, KVCache
from octavo.testing.cases_attention import LENGTHS, MIXED, WHOLE, Sequences, make_batch, tolerance, truth
from octavo.testing.outcome import CheckError, require

__all__ = [
    "HOST",
    "check_bytes",
    "check_copies",
    "check_empty",
    "check_rows_alone",
    "check_slot_minus_one",
    "check_spec",
    "check_swaps",
    "check_truth",
    "run",
]

HOST = torch.device(torch.empty(0).device)


def check_spec(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """Whole prompts and odd chunks, fused and not, equal dense attention; rows do as claimed."""
    check_truth(*run(backend, spec, LENGTHS, WHOLE, device=device))
    check_truth(*run(backend, spec, LENGTHS, MIXED, fused=True, device=device))
    if backend.row_invariant:
        check_rows_alone(backend, spec, device)


def run(
    backend: AttentionBackend,
    spec: AttentionSpec,
    lengths: Sequence[int],
    steps: Sequence[Sequence[tuple[int, int]]],
    *,
    fused: bool = False,
    device: torch.device = HOST,
) -> tuple[Sequences, list[torch.Tensor]]:
    """The outputs of each row, joined over the steps."""
    sequences = Sequences(spec, lengths, device=device)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    try:
        cache = sequences.poisoned(backend)
        for chunks in steps:
            for (row, _), out in zip(chunks, sequences.step(backend, cache, chunks, fused=fused), strict=True):
                outputs[row].append(out)
    except CheckError:
        raise
    except Exception as error:
        raise CheckError(f"{backend.name} says yes to {spec} and raises {type(error).__name__}: {error}") from error
    return sequences, [torch.cat(parts) for parts in outputs]


def check_truth(sequences: Sequences, outputs: Sequence[torch.Tensor]) -> None:
    """Each row equals dense attention in float64."""
    for row, out in enumerate(outputs):
        _check_row(sequences, row, out, truth(sequences, row))


def _check_row(sequences: Sequences, row: int, out: torch.Tensor, expected: torch.Tensor) -> None:
    require(out.shape == expected.shape, f"the output is {tuple(out.shape)}, {tuple(expected.shape)} is right")
    if not len(out):
        return
    worst = float((out.double() - expected).abs().max() / expected.abs().max())
    allowed = tolerance(sequences.spec)
    require(worst <= allowed, f"row {row} is off by {worst:.2e} of the largest value, {allowed:.1e} is allowed")


def check_rows_alone(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """A token's bits are the same whole, in chunks, token by token, in company and alone."""
    _, whole = run(backend, spec, LENGTHS, WHOLE, device=device)
    one_by_one = [[(i, 1)] for i, length in enumerate(LENGTHS) for _ in range(length)]
    for how, steps, fused in (
        ("in chunks", MIXED, True),
        ("in another order", [WHOLE[0][::-1]], False),
        ("token by token", one_by_one, False),
    ):
        sequences, others = run(backend, spec, LENGTHS, steps, fused=fused, device=device)
        check_truth(sequences, others)
        for row, (a, b) in enumerate(zip(whole, others, strict=True)):
            said = f"{backend.name} claims that a row's bits are its own, and row {row} has others {how} than whole"
            require(torch.equal(a, b), said)


def check_empty(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """A step of no rows, and one of a row without tokens."""
    sequences = Sequences(spec, [3], device=device)
    cache = sequences.poisoned(backend)
    require(sequences.step(backend, cache, []) == [], "an empty step has outputs")
    (none,) = sequences.step(backend, cache, [(0, 0)])
    require(none.shape == (0, spec.num_heads, spec.value_size), f"a row without tokens gives {tuple(none.shape)}")


def check_slot_minus_one(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """Tokens at slot -1 are written nowhere; those beside them are."""
    sequences = Sequences(spec, [11], device=device)
    cache = sequences.poisoned(backend)
    sequences.step(backend, cache, [(0, 10)])
    row = sequences.rows[0]
    slot = int(row.blocks[10 // spec.block_size]) * spec.block_size + 10 % spec.block_size
    key = torch.full((3, *row.key.shape[1:]), float("nan"), dtype=spec.dtype)
    value = torch.full((3, *row.value.shape[1:]), float("nan"), dtype=spec.dtype)
    key[1], value[1] = row.key[10], row.value[10]
    table = row.blocks[None]
    batch = make_batch([0, 3], [11], table, np.array([-1, slot, -1]), device)
    backend.write(backend.plan(cache, batch), 0, key.to(device), value.to(device))
    _attend_last(backend, sequences, cache, table)


def check_copies(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """`copy_blocks` moves whole blocks and touches no other."""
    sequences = Sequences(spec, [2 * spec.block_size + 1], device=device)
    cache = sequences.poisoned(backend)
    sequences.step(backend, cache, [(0, 2 * spec.block_size + 1)])
    old, new = sequences.rows[0].blocks.copy(), sequences.free_blocks[:2]
    backend.copy_blocks(cache, [])
    backend.copy_blocks(cache, [(int(old[1]), int(new[0])), (int(old[2]), int(new[1]))])
    for table in ([old[0], old[1], old[2]], [old[0], new[0], new[1]]):
        _attend_last(backend, sequences, cache, np.array([table]))


def check_swaps(backend: AttentionBackend, spec: AttentionSpec, device: torch.device = HOST) -> None:
    """`swap_blocks` takes whole blocks to the host and back, also to other places."""
    length = 2 * spec.block_size + 1
    sequences = Sequences(spec, [length], device=device)
    cache, host = sequences.poisoned(backend), backend.allocate_host(spec, 5)
    sequences.step(backend, cache, [(0, length)])
    blocks = [int(block) for block in sequences.rows[0].blocks]
    backend.swap_blocks(cache, host, [])
    backend.swap_blocks(cache, host, list(zip(blocks, (4, 0, 2), strict=True)))
    other = sequences.poisoned(backend)
    places = [int(block) for block in sequences.free_blocks[:3]]
    backend.swap_blocks(host, other, list(zip((4, 0, 2), places, strict=True)))
    _attend_last(backend, sequences, other, np.array([places]))
    _attend_last(backend, sequences, cache, np.array([blocks]))


def check_bytes(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """`block_bytes` says what a block takes."""
    said, cache = backend.block_bytes(spec), backend.allocate(spec, 4)
    require(type(said) is int and said > 0, f"block_bytes says {said!r}")
    held = sum(tensor.nbytes for tensor in cache.tensors)
    require(not held or held == 4 * said, f"block_bytes says {said}, and 4 blocks take {held} bytes")


def _attend_last(backend: AttentionBackend, sequences: Sequences, cache: KVCache, table: np.ndarray) -> None:
    """The only row's last token attends, writing nothing, through a table of its own."""
    row, spec, device = sequences.rows[0], sequences.spec, sequences.device
    length = len(row.query)
    batch = make_batch([0, 1], [length], table, np.array([-1]), device)
    out = torch.full((1, spec.num_heads, spec.value_size), float("nan"), dtype=spec.dtype).to(device)
    sinks = None if sequences.sinks is None else sequences.sinks.to(device)
    backend.attend(backend.plan(cache, batch), 0, row.query[-1:].to(device), out, sinks)
    _check_row(sequences, 0, out.cpu(), truth(sequences, 0)[-1:])
