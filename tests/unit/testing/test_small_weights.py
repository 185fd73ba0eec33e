"""The kit's check of quantised weights passes who takes them, and finds who only says so."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.contract import API_VERSION, Linear, OpImpl, OpSignature, QuantizedWeight, Support
from octavo.contract.reference import linear
from octavo.testing import small_weights
from octavo.testing.bench import Bench
from octavo.testing.outcome import CheckError, NotOfferedError


def rounded(args: Linear) -> torch.Tensor:
    """As kernels do it: activations rounded to int8 in groups of 32."""
    x = torch.nn.functional.pad(args.x.float(), (0, -args.x.shape[1] % 32))
    groups = x.view(len(x), x.shape[1] // 32, 32)
    steps = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    codes = (groups / steps).round() * steps
    weight: torch.Tensor = args.weight
    bias = None if args.bias is None else args.bias.float()
    return torch.nn.functional.linear(codes.flatten(1)[:, : args.x.shape[1]], weight, bias).to(args.x.dtype)


def quantised_only(signature: OpSignature) -> Support:
    dense = signature.trait("weight_format") not in ("int8", "int4")
    return Support.no("dense weights") if dense else Support.yes()


KERNEL = OpImpl("linear", "toy", "native", rounded, quantised_only, QuantizedWeight.dequantize, api_version=API_VERSION)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """The host's platform with an op in place of its own, and formats that it says it takes."""
    made: list[Bench] = []

    def make(impl: OpImpl | None, *formats: Any) -> Bench:
        bench = Bench("cpu")
        made.append(bench)
        kind: Any = type(bench.platform)
        monkeypatch.setattr(kind, "weight_formats", lambda self: formats)
        monkeypatch.setattr(kind, "ops", lambda self: [] if impl is None else [impl])
        monkeypatch.setattr(kind, "compile", lambda self, request: None)
        return bench

    yield make
    for one in made:
        one.__exit__(None, None, None)


def test_a_kernel_that_rounds_activations_passes(bench: Callable[..., Bench]) -> None:
    assert small_weights.quantised(bench(KERNEL, "int8", "int4")) == "int8: 36 cases, int4: 72 cases"


def test_who_takes_none_is_not_asked(bench: Callable[..., Bench]) -> None:
    with pytest.raises(NotOfferedError, match="dense weights alone"):
        small_weights.quantised(bench(None))


def without_mins(weight: QuantizedWeight) -> torch.Tensor:
    return replace(weight, mins=None).dequantize() if weight.mins is not None else weight.dequantize()


def wrong_nibbles(weight: QuantizedWeight) -> torch.Tensor:
    swapped = weight.codes << 4 | weight.codes >> 4 if weight.bits == 4 else weight.codes
    return replace(weight, codes=swapped).dequantize()


@pytest.mark.parametrize(
    ("impl", "formats", "said"),
    [
        (None, ("int8",), "takes weights in int8, and none of its own linear ops does"),
        (replace(KERNEL, api_version=(0, 9)), ("int8",), "none of its own linear ops does"),
        (KERNEL, ("int3",), "must be a tuple of names among int8, int4"),
        (replace(KERNEL, prepare=without_mins), ("int4",), "is off by"),
        (replace(KERNEL, prepare=wrong_nibbles), ("int4",), "is off by"),
        (replace(KERNEL, fn=lambda args: rounded(Linear(args.x * 1.05, args.weight))), ("int8",), "is off by"),
    ],
)
def test_who_only_says_so_is_found(
    impl: OpImpl | None, formats: tuple[str, ...], said: str, bench: Callable[..., Bench]
) -> None:
    with pytest.raises(CheckError, match=said):
        small_weights.quantised(bench(impl, *formats))


def test_a_model_that_says_other_things_is_found(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_weights, "CASES", [])
    monkeypatch.setattr(small_weights, "_own_products", lambda bench, weight_format: "")
    noisy = replace(KERNEL, fn=lambda args: linear(replace_x(args)), tier="native")
    with pytest.raises(CheckError, match=r"in int8 a token is .* nats off on average, 0\.1 are allowed"):
        small_weights.quantised(bench(noisy, "int8"))


def replace_x(args: Linear) -> Linear:
    return Linear(args.x.roll(1, -1), args.weight, args.bias)
