"""What a platform prefers settles what the user left open; a platform without preferences takes the usual."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform

from octavo.config import EngineConfig
from octavo.contract import Capabilities
from octavo.engine.settle import settle
from octavo.errors import ConfigError

FILES = SimpleNamespace(kind="folder", name="model")
BFLOAT16_MODEL: Any = SimpleNamespace(dtype=torch.bfloat16, max_position=2048, files=FILES)
ANY = Capabilities(dtypes=(), kv_cache_dtypes=(), block_sizes=())


def settled(capabilities: Capabilities, **settings: Any) -> EngineConfig:
    return settle(EngineConfig.of(**settings), BFLOAT16_MODEL, ToyPlatform(capabilities=capabilities))


def test_a_platform_that_lists_nothing_takes_anything() -> None:
    config = settled(ANY)
    assert (config.model.dtype, config.cache.kv_cache_dtype, config.cache.block_size) == ("bfloat16", "bfloat16", 16)
    config = settled(ANY, dtype="float16", kv_cache_dtype="float32", block_size=7)
    assert (config.model.dtype, config.cache.kv_cache_dtype, config.cache.block_size) == ("float16", "float32", 7)


def test_the_first_listed_is_preferred() -> None:
    can = replace(ANY, dtypes=(torch.float16, torch.float32), kv_cache_dtypes=(torch.float32,), block_sizes=(64, 8))
    config = settled(can)
    assert (config.model.dtype, config.cache.kv_cache_dtype, config.cache.block_size) == ("float16", "float32", 64)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16 is not one of the platform's: float16"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 is not one of the platform's: float32"),
        ({"block_size": 7}, "block_size 7 is not one of the platform's: 8, 64"),
    ],
)
def test_what_is_not_listed_is_refused(settings: dict[str, Any], said: str) -> None:
    can = Capabilities(dtypes=(torch.float16,), kv_cache_dtypes=(torch.float32,), block_sizes=(64, 8))
    with pytest.raises(ConfigError, match=said):
        settled(can, **settings)
