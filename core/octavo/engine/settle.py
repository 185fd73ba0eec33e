"""Filling in what the user left open, from the model and the platform, and refusing what cannot be."""

from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.contract import Capabilities, Platform
from octavo.errors import ConfigError
from octavo.model.calibration import calibration_text
from octavo.model.description import ModelDescription, NativeModel
from octavo.model.precision import NEEDS

__all__ = ["settle", "torch_dtype"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_STEP_TOKENS = 2048
DEFAULT_SWAP_GIB = 4.0


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a setting's name ("bfloat16")."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def settle(config: EngineConfig, description: ModelDescription, platform: Platform) -> EngineConfig:
    """The config with every open setting decided.

    The user's word goes first, then the platform's preference, then the model's own and ours.

    Raises:
        ConfigError: a setting contradicts the model, the platform, or another setting.

    """
    capabilities = platform.capabilities()
    flat = config.flat()
    asked = {name: value for name, value in flat.items() if value not in (None, "auto")}
    flat |= {name: value for name, value in platform.config_defaults(asked).items() if name not in asked}
    flat["dtype"] = _dtype(flat["dtype"], description, capabilities)
    flat["kv_cache_dtype"] = _kv_dtype(flat["kv_cache_dtype"], flat["dtype"], capabilities)
    flat["max_model_len"] = _max_model_len(flat["max_model_len"], description)
    flat["block_size"] = _block_size(flat["block_size"], capabilities)
    flat["max_num_batched_tokens"] = _step_tokens(flat)
    if flat["swap_space"] is None:
        swaps = flat["preemption_mode"] == "swap"
        flat["swap_space"] = DEFAULT_SWAP_GIB if swaps and not capabilities.unified_memory else 0.0
    if flat["preemption_mode"] == "swap" and not flat["swap_space"]:
        raise ConfigError(
            f"preemption_mode is swap and swap_space is 0; set swap_space to some GiB of host memory"
            f"{' (device and host share theirs here, so there is no default)' if capabilities.unified_memory else ''}"
        )
    kind = {"folder": "safetensors"}.get(description.files.kind, description.files.kind)
    if flat["load_format"] not in ("auto", "dummy", kind):
        raise ConfigError(
            f"load_format is {flat['load_format']}, and {description.files.name} has {kind} files; set it to auto"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if flat[name] != 1:
            raise ConfigError(f"{name} is {flat[name]}, and this version runs a model on one device: set it to 1")
    if flat["quantization"] == "auto" and "dtype" in asked:
        flat["quantization"] = "none"  # whoever names a dtype of weights is given weights of that dtype
    _check_quantization(flat["quantization"], description, platform)
    if flat["calibration_file"] is not None:
        if flat["quantization"] != "int4":
            raise ConfigError(
                f"calibration_file is set and quantization is {flat['quantization']}: int4 alone is calibrated; "
                "set quantization to int4, or unset calibration_file"
            )
        calibration_text(flat["calibration_file"])
    return EngineConfig.of(**flat)


def _check_quantization(quantization: str, description: ModelDescription, platform: Platform) -> None:
    needed, taken = NEEDS.get(quantization, ()), platform.weight_formats()
    if not set(needed) <= set(taken):
        raise ConfigError(
            f"quantization is {quantization}, and platform {platform.name} takes "
            f"{' and '.join(taken) or 'dense'} weights alone; set it to auto or none"
        )
    if needed and not isinstance(description, NativeModel):
        raise ConfigError(
            f"quantization is {quantization}, and {description.architecture} runs in transformers' own program, which "
            "takes dense weights; set it to auto or none"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(given: str, description: ModelDescription, capabilities: Capabilities) -> str:
    allowed = [_name(dtype) for dtype in capabilities.dtypes]
    if given == "auto":
        own = _name(description.dtype)
        return own if own in allowed or not allowed else allowed[0]
    if allowed and given not in allowed:
        raise ConfigError(f"dtype {given} is not one of the platform's: {', '.join(allowed)}")
    return given


def _kv_dtype(given: str, dtype: str, capabilities: Capabilities) -> str:
    allowed = [_name(kv) for kv in capabilities.kv_cache_dtypes]
    if given == "auto":
        return dtype if dtype in allowed or not allowed else allowed[0]
    if allowed and given not in allowed:
        raise ConfigError(f"kv_cache_dtype {given} is not one of the platform's: {', '.join(allowed)}")
    return given


def _max_model_len(given: int | None, description: ModelDescription) -> int:
    if given is None:
        return description.max_position
    if given > description.max_position:
        raise ConfigError(
            f"max_model_len is {given}, and the model was made for {description.max_position} positions; "
            "lower max_model_len"
        )
    return given


def _block_size(given: int | None, capabilities: Capabilities) -> int:
    sizes = capabilities.block_sizes
    if given is None:
        return sizes[0] if sizes else DEFAULT_BLOCK_SIZE
    if sizes and given not in sizes:
        raise ConfigError(f"block_size {given} is not one of the platform's: {', '.join(map(str, sorted(sizes)))}")
    return given


def _step_tokens(flat: dict[str, Any]) -> int:
    given, longest, num_seqs = flat["max_num_batched_tokens"], flat["max_model_len"], flat["max_num_seqs"]
    if flat["enable_chunked_prefill"]:
        return int(given or max(DEFAULT_STEP_TOKENS, num_seqs))
    if given is not None and given < longest:
        raise ConfigError(
            f"max_num_batched_tokens is {given} and a prompt may have {longest} (max_model_len); "
            "raise the one, lower the other, or set enable_chunked_prefill"
        )
    return int(given or max(DEFAULT_STEP_TOKENS, longest + num_seqs))
