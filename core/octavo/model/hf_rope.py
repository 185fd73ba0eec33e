"""Rope scalings that follow a batch, made to follow max_model_len."""

from typing import Any

import torch

__all__ = ["settle_rope"]


def settle_rope(model: torch.nn.Module, max_model_len: int) -> None:
    """Fix rope scalings that follow the longest sequence of a batch, as if that were the longest there may be.

    Left to itself, such a module changes all its frequencies with the batch, also for keys that are cached.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer_type, kind in named:
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            prefix, extra = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            now: Any = getattr(module, f"{prefix}inv_freq")
            make: Any = ROPE_INIT_FUNCTIONS[kind]
            inv_freq, gain = make(module.config, now.device, seq_len=max_model_len, **extra)
            module.register_buffer(f"{prefix}inv_freq", inv_freq.to(now.device), persistent=False)
            setattr(module, f"{prefix}attention_scaling", gain)
            if layer_type is None:
                module.rope_type = "default"  # type: ignore[assignment]
            else:
                kinds[layer_type] = "default"  # type: ignore[index]
