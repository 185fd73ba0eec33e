"""The native sampler in each instruction set: core's tokens, or undecided."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.contract import Sample
from octavo.contract.reference import sample as reference
from octavo.executor.philox import uniforms
from octavo.executor.sampler import Draw, Sampler
from octavo.sampling_params import SamplingParams
from octavo_cpu.native import NativeLibrary
from octavo_cpu.ops import native_ops

Floats = npt.NDArray[np.float32]

VOCAB = 4099
FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.2, "top_p": 0.3},
    {"top_k": 1},
    {"temperature": 1.7, "top_k": 50},
    {"top_k": VOCAB + 1},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_p": 0.5, "min_p": 0.02},
    {"temperature": 3.0, "top_k": 60, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1e-6, "top_p": 0.9},
)


def head_and_tail(random: np.random.Generator, num: int) -> Floats:
    """A few likely tokens and a long tail, as language models have them."""
    ranks = random.random((num, VOCAB)).argsort(1)
    return (4 - 2 * np.log1p(ranks / 3) + 0.7 * random.standard_normal((num, VOCAB))).astype(np.float32)


def masked(random: np.random.Generator, num: int) -> Floats:
    rows = head_and_tail(random, num)
    rows[random.random(rows.shape) < 0.7] = -np.inf
    rows[0] = -np.inf
    rows[0, VOCAB - 1] = -3
    return rows


ROWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "head-and-tail": head_and_tail,
    "random": lambda random, num: random.standard_normal((num, VOCAB)).astype(np.float32),
    "spiky": lambda random, num: head_and_tail(random, num) * 12,
    "tied": lambda random, num: np.round(head_and_tail(random, num) * 2) / 2,
    "masked": masked,
    "flat": lambda random, num: np.full((num, VOCAB), 7, np.float32),
}
FEW = {"head-and-tail", "spiky", "tied", "masked"}  # rows whose tokens rounding hardly ever decides


def args_of(logits: Floats, params: list[SamplingParams], rows: list[int] | None = None) -> Sample:
    """What core's sampler asks for output position 3 of each."""
    num = len(params)
    seeds = np.asarray([p.seed for p in params], np.uint64)
    numbers = uniforms(seeds, np.full(num, 3, np.uint64), np.zeros(num, np.uint64))
    reals = np.asarray([[p.temperature, p.top_p, p.min_p] for p in params]).T.copy()
    temperature, top_p, min_p = torch.from_numpy(reals)
    return Sample(
        torch.from_numpy(logits),
        torch.tensor(range(num) if rows is None else rows),
        temperature,
        torch.tensor([p.top_k for p in params]),
        top_p,
        min_p,
        torch.from_numpy(numbers),
    )


def native(library: NativeLibrary) -> Callable[[Sample], torch.Tensor]:
    (impl,) = (impl for impl in native_ops(library) if impl.op == "sample")
    return impl.fn


def params_of(num: int, **fields: float) -> list[SamplingParams]:
    return [SamplingParams(seed=seed, **fields) for seed in range(num)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ROWS)
def test_tokens_are_cores(kind: str, isa_library: NativeLibrary) -> None:
    logits = ROWS[kind](np.random.default_rng(1), 24)
    for fields in FILTERS:
        params = params_of(24, **fields)
        expected = Sampler(VOCAB).sample([Draw(row, p, 0, 3) for row, p in zip(logits, params, strict=True)])
        found = native(isa_library)(args_of(logits, params)).tolist()
        decided = [(mine, core) for mine, core in zip(found, expected, strict=True) if mine >= 0]
        assert all(mine == core for mine, core in decided), fields
        assert len(decided) >= (23 if kind in FEW else 4), fields


@pytest.mark.parametrize("kind", ROWS)
def test_tokens_are_those_of_the_plain_definition(kind: str, isa_library: NativeLibrary) -> None:
    logits = ROWS[kind](np.random.default_rng(2), 6)
    for fields in FILTERS:
        args = args_of(logits, params_of(6, **fields))
        found = native(isa_library)(args)
        assert torch.equal(found.where(found >= 0, reference(args)), reference(args)), fields


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 1000])
def test_rows_of_every_length_amid_garbage(size: int, isa_library: NativeLibrary) -> None:
    wide = np.full((5, size + 20), np.nan, np.float32)
    logits = wide[:, 7 : 7 + size]
    logits[:] = np.random.default_rng(size).standard_normal((5, size)) * 4
    for fields in FILTERS:
        rows = [4, 0, 0, 2, 1, 3]
        args = args_of(logits, params_of(6, **fields), rows)
        found = native(isa_library)(args)
        assert torch.equal(found.where(found >= 0, reference(args)), reference(args)), fields
        assert int((found < 0).sum()) <= 1


def test_rows_without_numbers_are_left_undecided(isa_library: NativeLibrary) -> None:
    logits = np.random.default_rng(3).standard_normal((6, VOCAB)).astype(np.float32)
    logits[0, 0] = logits[1, VOCAB - 1] = logits[2, 70] = np.nan
    logits[3, 5] = np.inf
    logits[4] = -np.inf
    for fields in FILTERS:
        found = native(isa_library)(args_of(logits * 9, params_of(6, **fields))).tolist()
        assert found[:5] == [-1] * 5, fields


def test_draws_near_a_border_are_left_undecided(isa_library: NativeLibrary) -> None:
    """Between two tokens of one half each the border is exact, and a hair on either side of it is too near to call."""
    num = 5
    args = args_of(np.zeros((num, 2), np.float32), params_of(num, top_p=0.999))
    near = torch.tensor([0.5, 0.5 + 1e-8, 0.5 - 1e-8, 0.4, 0.6], dtype=torch.float64)
    found = native(isa_library)(Sample(*(getattr(args, name) for name in Sample.__struct_fields__[:-1]), near))
    assert found.tolist() == [-1, -1, -1, 0, 1]


def test_company_and_threads_change_nothing(isa_library: NativeLibrary) -> None:
    logits = head_and_tail(np.random.default_rng(4), 16)
    args = args_of(logits, params_of(16, temperature=0.8, top_p=0.95))
    sample = native(isa_library)
    together = sample(args)
    for num_threads in (1, 2, 5, 2):
        isa_library.set_num_threads(num_threads)
        assert torch.equal(sample(args), together)
    for i in range(16):
        alone = Sample(args.logits, *(getattr(args, name)[i : i + 1] for name in Sample.__struct_fields__[1:]))
        assert torch.equal(sample(alone), together[i : i + 1])


def test_rows_that_are_not_there_are_refused(library: NativeLibrary) -> None:
    args = args_of(np.zeros((2, 3), np.float32), params_of(1), [2])
    with pytest.raises(ValueError, match="sampling from 1 rows of 3 logits: a size, slot, block or position"):
        native(library)(args)
