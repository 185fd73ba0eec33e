"""From settings to an engine: the same steps for whoever runs one, in this process or in a child."""

from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.contract import Platform
from octavo.engine.embedding import EmbeddingEngine
from octavo.engine.loop import EngineCore
from octavo.engine.settle import settle
from octavo.executor.local import LocalExecutor
from octavo.hardware.choose import choose_platform, create_platform
from octavo.hardware.registry import Registry, discover
from octavo.model.describe import describe_model
from octavo.model.description import ModelDescription
from octavo.model.encoder import EncoderModel
from octavo.model.files import resolve_model
from octavo.text.grammar import GrammarCompiler
from octavo.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Prepared", "describe", "load_engine", "prepare", "tokenizer_of"]


@dataclass(frozen=True)
class Prepared:
    """A model described and every setting decided; no weights yet."""

    config: EngineConfig
    description: ModelDescription
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    platform: Platform
    registry: Registry


def describe(given: EngineConfig, *, progress: bool) -> ModelDescription:
    """What the model's files say, fetched first where they must be."""
    files = resolve_model(given.model.model, progress=progress)
    return describe_model(files, given.model.max_model_len, given.model.model_impl)


def tokenizer_of(given: EngineConfig, description: ModelDescription) -> Tokenizer:
    """The tokenizer that the user named, or the model's own."""
    own = given.model.tokenizer
    return load_tokenizer(description.files.tokenizer if own is None else Path(own))


def prepare(given: EngineConfig, *, progress: bool) -> Prepared:
    """Choose the platform, read the model's description and settle the settings.

    Raises:
        OctavoError: the platform, the model or a setting cannot serve; one line says why.

    """
    registry = discover()
    platform_info = choose_platform(registry, given.platform.platform)
    description = describe(given, progress=progress)
    platform = create_platform(platform_info, given.platform.device)
    config = settle(given, description, platform)
    tokenizer = tokenizer_of(given, description)
    grammars = GrammarCompiler(tokenizer, description.eos_token_ids)
    return Prepared(config, description, tokenizer, grammars, platform, registry)


def load_engine(prepared: Prepared, *, progress: bool) -> EngineCore | EmbeddingEngine:
    """Load the weights and make the engine that runs them.

    Raises:
        OctavoError: the weights cannot be loaded, or the KV cache does not fit.

    """
    config, description = prepared.config, prepared.description
    if isinstance(description, EncoderModel):
        return EmbeddingEngine.create(config, description, prepared.platform, progress=progress)
    executor = LocalExecutor(
        config,
        description,
        prepared.platform,
        prepared.registry,
        vocab_size=prepared.tokenizer.vocab_size,
        grammars=prepared.grammars,
        progress=progress,
    )
    return EngineCore(config, executor)
