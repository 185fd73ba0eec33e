"""The setting quantization: what it becomes, who is refused, and what an engine tells of its weights."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform
from doubles.tiny_models import Tiny, base, folder_files

from octavo.config import EngineConfig
from octavo.engine.settle import settle
from octavo.errors import ConfigError
from octavo.executor.worker import Worker
from octavo.hardware.registry import discover
from octavo.model.describe import describe_model
from octavo.model.description import NativeModel


class TakesPacked(ToyPlatform):
    """Multiplies by quantised weights, with the reference's op."""

    def __init__(self, *formats: str) -> None:
        super().__init__()
        self._formats = formats

    def weight_formats(self) -> tuple[str, ...]:
        return self._formats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    folder = tmp_path_factory.mktemp("tiny")
    Tiny("Llama", base(tie_word_embeddings=True)).save(folder)
    description = describe_model(folder_files(folder), 64)
    assert isinstance(description, NativeModel)
    return description


def settled(description: Any, *formats: str, **settings: Any) -> EngineConfig:
    return settle(EngineConfig.of(**settings), description, TakesPacked(*formats))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "auto"),
        ({"dtype": "float32"}, "none"),
        ({"dtype": "auto"}, "auto"),
        ({"quantization": "auto", "dtype": "float32"}, "none"),
        ({"quantization": "none"}, "none"),
        ({"quantization": "int8", "dtype": "float32"}, "int8"),
        ({"quantization": "int4"}, "int4"),
    ],
)
def test_whoever_names_a_dtype_gets_weights_of_it(settings: dict[str, Any], expected: str, model: NativeModel) -> None:
    assert settled(model, "int8", "int4", **settings).model.quantization == expected


@pytest.mark.parametrize(
    ("formats", "quantization", "said"),
    [
        ((), "int8", "quantization is int8, and platform toy takes dense weights alone; set it to auto or none"),
        (("int8",), "int4", "quantization is int4, and platform toy takes int8 weights alone"),
        (("int4",), "int4", "quantization is int4, and platform toy takes int4 weights alone"),
    ],
)
def test_a_platform_that_does_not_take_them(
    formats: tuple[str, ...], quantization: str, said: str, model: NativeModel
) -> None:
    with pytest.raises(ConfigError, match=said):
        settled(model, *formats, quantization=quantization)


def test_a_program_that_does_not_take_them() -> None:
    files = SimpleNamespace(kind="folder", name="model")
    foreign: Any = SimpleNamespace(dtype=torch.float32, max_position=64, files=files, architecture="bloom")
    with pytest.raises(ConfigError, match="bloom runs in transformers' own program, which takes dense weights"):
        settled(foreign, "int8", quantization="int8")
    assert settled(foreign, "int8").model.quantization == "auto"


def test_an_unknown_one_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, int8, int4, got 'awq'"):
        EngineConfig.of(quantization="awq")


@pytest.mark.parametrize(
    ("quantization", "told", "at_most"),
    [("none", "float32: 17", 1.0), ("int8", "int8: 17", 0.3), ("int4", "int4 with mins: 12, int8: 5", 0.25)],
)
def test_a_worker_tells_of_its_weights_and_counts_them(
    quantization: str, told: str, at_most: float, model: NativeModel
) -> None:
    config = settled(model, "int8", "int4", dtype="float32", quantization=quantization, max_model_len=64)
    worker = Worker(config, model, TakesPacked("int8", "int4"), discover([]))
    assert worker.facts()["weights"] == told
    dense = replace(config, model=replace(config.model, quantization="none"))
    whole = Worker(dense, model, TakesPacked("int8", "int4"), discover([])).memory_plan.weights
    assert worker.memory_plan.weights <= at_most * whole
