"""Block-quantised matrices: what their numbers mean, and rows taken, joined and widened without loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.contract import GROUP_SIZE, QuantizedWeight


def draw(num_rows: int, num_columns: int, bits: int, mins: bool = False, seed: int = 0) -> QuantizedWeight:
    """Random codes and scales, those of the last, part group as they must be."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-num_columns // GROUP_SIZE)
    codes = torch.randint(1 << bits, (num_rows, num_groups * GROUP_SIZE), generator=generator, dtype=torch.uint8)
    codes[:, num_columns:] = 0 if mins else 1 << (bits - 1)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    scales = torch.randn(num_rows, num_groups, generator=generator).half()
    lowest = torch.randn(num_rows, num_groups, generator=generator).half() if mins else None
    return QuantizedWeight((num_rows, num_columns), bits, packed, scales, lowest)


def formula(weight: QuantizedWeight) -> torch.Tensor:
    """Number by number, as the class's docstring has it."""
    num_rows, num_columns = weight.shape
    found = torch.empty(num_rows, num_columns)
    for n in range(num_rows):
        for k in range(num_columns):
            byte = int(weight.codes[n, k if weight.bits == 8 else k // 2])
            code = byte if weight.bits == 8 else (byte >> 4 if k % 2 else byte & 15)
            scale = weight.scales[n, k // 32].float()
            if weight.mins is None:
                found[n, k] = scale * (code - (128 if weight.bits == 8 else 8))
            else:
                found[n, k] = scale * code + weight.mins[n, k // 32].float()
    return found


KINDS = ((8, False), (4, False), (4, True))
kinds = pytest.mark.parametrize(("bits", "mins"), KINDS)


@kinds
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (5, 99), (2, 64)])
def test_each_number_is_what_the_docstring_says(shape: tuple[int, int], bits: int, mins: bool) -> None:
    weight = draw(*shape, bits, mins)
    assert torch.equal(weight.dequantize(), formula(weight))
    assert weight.format == f"int{bits}"
    assert weight.num_bytes == sum(t.nbytes for t in weight.tensors)
    assert weight.to(torch.device("cpu")) is weight


@kinds
def test_a_large_matrix_is_dequantised_in_pieces(bits: int, mins: bool) -> None:
    weight = draw(300, 2000, bits, mins)
    part = weight[torch.tensor([0, 130, 131, 299])]
    assert torch.equal(weight.dequantize()[[0, 130, 131, 299]], part.dequantize())
    assert torch.equal(part.dequantize(), formula(part))


@kinds
def test_rows_are_taken_and_joined(bits: int, mins: bool) -> None:
    weight = draw(7, 70, bits, mins)
    whole = weight.dequantize()
    order = torch.tensor([6, 0, 3, 3])
    assert torch.equal(weight[order].dequantize(), whole[order])
    assert weight[2:5].shape == (3, 70)
    joined = QuantizedWeight.concatenate([weight[order], weight[1:1], weight[5:]])
    assert torch.equal(joined.dequantize(), torch.cat((whole[order], whole[5:])))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((4, False), (4, True), ("int4", True)), ((4, False), (8, False), ("int8", False))],
)
def test_forms_that_differ_are_joined_in_one_that_has_room(first: Any, second: Any, expected: Any) -> None:
    one, other = draw(3, 64, *first, seed=1), draw(2, 64, *second, seed=2)
    joined = QuantizedWeight.concatenate([one, other])
    assert (joined.format, joined.mins is not None) == expected
    assert torch.equal(joined.dequantize(), torch.cat((one.dequantize(), other.dequantize())))


def test_forms_that_no_form_has_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="no room for mins"):
        QuantizedWeight.concatenate([draw(2, 32, 8), draw(2, 32, 4, True)])
    large = replace(draw(2, 32, 4), scales=torch.full((2, 1), 60000.0).half())
    with pytest.raises(ValueError, match="too large for its min"):
        QuantizedWeight.concatenate([large, draw(2, 32, 4, True)])
    with pytest.raises(ValueError, match="no K in common"):
        QuantizedWeight.concatenate([draw(2, 32, 8), draw(2, 64, 8)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 3}, "codes of 3 bits; 8 or 4 are right"),
        ({"bits": 4}, r"codes must have shape \[2, 32\], got \[2, 64\]"),
        ({"codes": torch.zeros(2, 64, dtype=torch.int8)}, "codes must be a tensor of torch.uint8, got torch.int8"),
        ({"codes": torch.zeros(64, 2, dtype=torch.uint8).t()}, "codes must be contiguous"),
        ({"scales": torch.zeros(2, 1).half()}, r"scales must have shape \[2, 2\], got \[2, 1\]"),
        ({"scales": None}, "scales must be a tensor of torch.float16, got NoneType"),
        ({"mins": torch.zeros(2, 2).half()}, "mins beside codes of 8 bits"),
    ],
)
def test_a_field_of_another_kind_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        replace(draw(2, 50, 8), **change)
