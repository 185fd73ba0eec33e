"""The native sampler in each instruction set: the tokens that the contract defines, all of them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import astuple

from octavo.contract import Sample
from octavo.contract.reference import sample as reference
from octavo.executor.philox import uniforms
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
    {"temperature": 5.0, "top_p": 0.99999},
    {"top_k": 2000, "top_p": 0.99},
    {"min_p": 1e-12, "top_k": 3000},
    {"top_k": VOCAB - 1, "min_p": 1e-4},
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
    "subnormal": lambda random, num: (random.standard_normal((num, VOCAB)) * 1e-40).astype(np.float32),
    "zeros": lambda random, num: np.where(random.random((num, VOCAB)) < 0.5, -0.0, 0.0).astype(np.float32),
    "extremes": lambda random, num: random.choice(np.float32([-3e38, 0, 3e38]), (num, VOCAB)),
}


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
def test_tokens_are_those_of_the_truth(kind: str, isa_library: NativeLibrary) -> None:
    logits = ROWS[kind](np.random.default_rng(1), 12)
    for fields in FILTERS:
        args = args_of(logits, params_of(12, **fields))
        assert native(isa_library)(args).tolist() == reference(args).tolist(), fields


def test_a_whole_vocabulary_gives_the_truths_tokens(isa_library: NativeLibrary) -> None:
    logits = np.random.default_rng(2).standard_normal((6, 49_152)).astype(np.float32)
    logits *= np.float32([[0.01], [0.5], [1], [2], [4], [30]])
    for fields in FILTERS:
        args = args_of(logits, params_of(6, **fields))
        assert native(isa_library)(args).tolist() == reference(args).tolist(), fields


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 1000])
def test_rows_of_every_length_amid_garbage(size: int, isa_library: NativeLibrary) -> None:
    wide = np.full((5, size + 20), np.nan, np.float32)
    logits = wide[:, 7 : 7 + size]
    logits[:] = np.random.default_rng(size).standard_normal((5, size)) * 4
    for fields in FILTERS:
        args = args_of(logits, params_of(6, **fields), [4, 0, 0, 2, 1, 3])
        assert native(isa_library)(args).tolist() == reference(args).tolist(), fields


def test_random_numbers_at_their_ends_and_on_borders(isa_library: NativeLibrary) -> None:
    numbers = [0.0, 2**-53, 0.25 - 2**-54, 0.25, 0.25 + 2**-53, 0.5, 1 - 2**-53]
    for logits in (np.zeros((len(numbers), 4)), np.tile([0.0, -40, -np.inf, 0, 0, 0], (len(numbers), 1))):
        for fields in FILTERS:
            args = args_of(logits.astype(np.float32), params_of(len(numbers), **fields))
            args = Sample(*astuple(args)[:-1], torch.tensor(numbers, dtype=torch.float64))
            assert native(isa_library)(args).tolist() == reference(args).tolist(), fields


def test_rows_without_numbers_give_none(isa_library: NativeLibrary) -> None:
    logits = np.random.default_rng(3).standard_normal((6, VOCAB)).astype(np.float32)
    logits[0, 0] = logits[1, VOCAB - 1] = logits[2, 70] = np.nan
    logits[3, 5] = np.inf
    logits[4] = -np.inf
    for fields in FILTERS:
        found = native(isa_library)(args_of(logits * 9, params_of(6, **fields))).tolist()
        assert found[:5] == [-1] * 5 and found[5] >= 0, fields


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
