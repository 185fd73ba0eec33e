"""The native decoder in bfloat16 at every number of rows that changes how products and attention are cut.

On this processor; test_cpu_tiles.py runs this file once more, where an emulator runs tile instructions.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.family_cases import CASES
from doubles.paged_program import Paged
from doubles.tiny_models import folder_files

from octavo.contract import RowMode, Rows
from octavo.model.describe import describe_native, load_weights
from octavo_cpu.native import NativeLibrary, NativeLookup
from octavo_cpu.platform import CpuPlatform
from octavo_cpu.program import NativeProgram

NUM_ROWS = (1, 2, 3, 8, 17, 33)


def find_emulators() -> list[ctypes.CDLL]:
    """The emulator, where this process has it preloaded."""
    found = ctypes.CDLL(None)
    if not hasattr(found, "octavo_tiles_are_emulated"):
        return []
    for name in ("octavo_tile_products", "octavo_tile_configs", "octavo_tile_threads"):
        getattr(found, name).restype = ctypes.c_int64
    return [found]


@pytest.fixture
def platform(library: NativeLibrary) -> CpuPlatform:
    made = CpuPlatform(native=NativeLookup(library, "the tests' own"))
    made.set_num_threads(2)
    return made


def open_model(case: str, folder: Path, platform: CpuPlatform) -> tuple[Paged, Paged]:
    """A tiny model in bfloat16, native and as the generic program has it in float32."""
    CASES[case].save(folder)
    description = describe_native(folder_files(folder), 64)
    weights = load_weights(description, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    truth = Paged(description, weights={name: weight.float() for name, weight in weights.items()})
    paged = Paged(description, weights=weights, platform=platform, dtype=torch.bfloat16)
    assert isinstance(paged.program, NativeProgram)
    return paged, truth


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    generator: list[int] = np.random.default_rng(seed).integers(0, 160, num_tokens).tolist()
    return generator


@pytest.mark.parametrize("case", ["llama", "phi"])
def test_rows_are_the_same_at_every_number_of_rows(case: str, tmp_path: Path, platform: CpuPlatform) -> None:
    paged, truth = open_model(case, tmp_path, platform)
    prompt = prompt_of(max(NUM_ROWS))
    whole = paged.whole(prompt)
    expected = truth.whole(prompt)
    assert (whole - expected).norm() / expected.norm() < 0.02
    for num_rows in NUM_ROWS[:-1]:
        for num_threads in (1, 2):
            platform.set_num_threads(num_threads)
            assert torch.equal(paged.chunked(prompt, num_rows), whole)


def test_rows_of_a_batch_are_the_same_as_alone(tmp_path: Path, platform: CpuPlatform) -> None:
    paged, _ = open_model("llama", tmp_path, platform)
    for num_rows in NUM_ROWS:
        prompts = [prompt_of(3, seed) for seed in range(num_rows)]
        alone = [paged.whole(prompt) for prompt in prompts[:4]]
        sequences = [paged.begin(prompt) for prompt in prompts]
        paged.step([(sequence, 2) for sequence in sequences[: (num_rows + 1) // 2]])  # of which a last token is left
        shares = [(sequence, 3 - sequence.num_computed) for sequence in sequences]
        for logits, expected in zip(paged.step(shares), alone, strict=False):
            assert torch.equal(logits, expected[-len(logits) :])
        paged.end(*sequences)


def test_a_step_configures_tiles_rarely_and_releases_them(
    tmp_path: Path, platform: CpuPlatform, library: NativeLibrary
) -> None:
    paged, _ = open_model("llama", tmp_path, platform)
    best = paged.whole(prompt_of(8)).argmax(-1).numpy()
    platform.set_num_threads(1)
    counts = [(e, e.octavo_tile_products(), e.octavo_tile_configs()) for e in find_emulators()]
    rows = Rows(np.arange(8), np.full(8, RowMode.GREEDY, np.uint8))
    output = paged.program.submit(paged.batch([(paged.begin(prompt_of(8)), 8)]), rows).result()
    assert output.greedy_ids is not None
    assert np.array_equal(output.greedy_ids, best)
    num_layers = len(paged.description.spec.layers)  # type: ignore[union-attr]
    for emulator, num_products, num_configs in counts:
        assert library.isa == "amx"
        assert emulator.octavo_tile_products() > num_products
        assert emulator.octavo_tile_configs() - num_configs <= 2 * num_layers + 1  # attention has sizes of its own
        assert emulator.octavo_tile_threads() == 0
