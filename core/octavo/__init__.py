"""Octavo serves large language models on whatever accelerator is there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from octavo.errors import OctavoError
    from octavo.sampling_params import SamplingParams
    from octavo.structured_output import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]

# Resolved on first use: a plugin that imports octavo.contract must not pull in the engine.
_HOMES = {
    "LLM": "octavo.engine.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "CompletionOutput": "octavo.engine.outputs",
    "EmbeddingOutput": "octavo.engine.outputs",
    "EngineConfig": "octavo.config",
    "OctavoError": "octavo.errors",
    "RequestOutput": "octavo.engine.outputs",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutput": "octavo.structured_output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
