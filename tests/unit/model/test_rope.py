"""Tables of cosines and sines: a position's bits are its own."""

import pytest
import torch
from doubles.platforms import ToyPlatform

from octavo.contract import Rope
from octavo.hardware.resolve import OpResolver
from octavo.model.blocks import Blocks

CPU = torch.device("cpu")
ROPE = Rope(tuple(10000.0 ** -(i / 12) for i in range(12)), gain=1.25)


def turned(num_positions: int, positions: torch.Tensor) -> torch.Tensor:
    """What a fixed query becomes at the positions."""
    blocks = Blocks({}, OpResolver(ToyPlatform()), dtype=torch.float32, device=CPU, max_model_len=num_positions)
    block = blocks.rope(ROPE, 32)
    assert block is not None
    query = torch.linspace(-1, 1, 32).repeat(len(positions), 1, 1)
    return block(query.clone(), query.clone(), positions)[0]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_positions", [38, 64, 1000, 20_001])
def test_angles_do_not_depend_on_how_many_there_are(num_positions: int, num_threads: int) -> None:
    positions = torch.arange(37)
    want = turned(37, positions)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(turned(num_positions, positions), want)
    finally:
        torch.set_num_threads(before)


def test_values_are_those_of_the_formula() -> None:
    positions = torch.tensor([0, 1, 999])
    angles = positions.double()[:, None] * torch.tensor(ROPE.inv_freq, dtype=torch.float64)
    query = torch.linspace(-1, 1, 32, dtype=torch.float64)
    a, b, rest = query[:12], query[12:24], query[24:].float().expand(3, 8)
    cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
    want = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).float()
    found = turned(1000, positions)[:, 0]
    torch.testing.assert_close(found[:, :24], want, atol=1e-4, rtol=0)
    assert torch.equal(found[:, 24:], rest)
