"""What the requested rows of a step yield: logits, ids, scores, without ever holding logits of all tokens.

S requested entries, U distinct tokens among them, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract.program import RowMode, Rows, StepOutput

__all__ = ["RowOutputs", "best", "num_chunk_rows", "row_outputs"]

CHUNK_ELEMENTS = 1 << 22  # logits held at a time beside those that were asked for: 16 MiB


@dataclass
class RowOutputs:
    """The outputs of a step on its device, in the order of the entries of their mode. `fetch` waits for them.

    Where there are several, they are views of `packed` [bytes] uint8, so that one copy brings them all.
    """

    logits: torch.Tensor | None = None
    greedy_ids: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    target_logprobs: torch.Tensor | None = None
    target_ranks: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    packed: torch.Tensor | None = None

    def fetch(self) -> StepOutput:
        """Everything in host memory, by one copy: each one makes the host wait for the device."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "packed"}
        found = {name: value for name, value in named.items() if value is not None}
        if self.packed is None:
            host = {name: value.cpu() for name, value in found.items()}
        else:
            packed = self.packed.cpu()
            host = {
                name: packed.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
                for name, value in found.items()
            }
        return StepOutput(**{k: v if k in ("logits", "hidden") else v.numpy() for k, v in host.items()})


def num_chunk_rows(vocab_size: int) -> int:
    """How many rows' logits are made at a time."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def row_outputs(
    hidden: torch.Tensor,
    inverse: npt.NDArray[np.int64],
    rows: Rows,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> RowOutputs:
    """The outputs of a step.

    Args:
        hidden: [U, H] normed hidden states of the distinct tokens.
        inverse: [S], which of them each entry means.
        rows: the entries.
        head: from [n, H] to logits [n, V] float32.
        vocab_size: V.

    """
    device = hidden.device
    entries = {mode: rows.of(mode) for mode in RowMode}
    at = {mode: inverse[found] for mode, found in entries.items()}
    headed = np.unique(np.concatenate([found for mode, found in at.items() if mode != RowMode.HIDDEN]))
    chunk = num_chunk_rows(vocab_size)
    only_logits = not any(len(at[mode]) for mode in RowMode if mode is not RowMode.LOGITS)
    if only_logits and np.array_equal(at[RowMode.LOGITS], np.arange(len(hidden))):
        return RowOutputs(logits=head(hidden) if len(hidden) else None)
    out = _allocate({mode: len(found) for mode, found in entries.items()}, rows.k, vocab_size, hidden)
    if out.hidden is not None:
        out.hidden.copy_(hidden[torch.from_numpy(at[RowMode.HIDDEN]).to(device)])
    for start in range(0, len(headed), chunk):
        distinct = headed[start : start + chunk]
        logits = head(hidden[torch.from_numpy(distinct).to(device)])
        _fill(out, logits, distinct, at, entries, rows)
    return out


def _allocate(counts: dict[RowMode, int], k: int, vocab_size: int, hidden: torch.Tensor) -> RowOutputs:
    """Outputs to be filled, in one piece of memory. Those of 8 bytes come first, so that all lie aligned."""
    shapes = {
        "greedy_ids": (torch.int64, RowMode.GREEDY, ()),
        "topk_ids": (torch.int64, RowMode.TOPK, (k,)),
        "target_ranks": (torch.int64, RowMode.SCORE, ()),
        "topk_logprobs": (torch.float32, RowMode.TOPK, (k,)),
        "target_logprobs": (torch.float32, RowMode.SCORE, ()),
        "hidden": (torch.float32, RowMode.HIDDEN, (hidden.shape[-1],)),
        "logits": (torch.float32, RowMode.LOGITS, (vocab_size,)),
    }
    wanted = [(name, dtype, (counts[mode], *row)) for name, (dtype, mode, row) in shapes.items() if counts[mode]]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in wanted]
    packed = torch.empty(-(-sum(sizes) // 8) * 8, dtype=torch.uint8, device=hidden.device)
    parts = torch.split(packed[: sum(sizes)], sizes)
    views = {name: part.view(dtype).view(shape) for (name, dtype, shape), part in zip(wanted, parts, strict=True)}
    return RowOutputs(**views, packed=packed)


def _fill(
    out: RowOutputs,
    logits: torch.Tensor,
    distinct: npt.NDArray[np.int64],
    at: dict[RowMode, npt.NDArray[np.int64]],
    entries: dict[RowMode, npt.NDArray[np.int64]],
    rows: Rows,
) -> None:
    """The share of one chunk's tokens in each output."""
    device = logits.device

    def mine(mode: RowMode) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which entries of a mode are of this chunk, and the chunk's row of each."""
        where = np.flatnonzero((at[mode] >= distinct[0]) & (at[mode] <= distinct[-1]))
        if not len(where):
            return None
        row = np.searchsorted(distinct, at[mode][where])
        return torch.from_numpy(where).to(device), torch.from_numpy(row).to(device)

    if out.logits is not None and (found := mine(RowMode.LOGITS)):
        out.logits[found[0]] = logits[found[1]]
    if out.greedy_ids is not None and (found := mine(RowMode.GREEDY)):
        best_id = logits.argmax(-1)  # documented: the first of equals; a NaN is above all
        is_nan = logits.gather(-1, best_id[:, None])[:, 0].isnan()
        out.greedy_ids[found[0]] = best_id.masked_fill(is_nan, -1)[found[1]]
    if out.topk_ids is None and out.target_ranks is None:
        return
    total = logits.logsumexp(-1, keepdim=True)
    if out.topk_ids is not None and out.topk_logprobs is not None and (found := mine(RowMode.TOPK)):
        chosen = logits[found[1]]
        ids = best(chosen, rows.k)
        out.topk_ids[found[0]] = ids
        out.topk_logprobs[found[0]] = chosen.gather(-1, ids) - total[found[1]]
    if out.target_ranks is not None and out.target_logprobs is not None and (found := mine(RowMode.SCORE)):
        scored = logits[found[1]]
        targets = rows.target if len(rows.target) == len(rows.mode) else np.zeros(len(rows.mode), np.int64)
        target = torch.from_numpy(targets[entries[RowMode.SCORE]]).to(device)[found[0]][:, None]
        value = scored.gather(-1, target)
        lower_id = torch.arange(scored.shape[-1], device=device) < target
        before = (scored > value) | ((scored == value) & lower_id)
        out.target_ranks[found[0]] = before.sum(-1) + 1
        out.target_logprobs[found[0]] = (value - total[found[1]])[:, 0]


def best(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest of each row of logits [n, V] float32, best first, the lower id of equals first.

    torch.topk leaves the order of equals open. So it is given keys without equals: the float's bits, made to order
    as integers do, above the id.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes the negative zero equal to zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - ids)
    return keys.topk(k, -1).indices
