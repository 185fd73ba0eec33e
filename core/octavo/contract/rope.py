"""Rotary positions as a table, the same bits for every program."""

import torch

from octavo.contract.reference import by_element
from octavo.contract.spec import Rope

__all__ = ["rope_table"]


def rope_table(rope: Rope, num_positions: int) -> torch.Tensor:
    """[num_positions, rotary_dim] float32: cosines, then sines. Float32 throughout, as the models were trained.

    A position's bits are the same however many positions there are, and whatever the number of threads.
    """
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((by_element(torch.cos, angles), by_element(torch.sin, angles)), -1) * rope.gain
