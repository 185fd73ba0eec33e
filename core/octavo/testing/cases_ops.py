"""One list of cases of every op: odd sizes, strided inputs, empty batches, each dtype.

Reference and faster kernels share it. A case makes its args from a seed in any dtype; `formulas` says in float64
what must come out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import (
    OPS,
    ActAndMul,
    Activation,
    Embedding,
    FusedAddRMSNorm,
    LayerNorm,
    Linear,
    OpSignature,
    RMSNorm,
    RotaryEmbedding,
    Sample,
)
from octavo.contract.reference import ACTIVATIONS, GATED_ACTIVATIONS
from octavo.testing.quantized import allowed_rounding, random_weight

__all__ = ["CASES", "DTYPES", "TOLERANCE", "Draw", "OpCase"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Largest difference over the largest true value: a few roundings of the output's own dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

Make = Callable[["Draw"], Any]


class Draw:
    """Random tensors of one dtype from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, rounded to the dtype."""
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype or self.dtype)

    def strided(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] with contiguous last axis, cut out of wider rows: what a fused projection hands on."""
        return self.normal(rows, columns + 7)[:, 3 : 3 + columns]

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Integers from 0 to high - 1, int64."""
        return torch.randint(high, shape, generator=self._generator)


@dataclass(frozen=True)
class OpCase:
    """Arguments of one op.

    Attributes:
        op: a key of `OPS`.
        label: what is particular.
        traits: of the signature.
        make: builds the args object.
        tolerance_factor: over `TOLERANCE`; above 1 only with a reason.
        slack: from args to how far each number may be off besides, an array of the result's shape; None: not at all.

    """

    op: str
    label: str
    traits: Mapping[str, Any]
    make: Make
    tolerance_factor: float = 1.0
    slack: Callable[[Any], npt.NDArray[np.float64]] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"

    def args(self, dtype: torch.dtype, seed: int = 0) -> Any:
        """Fresh arguments; the same for the same seed."""
        return self.make(Draw(seed, dtype))

    def signature(self, dtype: torch.dtype, device_type: str) -> OpSignature:
        """As the program asks for it."""
        return OPS[self.op].signature(dtype, device_type, self.traits)


def _norms() -> Iterator[OpCase]:
    for rows, size in ((1, 1), (1, 19), (3, 99), (2, 576), (19, 111), (5, 500), (2, 4096), (0, 64)):
        traits = {"hidden_size": size}
        label = f"{rows}x{size}"

        def rms(d: Draw, rows: int = rows, size: int = size) -> RMSNorm:
            return RMSNorm(d.normal(rows, size), d.normal(size), 1e-5)

        def fused(d: Draw, rows: int = rows, size: int = size) -> FusedAddRMSNorm:
            return FusedAddRMSNorm(d.normal(rows, size), d.normal(rows, size), d.normal(size), 1e-6)

        def layer(d: Draw, rows: int = rows, size: int = size) -> LayerNorm:
            return LayerNorm(d.normal(rows, size) + 1, d.normal(size), d.normal(size), 1e-5)

        yield OpCase("rms_norm", label, traits, rms)
        yield OpCase("fused_add_rms_norm", label, traits, fused)
        if size > 1:  # one number has no variance, and eps decides alone
            yield OpCase("layer_norm", label, traits, layer)
    traits = {"hidden_size": 99}
    yield OpCase("rms_norm", "strided", traits, lambda d: RMSNorm(d.strided(7, 99), d.normal(99), 1e-5))
    yield OpCase("rms_norm", "no-weight", traits, lambda d: RMSNorm(d.normal(7, 99), None, 1e-5))
    yield OpCase("rms_norm", "offset", traits, lambda d: RMSNorm(d.normal(7, 99), d.normal(99), 1e-6, 1.0))
    yield OpCase("rms_norm", "heads", {"hidden_size": 64}, lambda d: RMSNorm(d.normal(5, 3, 64), d.normal(64), 1e-6))
    yield OpCase("rms_norm", "tiny", traits, lambda d: RMSNorm(d.normal(7, 99, scale=1e-4), d.normal(99), 1e-5))
    yield OpCase("rms_norm", "float32-weight", traits, _rms_norm_with_wide_weight)
    yield OpCase(
        "fused_add_rms_norm",
        "strided-no-weight",
        traits,
        lambda d: FusedAddRMSNorm(d.strided(7, 99), d.strided(7, 99), None, 1e-5),
    )
    yield OpCase("layer_norm", "no-bias", traits, lambda d: LayerNorm(d.strided(7, 99), d.normal(99), None, 1e-5))
    yield OpCase("layer_norm", "bare", traits, lambda d: LayerNorm(d.normal(7, 99), None, None, 1e-5))
    yield OpCase("layer_norm", "offset", traits, lambda d: LayerNorm(d.normal(7, 99), d.normal(99), None, 1e-5, 1.0))


def _rms_norm_with_wide_weight(d: Draw) -> RMSNorm:
    return RMSNorm(d.normal(7, 99), d.normal(99, dtype=torch.float32), 1e-5)


def _rotary(d: Draw, rows: int, heads: tuple[int, int], size: int, rotary_dim: int, interleaved: bool) -> Any:
    angles = torch.outer(torch.arange(50.0), 10.0 ** -torch.linspace(0, 3, rotary_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    # Query and key are slices of one projection, as a fused product leaves them.
    projected = d.normal(rows, (heads[0] + 2 * heads[1]) * size)
    query = projected[:, : heads[0] * size].view(rows, heads[0], size)
    key = projected[:, heads[0] * size : (heads[0] + heads[1]) * size].view(rows, heads[1], size)
    return RotaryEmbedding(query, key, d.integers(50, rows), cos_sin, interleaved)


def _rotaries() -> Iterator[OpCase]:
    for rows, heads, size, rotary_dim in (
        (1, (1, 1), 2, 2),
        (19, (9, 3), 64, 64),
        (3, (8, 1), 80, 32),
        (5, (4, 4), 128, 128),
        (0, (4, 2), 64, 64),
    ):
        for interleaved in (False, True):

            def make(
                d: Draw,
                rows: int = rows,
                heads: tuple[int, int] = heads,
                size: int = size,
                rotary_dim: int = rotary_dim,
                interleaved: bool = interleaved,
            ) -> Any:
                return _rotary(d, rows, heads, size, rotary_dim, interleaved)

            yield OpCase(
                "rotary_embedding",
                f"{rows}x{heads[0]}/{heads[1]}x{size}-{rotary_dim}{'-interleaved' if interleaved else ''}",
                {"head_size": size, "rotary_dim": rotary_dim, "interleaved": interleaved},
                make,
            )


def _activations() -> Iterator[OpCase]:
    for name in ACTIVATIONS:
        for rows, size in ((1, 1), (3, 99), (0, 8)):

            def plain(d: Draw, name: str = name, rows: int = rows, size: int = size) -> Activation:
                return Activation(d.normal(rows, size, scale=3), name)

            yield OpCase("activation", f"{name}-{rows}x{size}", {"activation": name}, plain)
    for name in (*ACTIVATIONS, *GATED_ACTIVATIONS):
        for rows, size in ((1, 1), (1, 19), (3, 111), (17, 500), (0, 8)):

            def gated(d: Draw, name: str = name, rows: int = rows, size: int = size) -> ActAndMul:
                return ActAndMul(d.normal(rows, 2 * size, scale=3), name)

            traits = {"activation": name, "width": size}
            yield OpCase("act_and_mul", f"{name}-{rows}x{size}", traits, gated)
    traits = {"activation": "silu", "width": 50}
    yield OpCase("act_and_mul", "strided", traits, lambda d: ActAndMul(d.strided(7, 100), "silu"))


def _products() -> Iterator[OpCase]:
    for rows, k, n in ((1, 1, 1), (1, 99, 19), (3, 500, 111), (19, 64, 576), (0, 8, 8)):
        traits = {"weight_format": "dense", "in_features": k, "out_features": n}

        def linear(d: Draw, rows: int = rows, k: int = k, n: int = n) -> Linear:
            return Linear(d.normal(rows, k), d.normal(n, k))

        def biased(d: Draw, rows: int = rows, k: int = k, n: int = n) -> Linear:
            return Linear(d.strided(rows, k), d.normal(n, k), d.normal(n))

        yield OpCase("linear", f"{rows}x{k}x{n}", traits, linear)
        yield OpCase("linear", f"{rows}x{k}x{n}-strided-bias", traits, biased)
    for rows, vocab, size in ((1, 1, 1), (19, 111, 99), (3, 49, 576), (0, 5, 8)):

        def embed(d: Draw, rows: int = rows, vocab: int = vocab, size: int = size) -> Embedding:
            return Embedding(d.integers(vocab, rows), d.normal(vocab, size))

        traits = {"hidden_size": size, "weight_format": "dense"}
        yield OpCase("embedding", f"{rows}x{vocab}x{size}", traits, embed)


def _quantized() -> Iterator[OpCase]:
    """Products and lookups of quantised weights; kernels may round activations to int8 in the groups of weights."""
    kinds = (("int8", "int8", False), ("int4", "int4", False), ("int4-mins", "int4", True))
    sizes = ((1, 1, 1), (1, 99, 19), (3, 500, 111), (19, 64, 576), (2, 1536, 80), (0, 32, 8))
    for (kind, weight_format, mins), (rows, k, n) in product(kinds, sizes):

        def plain(
            d: Draw, rows: int = rows, k: int = k, n: int = n, of: str = weight_format, mins: bool = mins
        ) -> Linear:
            return Linear(d.normal(rows, k), random_weight(d.integers, n, k, of, mins=mins))

        def biased(
            d: Draw, rows: int = rows, k: int = k, n: int = n, of: str = weight_format, mins: bool = mins
        ) -> Linear:
            return Linear(d.strided(rows, k), random_weight(d.integers, n, k, of, mins=mins), d.normal(n))

        traits = {"weight_format": weight_format, "in_features": k, "out_features": n}
        yield OpCase("linear", f"{kind}-{rows}x{k}x{n}", traits, plain, slack=allowed_rounding)
        yield OpCase("linear", f"{kind}-{rows}x{k}x{n}-strided-bias", traits, biased, slack=allowed_rounding)

        def embed(
            d: Draw, rows: int = rows, size: int = k, vocab: int = n, of: str = weight_format, mins: bool = mins
        ) -> Embedding:
            weight = random_weight(d.integers, vocab, size, of, mins=mins)
            return Embedding(d.integers(vocab, rows), weight, d.dtype)

        traits = {"hidden_size": k, "weight_format": weight_format}
        yield OpCase("embedding", f"{kind}-{rows}x{n}x{k}", traits, embed)


def _samples() -> Iterator[OpCase]:
    """Rows of even, spread and equal logits, some masked; every filter by itself and all together."""
    wishes = (
        (0, 1.0, 0.0),
        (0, 0.9, 0.0),
        (3, 1.0, 0.0),
        (40, 0.7, 0.0),
        (0, 1.0, 0.05),
        (0, 0.95, 0.01),
        (7, 0.5, 0.1),
    )

    def make(d: Draw, vocab: int, scale: float, steps: float) -> Sample:
        num = len(wishes)
        logits = d.normal(num, vocab + 7, scale=scale, dtype=torch.float32)[:, 3 : 3 + vocab]
        if steps:
            logits = (logits * steps).round() / steps
        logits[d.integers(5, num, vocab) == 0] = -torch.inf
        logits[:, vocab // 2] = 3 * scale  # so that no row is masked as a whole
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*wishes, strict=True))
        temperature = d.normal(num, dtype=torch.float64).abs() + 0.2
        uniform = torch.linspace(0.03, 0.97, num, dtype=torch.float64)
        return Sample(logits, d.integers(num, num), temperature, top_k, top_p.double(), min_p.double(), uniform)

    for vocab in (1, 99, 1003, 5000):
        for label, scale, steps in (("spread", 3.0, 0.0), ("even", 0.1, 0.0), ("equals", 2.0, 2.0)):

            def case(d: Draw, vocab: int = vocab, scale: float = scale, steps: float = steps) -> Sample:
                return make(d, vocab, scale, steps)

            yield OpCase("sample", f"{label}-{vocab}", {"vocab_size": vocab}, case)

    def nobody(d: Draw) -> Sample:
        args = make(d, 99, 1.0, 0.0)
        return Sample(*(getattr(args, name)[:0] for name in Sample.__struct_fields__))

    yield OpCase("sample", "no-rows", {"vocab_size": 99}, nobody)


CASES: tuple[OpCase, ...] = (
    *_norms(),
    *_rotaries(),
    *_activations(),
    *_products(),
    *_quantized(),
    *_samples(),
)
