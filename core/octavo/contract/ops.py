"""The ops of the generic program: what each computes, its arguments, and how an implementation is offered.

An op takes one frozen args object, so that a later minor version can add a field with a default. Which
implementation serves is decided once, when the model loads, from an `OpSignature`: everything about the call
that is known before the first token. The truth of each op is in `reference.py`.

Letters: T tokens, H hidden size, I intermediate size, N output features, K input features, V vocabulary,
D head size, P positions. All tensors are on the platform's device; unless a line says so, the last axis is
contiguous and rows may be strided.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from octavo.contract.quantized import Weight
from octavo.contract.support import Support
from octavo.contract.version import FIRST_VERSION, AddedField, version_for

__all__ = [
    "OPS",
    "TIERS",
    "ActAndMul",
    "Activation",
    "Embedding",
    "FusedAddRMSNorm",
    "LayerNorm",
    "Linear",
    "OpDefinition",
    "OpImpl",
    "OpSignature",
    "RMSNorm",
    "RotaryEmbedding",
    "Sample",
    "Tier",
]

Tier = Literal["native", "portable", "reference"]
TIERS: tuple[Tier, ...] = ("native", "portable", "reference")  # in the order in which they are tried


class RMSNorm(msgspec.Struct, frozen=True):
    """y[T, H] = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), computed in float32, in x's dtype.

    `weight` is None for a norm without one. Any number of leading axes. Zhang and Sennrich 2019.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    weight_offset: float = 0.0


class FusedAddRMSNorm(msgspec.Struct, frozen=True):
    """r = x + residual, rounded to the dtype; returns (rms_norm(r), r). Inputs [T, H] may be overwritten.

    Both inputs must not be read again by the caller: an implementation may reuse either for its results.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    weight_offset: float = 0.0


class LayerNorm(msgspec.Struct, frozen=True):
    """y[T, H] = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, in float32, in x's dtype."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    weight_offset: float = 0.0


class RotaryEmbedding(msgspec.Struct, frozen=True):
    """Rotate query [T, Hq, D] and key [T, Hkv, D] in place and return them.

    `cos_sin` [P, rotary_dim] float32 holds cos of the rotary_dim / 2 angles, then sin, gain applied; row
    `positions[t]` (int64) serves token t. Dims past rotary_dim are left as they are. Su et al. 2021.
    """

    query: torch.Tensor
    key: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    interleaved: bool = False


class Activation(msgspec.Struct, frozen=True):
    """y = activation(x) by element; the name is fixed by the signature."""

    x: torch.Tensor
    activation: str


class ActAndMul(msgspec.Struct, frozen=True):
    """y[T, I] = activation(x[:, :I]) * x[:, I:] for x [T, 2 I], the gate first."""

    x: torch.Tensor
    activation: str


class Linear(msgspec.Struct, frozen=True):
    """y[T, N] = x[T, K] @ weight.T + bias. `weight` is what the implementation's `prepare` returned.

    `prepare` gets a tensor where the trait weight_format is "dense", else a `QuantizedWeight` of that format, with
    mins or without.
    """

    x: torch.Tensor
    weight: Any
    bias: torch.Tensor | None = None


class Embedding(msgspec.Struct, frozen=True):
    """y[T, H] = weight[token_ids] for weight [V, H] and token_ids [T] int64.

    Where the trait weight_format is not "dense", `weight` is a `QuantizedWeight` of that format, whose rows are
    dequantised in float32 and rounded to the dtype of the signature, `dtype`; of dense ones `dtype` is None.
    """

    token_ids: torch.Tensor
    weight: Weight
    dtype: torch.dtype | None = None


class Sample(msgspec.Struct, frozen=True):
    """ids[n] int64: a token drawn from row `rows[i]` of logits [L, V] float32, V at most 2^22.

    Which one is defined to the bit in `drawing.py`: weights are whole numbers, made by operations that round alike
    everywhere. So an implementation gives exactly those ids; -1 where the row holds NaN or its highest logit is
    infinite, and nowhere else. All is in host memory, as what a step gives is; `OpDefinition.of_output`.

    Attributes:
        logits: not written to.
        rows: [n] int64, into the rows of logits.
        temperature: [n] float64, above 0, at most 1e30.
        top_k: [n] int64; 0 or less: all.
        top_p: [n] float64 in (0, 1]; 1: all.
        min_p: [n] float64 in [0, 1]; 0: all.
        uniform: [n] float64 in [0, 1).

    """

    logits: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


_HOST = torch.empty(0).device.type  # torch's word for host memory


@dataclass(frozen=True)
class OpDefinition:
    """One op of the contract.

    Attributes:
        name: the key in `OPS`.
        args: the class of its args object, whose docstring says what it computes.
        traits: names that a signature of it carries.
        added: traits, or values of traits, that came after the first version.
        of_output: it works on what a step gave: signatures say float32 and host memory, whatever the platform's are.
        since: the first version of the contract in which it means what it means.

    """

    name: str
    args: type[msgspec.Struct]
    traits: tuple[str, ...] = ()
    added: tuple[AddedField, ...] = ()
    of_output: bool = False
    since: tuple[int, int] = FIRST_VERSION

    def signature(self, dtype: torch.dtype, device_type: str, sizes: Mapping[str, Any]) -> "OpSignature":
        """With those of the sizes that are its traits; of a platform's dtype and kind of device where these matter."""
        traits = tuple((trait, sizes[trait]) for trait in self.traits)
        if self.of_output:
            dtype, device_type = torch.float32, _HOST
        return OpSignature(self.name, dtype, device_type, traits)

    def version_for(self, signature: "OpSignature") -> tuple[int, int]:
        """The first version of the contract that knows everything the call uses."""
        return max(self.since, version_for(self.added, lambda field: signature.trait(field.name, field.default)))


_FORMATS = (AddedField("weight_format", (0, 10), "dense"),)

OPS: dict[str, OpDefinition] = {
    d.name: d
    for d in (
        OpDefinition("rms_norm", RMSNorm, ("hidden_size",)),
        OpDefinition("fused_add_rms_norm", FusedAddRMSNorm, ("hidden_size",)),
        OpDefinition("layer_norm", LayerNorm, ("hidden_size",)),
        OpDefinition("rotary_embedding", RotaryEmbedding, ("head_size", "rotary_dim", "interleaved")),
        OpDefinition("activation", Activation, ("activation",)),
        OpDefinition("act_and_mul", ActAndMul, ("activation", "width")),
        OpDefinition("linear", Linear, ("weight_format", "in_features", "out_features"), _FORMATS),
        OpDefinition("embedding", Embedding, ("hidden_size", "weight_format"), _FORMATS),
        OpDefinition("sample", Sample, ("vocab_size",), of_output=True, since=(0, 12)),
    )
}


@dataclass(frozen=True)
class OpSignature:
    """Everything about a call that is known when the model loads.

    Attributes:
        op: a key of `OPS`.
        dtype: of activations.
        device_type: torch's name for the kind of device that holds the tensors.
        traits: (name, value) pairs, the names those of the op's definition; sizes are ints.

    """

    op: str
    dtype: torch.dtype
    device_type: str
    traits: tuple[tuple[str, int | float | bool | str], ...] = ()

    def trait(self, name: str, default: Any = None) -> Any:
        """The value of a trait, or the default where the signature lacks it."""
        return dict(self.traits).get(name, default)

    def __str__(self) -> str:
        traits = "".join(f", {name}={value}" for name, value in self.traits)
        return f"{self.op}({str(self.dtype).removeprefix('torch.')}{traits})"


def _any(signature: OpSignature) -> Support:
    return Support.yes()


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one op.

    Attributes:
        op: a key of `OPS`.
        provider: who offers it, as users see it ("torch", the name of a platform or of a library).
        tier: native (kernels of the platform), portable (one source for many), reference (torch).
        fn: called with the op's args object; returns what the args class says.
        supports: whether `fn` serves a signature, and why not. A yes that raises is a fault.
        prepare: for linear, turns a weight [N, K], see `Linear`, into what `fn` wants (packing); None: as it is.
        graph_safe: whether a captured graph may contain it.
        row_invariant: whether a row's result is bitwise the same whatever the other rows and their number.
        api_version: of the contract that it was written for.
        version: of the kernels, free text; compiled artefacts are not shared between versions.

    Raises:
        TypeError, ValueError: a field is not what is said here. The core names the plugin with the text.

    """

    op: str
    provider: str
    tier: Tier
    fn: Callable[[Any], Any]
    supports: Callable[[OpSignature], Support] = _any
    prepare: Callable[[Any], Any] | None = None
    graph_safe: bool = False
    row_invariant: Support = field(default=Support.no("the implementation makes no claim"))
    api_version: tuple[int, int] = FIRST_VERSION
    version: str = ""

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(f"tier of {self.op} must be one of {', '.join(TIERS)}, got {self.tier!r}")
        for what, function in (("fn", self.fn), ("supports", self.supports), ("prepare", self.prepare)):
            if function is None and what == "prepare":
                continue
            if not _takes_one(function):
                given = getattr(function, "__qualname__", function)
                raise TypeError(f"{what} of {self.op} must take one argument, got {given}")
        if not isinstance(self.row_invariant, Support):
            raise TypeError(f"row_invariant of {self.op} must be a Support, got {self.row_invariant!r}")


def _takes_one(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        return True
    return True
