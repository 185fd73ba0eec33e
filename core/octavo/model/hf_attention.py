"""Our attention in transformers' models: its attention interface leads every layer's call to us.

A model made with `IMPLEMENTATION` calls one function from each attention layer; it hands the call to the
`octavo_attention` of the module that makes it, which a program or a probe has put there. T tokens of a step.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from octavo.contract import Attention, AttentionBackend
from octavo.model.description import HfLayer

__all__ = ["IMPLEMENTATION", "PROBED", "PagedAttention", "Step", "register", "wanted"]

IMPLEMENTATION = "octavo"  # no mask is made for it: plans know who sees whom
PROBED = "octavo_probe"  # the same with masks that tell what the model wants of them

# What a layer may pass along that changes nothing here: facts of the step that plans hold, and wishes for outputs.
HARMLESS = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "layer_idx", "max_length_k", "max_length_q",
        "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
        "position_embeddings", "position_ids", "return_dict", "token_type_ids", "use_cache",
    }
)  # fmt: skip
UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal"})

_lock = threading.Lock()


@dataclass
class Step:
    """What the layers of one program share: the plans of the step under way, one a KV group."""

    plans: list[Any] = field(default_factory=list)


def register(make_mask: Callable[..., Any] | None = None) -> None:
    """Make both implementations known to transformers. Registering again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    with _lock:
        for name in (IMPLEMENTATION, PROBED):
            AttentionInterface.register(name, _attend)
        if make_mask is not None:
            AttentionMaskInterface.register(PROBED, make_mask)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    attention: Callable[..., torch.Tensor] = module.octavo_attention  # type: ignore[assignment]
    return attention(query, key, value, attention_mask, kwargs), None


def wanted(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[Attention, list[str]]:
    """The geometry that a call asks for, and what it asks for beside it that paged attention cannot give."""
    softcap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
    scale = kwargs.get("scaling")
    attention = Attention(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=max(query.shape[-1], value.shape[-1]),
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        sinks=kwargs.get("s_aux") is not None,
    )
    unknown = [
        name
        for name, given in kwargs.items()
        if name not in HARMLESS | UNDERSTOOD and given is not None and given is not False
    ]
    return attention, unknown


@dataclass(frozen=True)
class PagedAttention:
    """A layer's place in the KV cache; what `_attend` calls while a model serves."""

    layer: HfLayer
    backend: AttentionBackend
    group: int
    layer_in_group: int
    step: Step

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """[1, T, Hq, value size].

        Raises:
            RuntimeError: the call is not the one that was foreseen when the model was described.

        """
        want = self.layer.attention
        found, unknown = wanted(query, key, value, kwargs)
        is_masked = attention_mask is not None and attention_mask.ndim != 2  # of two axes: ones, for tokens there are
        if found != want or unknown or is_masked:
            raise RuntimeError(f"{self.layer.module} calls attention as {found} {unknown}, foreseen was {want}")
        sinks = kwargs.get("s_aux")
        out = query.new_empty((query.shape[2], want.num_heads, want.head_size))
        self.backend.write_attend(
            self.step.plans[self.group],
            self.layer_in_group,
            self._rows(query),
            self._rows(key),
            self._rows(value),
            out,
            None if sinks is None else sinks.detach().float().flatten(),
        )
        return out[None, ..., : self.layer.value_size]

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """[1, h, T, d] -> [T, h, head size], filled up with zeros."""
        rows = heads[0].transpose(0, 1)
        missing = self.layer.attention.head_size - rows.shape[-1]
        if missing:
            return pad(rows, (0, missing))
        return rows if rows.stride(-1) == 1 else rows.contiguous()
