"""A tiny model for most tests, the demo model for some; whatever was never written holds NaN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.tiny_llm import Oracle, write_tiny_llm

from octavo import LLM
from octavo.executor.worker import POISON_VARIABLE

MakeLLM = Callable[..., LLM]


@contextmanager
def poisoned() -> Iterator[None]:
    """KV blocks, the runner's buffers and torch's new tensors are filled with NaN and garbage."""
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POISON_VARIABLE, "1")
        torch.use_deterministic_algorithms(True)  # with it torch fills the memory of new tensors
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True, scope="module")
def poison() -> Iterator[None]:
    """For these tests alone: others may run in this process before and after."""
    with poisoned():
        yield


@pytest.fixture(scope="session")
def _tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    folder = tmp_path_factory.mktemp("tiny_llm")
    return folder, write_tiny_llm(folder)


@pytest.fixture(scope="session")
def tiny_folder(_tiny_model: tuple[Path, Oracle]) -> Path:
    """A folder with a random llama of two layers, 401 tokens and 512 positions; </s> and <|end|> end it."""
    return _tiny_model[0]


@pytest.fixture(scope="session")
def oracle(_tiny_model: tuple[Path, Oracle]) -> Oracle:
    """What transformers computes with the tiny model."""
    return _tiny_model[1]


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    """The tiny model with room for everybody. Tests share it and leave it without requests."""
    with poisoned():
        llm = LLM(tiny_folder, dtype="float32", num_threads=1, block_size=16, num_blocks_override=256)
    yield llm
    llm.close()


@pytest.fixture
def make_llm(tiny_folder: Path) -> Iterator[MakeLLM]:
    """Make the tiny model with other settings; closed after the test."""
    made: list[LLM] = []

    def make(model: Path | None = None, **settings: Any) -> LLM:
        defaults = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_blocks_override": 128}
        made.append(LLM(model or tiny_folder, **{**defaults, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    """The demo model in float32. Tests share it and leave it without requests."""
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 64, "num_blocks_override": 128}
    with LLM("demo", dtype="float32", num_threads=1, **settings) as llm:
        yield llm
