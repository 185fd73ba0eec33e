"""Settings: one tree of frozen dataclasses. Flags, environment and YAML fill the same fields.

A field that is None was left to Octavo, which settles it from the model and the platform when the engine
starts; `octavo info` prints what came out. Each field's help is the text of its flag.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from octavo.errors import ConfigError, shown

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "PlatformConfig",
    "SchedulerConfig",
    "Setting",
    "settings",
]

ENVIRONMENT_PREFIX = "OCTAVO_"


def _setting(
    default: Any,
    help: str,
    *,
    alias: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    return field(default=default, metadata={"help": help, "alias": alias, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class ModelConfig:
    """What is served."""

    model: str = _setting("demo", "folder in Hugging Face layout, .gguf file, hub name, or 'demo'")
    tokenizer: str | None = _setting(None, "folder or file of the tokenizer, where it is not the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "of activations, and of weights that are not packed; auto: the checkpoint's, where the platform has it"
    )
    max_model_len: int | None = _setting(
        None, "longest prompt and output together, in tokens; unset: the model's own", at_least=1
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _setting(
        "auto", "where weights come from; dummy: random ones, for benchmarks"
    )
    model_impl: Literal["auto", "native", "hf"] = _setting(
        "auto",
        "whose program runs the model; native: ours; hf: transformers', with our attention; auto: native where we have "
        "the family, else hf",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = _setting(
        "auto",
        "weights made small at load, in groups of 32: int8, or int4 with int8 for embedding, head and mlp.down; none: "
        "in dtype; auto: in dtype where that is given, else as the checkpoint has them: GGUF's Q8_0, Q4_0 and Q4_1 "
        "stay packed where the platform takes them",
    )
    calibration_file: str | None = _setting(
        None,
        "text in UTF-8, 512 tokens to 16 MiB, by which int4 finds the columns of weights that matter; unset: a mixed "
        "text that ships with Octavo",
    )
    seed: int = _setting(
        0, "from which the seeds of requests without one are drawn", at_least=-(2**63), at_most=2**63 - 1
    )


@dataclass(frozen=True)
class CacheConfig:
    """Paged KV memory."""

    block_size: int | None = _setting(None, "tokens a KV block; unset: the platform's preference", at_least=1)
    memory_utilization: float = _setting(
        0.9, "share of device memory for weights, workspace and KV blocks", alias=("gpu_memory_utilization",)
    )
    num_blocks_override: int | None = _setting(
        None,
        "number of KV blocks, whatever memory says",
        alias=("num_gpu_blocks_override",),
        at_least=1,
        at_most=2**31 - 1,  # block tables hold int32
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _setting(
        "auto", "of stored keys and values; auto: dtype; int8: with a scale a token and head"
    )
    enable_prefix_caching: bool = _setting(True, "reuse KV blocks of prompts that begin alike")
    swap_space: float | None = _setting(
        None,
        "GiB of host memory for preempted requests; unset: 4, or 0 where the device shares host memory",
        at_least=0,
        at_most=2**20,
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs in a step."""

    max_num_seqs: int = _setting(64, "sequences that run at once", at_least=1, at_most=2**16)
    max_num_batched_tokens: int | None = _setting(
        None, "tokens a step; unset: 2048, or max_model_len where chunked prefill is off", at_least=1, at_most=2**24
    )
    enable_chunked_prefill: bool = _setting(True, "let a long prompt run over several steps")
    scheduling_policy: Literal["fcfs", "priority", "fair"] = _setting(
        "fcfs",
        "who goes first: by arrival; by priority (lower first) and then arrival; or fair: the tenant, and its user, "
        "that was served the fewest tokens by weight",
    )
    tenant_weights: str | None = _setting(
        None, "shares under the fair policy, as NAME=WEIGHT,NAME=WEIGHT; tenants without one weigh 1"
    )
    preemption_mode: Literal["recompute", "swap"] = _setting(
        "recompute", "what happens to a request that must make room: computed again, or moved to swap_space"
    )
    speculative_method: Literal["none", "ngram"] = _setting(
        "none",
        "how next tokens are guessed, to be computed several in a step; ngram: what stood behind the last few tokens "
        "where prompt or output had them before. Which tokens come is the same",
    )
    num_speculative_tokens: int = _setting(5, "tokens guessed at once", at_least=1, at_most=64)
    prompt_lookup_max: int = _setting(
        4, "longest run of tokens that ngram looks up", alias=("ngram_prompt_lookup_max",), at_least=1, at_most=64
    )
    prompt_lookup_min: int = _setting(
        2, "shortest run of tokens that ngram looks up", alias=("ngram_prompt_lookup_min",), at_least=1, at_most=64
    )

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}: "
                "lower the one or raise the other"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices share one model."""

    tensor_parallel_size: int = _setting(1, "devices that share each layer", at_least=1)
    pipeline_parallel_size: int = _setting(1, "groups of devices that share the layers out", at_least=1)


@dataclass(frozen=True)
class PlatformConfig:
    """On what it runs."""

    platform: str | None = _setting(None, "name of the platform; unset: the available one of highest priority")
    device: int = _setting(0, "index of the device on the platform", at_least=0)
    num_threads: int | None = _setting(
        None, "host threads of kernels; unset: what affinity and cgroup allow", at_least=1, at_most=1024
    )
    strict_ops: bool = _setting(False, "refuse to start where an op would fall back to a slower implementation")
    deterministic: bool = _setting(False, "refuse a chain of ops whose rows depend on their batch mates")


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is told. `EngineConfig.of(model="demo", max_num_seqs=8)` sorts flat names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)

    @classmethod
    def of(cls, **flat: Any) -> "EngineConfig":
        """A config from flat setting names, as flags, keyword arguments and YAML give them.

        Raises:
            ConfigError: an unknown name (the nearest known ones are listed) or a value out of range.

        `speculative_config`, a mapping or its JSON, is taken as vLLM takes it; its fields are settings of their own.

        """
        if "speculative_config" in flat:
            flat = _with_speculation(flat)
        known = {name: setting for setting in settings() for name in setting.names}
        groups: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            if name not in known:
                raise ConfigError(_unknown(name, known))
            setting = known[name]
            given = groups.setdefault(setting.group, {})
            if setting.name in given:
                raise ConfigError(f"{setting.name} is given twice, also as {name}")
            given[setting.name] = setting.check(value)
        parts: dict[str, Any] = {group: part(**groups.get(group, {})) for group, part in _GROUPS.items()}
        return cls(**parts)

    @classmethod
    def load(cls, file: str | os.PathLike[str] | None = None, **flat: Any) -> "EngineConfig":
        """A config from a YAML file, the environment and keyword arguments; the later ones win."""
        given = {**_read_yaml(file), **_read_environment(os.environ)}
        return cls.of(**{**given, **flat})

    def flat(self) -> dict[str, Any]:
        """Setting name to value."""
        return {s.name: getattr(getattr(self, s.group), s.name) for s in settings()}

    def but(self, **flat: Any) -> "EngineConfig":
        """A copy with settings replaced."""
        return EngineConfig.of(**{**self.flat(), **flat})

    def unset(self) -> frozenset[str]:
        """Names of the settings that stand at None, to be settled when the engine starts."""
        return frozenset(name for name, value in self.flat().items() if value is None)


_GROUPS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "platform": PlatformConfig,
}


@dataclass(frozen=True)
class Setting:
    """One field of the tree, as a flag sees it."""

    group: str
    name: str
    type: Any
    default: Any
    help: str
    alias: tuple[str, ...]
    at_least: float | None
    at_most: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.alias)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, where they are listed."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def base_type(self) -> type:
        """bool, int, float or str, without its None."""
        if self.choices:
            return str
        inner = [t for t in get_args(self.type) if t is not type(None)]
        found = inner[0] if inner else self.type
        assert isinstance(found, type)
        return found

    def parse(self, text: str) -> Any:
        """The value that a flag's, variable's or YAML scalar's text means."""
        if self.base_type is bool:
            if text.lower() in ("1", "true", "yes", "on"):
                return True
            if text.lower() in ("0", "false", "no", "off"):
                return False
            raise ConfigError(f"{self.name} must be true or false, got {shown(text)}")
        try:
            return self.base_type(text)
        except ValueError:
            raise ConfigError(f"{self.name} must be of type {self.base_type.__name__}, got {shown(text)}") from None

    def check(self, value: Any) -> Any:
        """The value, if it is allowed.

        Raises:
            ConfigError: it is not.

        """
        if value is None and type(None) in get_args(self.type):
            return None
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{self.name} must be one of {', '.join(self.choices)}, got {shown(value)}")
            return value
        if self.base_type is float and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # one that no float holds is no float
                value = float(value)
        if self.base_type is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, self.base_type) or (isinstance(value, bool) and self.base_type is not bool):
            raise ConfigError(f"{self.name} must be of type {self.base_type.__name__}, got {shown(value)}")
        if self.at_least is not None and not value >= self.at_least:  # also where it is no number (nan)
            raise ConfigError(f"{self.name} must be at least {self.at_least}, got {shown(value)}")
        if self.at_most is not None and value > self.at_most:
            raise ConfigError(f"{self.name} must be at most {self.at_most}, got {shown(value)}")
        if self.name == "memory_utilization" and not 0 < value <= 1:
            raise ConfigError(f"memory_utilization must be over 0 and at most 1, got {shown(value)}")
        return value


def settings() -> Iterator[Setting]:
    """Every setting of the tree."""
    for group, part in _GROUPS.items():
        hints = get_type_hints(part)
        for f in fields(part):
            meta = f.metadata
            yield Setting(group, f.name, hints[f.name], f.default, **meta)


def _with_speculation(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of `speculative_config` among them."""
    given, rest = flat["speculative_config"], {k: v for k, v in flat.items() if k != "speculative_config"}
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = json.loads(given)
    if given is None:
        return rest
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a mapping or its JSON, got {shown(given)}")
    names = {
        "method": "speculative_method",
        "model": "speculative_method",  # where "[ngram]" stands for no model
        **{name: name for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")},
        "ngram_prompt_lookup_max": "prompt_lookup_max",
        "ngram_prompt_lookup_min": "prompt_lookup_min",
    }
    found: dict[str, Any] = {"speculative_method": "ngram"}
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"speculative_config has no field {shown(name)}; known are {', '.join(names)}")
        found[names[name]] = "ngram" if value == "[ngram]" else value
    aliases = {alias: setting.name for setting in settings() for alias in setting.names}
    for name in rest:
        if aliases.get(name) in found:
            raise ConfigError(f"{aliases[name]} is given twice, in speculative_config and as {name}")
    return {**found, **rest}


def _unknown(name: str, known: Mapping[str, Setting]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(sorted(known))}"
    return f"unknown setting {shown(name)}{hint}"


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        setting.name: setting.parse(environment[variable])
        for setting in settings()
        if (variable := ENVIRONMENT_PREFIX + setting.name.upper()) in environment
    }


def _read_yaml(file: str | os.PathLike[str] | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {os.fspath(file)}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: bad UTF-8, and dates that are none
        raise ConfigError(f"{os.fspath(file)} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{os.fspath(file)} must map setting names to values")
    return {key.replace("-", "_"): value for key, value in content.items()}
