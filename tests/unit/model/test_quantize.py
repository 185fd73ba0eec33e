"""Quantising a float matrix: errors as small as the format allows, and no number that spoils its group."""

import pytest
import torch

from octavo.contract import GROUP_SIZE, QuantizedWeight
from octavo.model import quantize as module
from octavo.model.quantize import quantize

FORMATS = ("int8", "int4")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(weight: torch.Tensor, weight_format: str) -> float:
    """Root mean square, over that of the weight."""
    off = quantize(weight, weight_format).dequantize() - weight.float()
    return float(off.norm() / weight.float().norm())


def by_range(groups: torch.Tensor) -> torch.Tensor:
    """4 bits without any search: from the least number of a group to the greatest."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    return ((groups - low) / step).round() * step + low


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_format(dtype: torch.dtype) -> None:
    weight = normal(64, 576).to(dtype)
    assert error(weight, "int8") < 0.006
    plain = by_range(weight.float().view(-1, GROUP_SIZE)).view_as(weight)
    assert error(weight, "int4") < 0.98 * float((plain - weight).norm() / weight.float().norm()) < 0.09


def test_8_bits_are_off_by_half_a_step() -> None:
    weight = normal(33, 640)
    steps = weight.view(33, -1, GROUP_SIZE).abs().amax(-1) / 127
    off = (quantize(weight, "int8").dequantize() - weight).view(33, -1, GROUP_SIZE).abs()
    # Half a step, and what the scale lost on its way to float16.
    assert bool((off <= steps[..., None] * (0.5 + 127 * 2**-11 + 1e-3)).all())


def test_what_lies_on_a_grid_comes_back() -> None:
    """A checkpoint that once was Q4_1, as many are, loses next to nothing."""
    codes = torch.randint(16, (40, 20, GROUP_SIZE), generator=torch.Generator().manual_seed(1)).float()
    codes[..., :2] = torch.tensor([0.0, 15.0])
    scales, mins = normal(40, 20, 1, seed=2).abs() + 0.01, normal(40, 20, 1, seed=3)
    assert error((codes * scales + mins).flatten(1), "int4") < 1e-3


@pytest.mark.parametrize("weight_format", FORMATS)
def test_groups_of_odd_kinds(weight_format: str) -> None:
    rows = {
        "zeros": torch.zeros(GROUP_SIZE),
        "all alike": torch.full((GROUP_SIZE,), -0.375),
        "one alone": torch.nn.functional.one_hot(torch.tensor(5), GROUP_SIZE) * 3.0,
        "far from zero": 100 + torch.arange(GROUP_SIZE) / 100,
        "too large for float16": torch.linspace(-9e6, 9e6, GROUP_SIZE),
        "nearly nothing": torch.linspace(-1e-12, 1e-12, GROUP_SIZE),
    }
    found = quantize(torch.stack(list(rows.values())), weight_format).dequantize()
    assert bool(found.isfinite().all())
    allowed = {"zeros": 0.0, "all alike": 1e-3, "one alone": 1e-3, "far from zero": 0.5, "nearly nothing": 1e-7}
    for (name, row), got in zip(rows.items(), found, strict=True):
        if name in allowed:
            assert float((row - got).abs().max()) <= allowed[name], name


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 99), (3, 33), (0, 64)])
def test_part_groups_are_filled_with_the_code_of_zero(shape: tuple[int, int], weight_format: str) -> None:
    weight = normal(*shape)
    found = quantize(weight, weight_format)
    assert found.shape == shape
    filling = found.unpacked_codes()[:, shape[1] :]
    if found.mins is None:
        assert bool((filling == found.offset).all())
    else:
        assert not filling.any()
    if shape[0]:
        assert float((found.dequantize() - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunks_and_strides_do_not_show(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(50, 160)
    whole = quantize(weight, weight_format)
    monkeypatch.setattr(module, "CHUNK_GROUPS", 15)
    for other in (quantize(weight, weight_format), quantize(weight.t().contiguous().t(), weight_format)):
        for one, two in zip(whole.tensors, other.tensors, strict=True):
            assert torch.equal(one, two)
    assert isinstance(whole, QuantizedWeight)


# ---- columns that count more than others


def weighted_error(weight: torch.Tensor, found: QuantizedWeight, importance: torch.Tensor) -> float:
    return float(((found.dequantize() - weight).square() * importance).sum())


def test_columns_that_count_more_are_rounded_finer() -> None:
    weight, importance = normal(64, 320), normal(320, seed=1).square() * 2500
    importance[[5, 77]] = 1000.0  # a huge activation, as models have in few columns
    plain, fitted = quantize(weight, "int4"), quantize(weight, "int4", importance)
    assert weighted_error(weight, fitted, importance) < 0.2 * weighted_error(weight, plain, importance)
    rest = importance.clone()
    rest[[5, 77]] = 0.0
    assert weighted_error(weight, fitted, rest) < 2 * weighted_error(weight, plain, rest)
    equal = quantize(weight, "int4", torch.full((320,), 3.0))
    ones = torch.ones(320)
    assert weighted_error(weight, equal, ones) <= 1.001 * weighted_error(weight, plain, ones)


@pytest.mark.parametrize("importance", [0.0, 1e-20, 1e20])
def test_any_importance_gives_a_sound_matrix(importance: float) -> None:
    for counts in (torch.full((99,), importance), torch.eye(99)[40] * importance):
        weight = normal(7, 99)
        found = quantize(weight, "int4", counts)
        assert float((found.dequantize() - weight).norm() / weight.norm()) < 0.2
        assert not found.unpacked_codes()[:, 99:].any()


def test_8_bits_have_no_use_for_importance() -> None:
    weight = normal(8, 64)
    assert torch.equal(quantize(weight, "int8", torch.rand(64)).codes, quantize(weight, "int8").codes)


def test_chunks_do_not_show_where_columns_count_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = normal(50, 160), normal(160, seed=1).square()
    whole = quantize(weight, "int4", importance)
    monkeypatch.setattr(module, "CHUNK_GROUPS", 15)
    for one, two in zip(whole.tensors, quantize(weight, "int4", importance).tensors, strict=True):
        assert torch.equal(one, two)
