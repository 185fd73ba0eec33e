"""A trial of one of transformers' models before it serves: two short sequences, side by side and in chunks, give
what transformers gives each alone. That finds whatever mixes the tokens of a step outside of attention, takes
positions from elsewhere than it is told, or keeps a state of its own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, Program, RowMode, Rows, StepBatch
from octavo.errors import UnsupportedError
from octavo.model.hf_attention import IMPLEMENTATION

__all__ = ["Trial"]

LENGTHS = (5, 7)  # tokens of the two sequences
STEPS = (((0, 0, 5), (1, 0, 3)), ((1, 3, 7),))  # (sequence, from, to) of each step
# How far logits may be off, in parts of their norm: what rounding does, and experts that change their minds by it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.15}


class Trial:
    """What transformers makes of the sequences; to be made while the model is still its own."""

    def __init__(self, model: Any, vocab_size: int, device: torch.device) -> None:
        """Run each sequence by itself, with transformers' own attention.

        Raises:
            UnsupportedError: it does not run.

        """
        self._device = device
        self._sequences = [[(3 * i + 7 * n) % vocab_size for i in range(n)] for n in LENGTHS]
        try:
            model.set_attn_implementation("eager")
            with torch.no_grad():
                logits = [model(torch.tensor([ids], device=device), use_cache=False).logits for ids in self._sequences]
            model.set_attn_implementation(IMPLEMENTATION)
        except Exception as error:  # of foreign code
            raise UnsupportedError(
                f"its forward failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from error
        self._expected = [one[0].float().cpu() for one in logits]

    def check(
        self, program: Program, backends: Sequence[AttentionBackend], specs: Sequence[AttentionSpec], dtype: torch.dtype
    ) -> None:
        """Run the sequences through the program, on caches that are given up afterwards.

        Args:
            program: bound to nothing yet that must last.
            backends: of its KV groups.
            specs: of the same.
            dtype: of activations.

        Raises:
            UnsupportedError: other logits come out.

        """
        num_blocks = sum(-(-max(LENGTHS) // spec.block_size) for spec in specs[:1] for _ in LENGTHS)
        program.bind([backend.allocate(spec, num_blocks) for backend, spec in zip(backends, specs, strict=True)])
        found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
        try:
            for step in STEPS:
                logits = self._run(program, step, specs)
                for (sequence, begin, end), rows in zip(step, logits, strict=True):
                    assert len(rows) == end - begin
                    found[sequence].append(rows)
        except Exception as error:  # of foreign code
            raise UnsupportedError(
                f"it does not run with paged attention ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            ) from error
        expected, got = torch.cat(self._expected), torch.cat([torch.cat(rows) for rows in found])
        off = float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)).mean())
        if expected.isfinite().all() and not off < TOLERANCE[dtype]:
            raise UnsupportedError(
                f"beside another sequence its logits are off by {off:.1%} of what they are alone: something else than "
                "attention mixes the tokens of a batch"
            )

    def _run(
        self, program: Program, step: Sequence[tuple[int, int, int]], specs: Sequence[AttentionSpec]
    ) -> Sequence[torch.Tensor]:
        ids = [token for sequence, begin, end in step for token in self._sequences[sequence][begin:end]]
        positions = [position for _, begin, end in step for position in range(begin, end)]
        batch = StepBatch(
            token_ids=torch.tensor(ids, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            attention=[_attention(step, spec.block_size, self._device) for spec in specs],
        )
        rows = Rows(np.arange(len(ids)), np.full(len(ids), RowMode.LOGITS, np.uint8))
        logits = program.submit(batch, rows).result().logits
        assert logits is not None
        return torch.split(logits.cpu().clone(), [end - begin for _, begin, end in step])


def _attention(step: Sequence[tuple[int, int, int]], block_size: int, device: torch.device) -> AttentionBatch:
    """Each sequence has blocks of its own, one after another."""
    per_sequence = -(-max(LENGTHS) // block_size)
    starts = np.cumsum([0, *(end - begin for _, begin, end in step)], dtype=np.int32)
    lengths = np.array([end for _, _, end in step], np.int32)
    tables = np.array([[s * per_sequence + i for i in range(per_sequence)] for s, _, _ in step], np.int32)
    slots = np.concatenate([np.arange(b, e) + s * per_sequence * block_size for s, b, e in step]).astype(np.int64)
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device),
        block_table=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        query_start_loc_host=starts,
        seq_lens_host=lengths,
        block_table_host=tables,
        slot_mapping_host=slots,
    )
