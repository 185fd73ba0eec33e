"""Rotary positions by config: theta, scaling and the rotated share of a head become inverse frequencies.

Arithmetic is float32 and in transformers' order, so that angles agree to the last bit. Scaling that depends on
the length (dynamic, longrope) is settled once, by the length served: rotated keys stay in the cache, so a request
cannot change its frequencies on the way.
"""

import math
from typing import Any

import torch

from octavo.contract import Rope
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView

__all__ = ["FULL", "SLIDING", "num_positions", "rope", "rope_parameters", "yarn_gain"]

FULL = "full_attention"  # kinds of layers, as configs call them
SLIDING = "sliding_attention"
DEFAULT_THETA = 10_000.0
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


def rope(
    c: ConfigView, max_model_len: int, head_size: int, kind: str | None = None, *, interleaved: bool = False
) -> Rope:
    """The rope of a head.

    Args:
        c: the config.
        max_model_len: tokens of the longest request.
        head_size: dims of a head, of which the config's partial factor may rotate a share.
        kind: of the layer ("full_attention", ...), where the config has a rope for each kind.
        interleaved: neighbouring dims rotate together.

    Raises:
        UnsupportedError: a scaling that is not known.

    """
    p = rope_parameters(c, kind)
    scaling = p["rope_type"]
    dim = int(head_size * (p.get("partial_rotary_factor") or 1.0))
    theta = float(p["rope_theta"])
    most = c.get("max_position_embeddings", max_model_len)
    trained = int(p.get("original_max_position_embeddings") or most)
    factor: Any = p.get("factor")
    gain = 1.0
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    if scaling == "dynamic":
        longest = max(max_model_len, most)
        theta *= ((factor * longest / most) - (factor - 1)) ** (dim / (dim - 2))
    frequencies = 1.0 / theta**exponents
    if scaling == "linear":
        frequencies /= factor
    elif scaling == "llama3":
        frequencies = _llama3(frequencies, p, factor, trained)
    elif scaling == "yarn":
        factor = factor or most / trained
        frequencies = _yarn(theta**exponents, p, factor, trained, theta)
        m, m_all = p.get("mscale"), p.get("mscale_all_dim")
        gain = yarn_gain(factor, m) / yarn_gain(factor, m_all) if m and m_all else yarn_gain(factor)
    elif scaling == "longrope":
        factors = p["long_factor" if max_model_len > trained else "short_factor"]
        frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
        factor = factor or most / trained
        gain = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    elif scaling == "factors":  # a GGUF file carries what llama3 scaling comes to
        frequencies /= torch.tensor(p["factors"], dtype=torch.float32)
    elif scaling not in KINDS:
        raise UnsupportedError(f"rope scaling {scaling!r} is not known, known are {', '.join(KINDS)}")
    return Rope(tuple(frequencies.tolist()), float(p.get("attention_factor") or gain), interleaved)


def rope_parameters(c: ConfigView, kind: str | None = None) -> dict[str, Any]:
    """The rope's parameters in today's spelling (rope_type, rope_theta, ...) from any generation of config."""
    given = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if isinstance(given.get(kind), dict):
        p = dict(given[kind])
    elif kind == SLIDING and "rope_local_base_freq" in c:  # scaling is for the layers that see all
        p = {"rope_theta": c.rope_local_base_freq}
    else:
        p = dict(given)
    scaling = p.get("rope_type") or p.get("type") or "default"
    if scaling == "su" or (scaling == "yarn" and "long_factor" in p):  # what longrope was called at first
        scaling = "longrope"
    p["rope_type"] = scaling
    p["rope_theta"] = p.get("rope_theta") or c.get("rope_theta") or c.get("default_rope_theta", DEFAULT_THETA)
    p.setdefault("partial_rotary_factor", c.get("partial_rotary_factor"))
    if "original_max_position_embeddings" in c:
        p["original_max_position_embeddings"] = c.original_max_position_embeddings
    return p


def num_positions(c: ConfigView, max_model_len: int | None) -> int:
    """How many positions the model serves: what its config says, or what its rope is scaled to.

    Dynamic scaling blurs short texts where it stretches to long ones, so it stretches only as far as asked.
    """
    most = c.max_position_embeddings
    p = rope_parameters(c, FULL)
    if p["rope_type"] == "yarn" and p.get("factor") and p.get("original_max_position_embeddings"):
        return int(max(most, p["original_max_position_embeddings"] * p["factor"]))
    if p["rope_type"] == "dynamic" and max_model_len:
        return int(max(most, min(max_model_len, most * p["factor"])))
    return int(most)


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin by (Peng et al. 2023, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequencies: torch.Tensor, p: dict[str, Any], factor: float, trained: int) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between interpolated."""
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelength - low) / (high - low)
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(powers: torch.Tensor, p: dict[str, Any], factor: float, trained: int, theta: float) -> torch.Tensor:
    """Dims that turn often within the trained length are kept, those that turn little are stretched."""
    dim = 2 * len(powers)

    def turning(turns: float) -> float:
        """The dim that turns so often within the trained length."""
        return (dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = turning(p.get("beta_fast") or 32), turning(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
